"""Two environments of one's own: keep the vowels of a word, in one turn and with a second chance.

asyncrl envs check my_env.vowels:Vowels
asyncrl train --env my_env.vowels:Vowels --env.length 6
"""

from itertools import count

from asyncrl import Conversation, Env, Prompt
from asyncrl.env import seeded


class Vowels(Env):
    """Keep the vowels of a word, in order."""

    length: int = 5
    """Letters of the word."""

    def prompts(self, start=0):
        for i in count(start):  # the same at any position, whatever `start` is
            word = "".join(seeded(self.seed, i).choices("abcdeiou", k=self.length))
            yield Prompt(id=i, prompt=f"vowels {word}=", target="".join(c for c in word if c in "aeiou"))

    def score(self, text, prompt):  # runs in a process of its own, with a timeout
        return {"exact": float(text.strip() == prompt.target), "length": 0.1 * (len(text) == len(prompt.target))}

    full_marks = 1.1

    def reference(self, prompt):  # for `asyncrl envs check`
        return prompt.target

    def demonstrations(self, start=0):  # for the warm-up of the tiny model: the format, not the task
        for prompt in self.prompts(start):
            yield prompt.prompt, seeded("other", prompt.id).choice(["ae", "iou", "a", "eo"])


class VowelsTalk(Vowels):
    """The same, told once whether the first answer was right."""

    async def rollout(self, prompt, generate):
        talk = Conversation(generate, prompt.prompt)
        first = await talk.generate()
        if first.text.strip() == prompt.target or talk.truncated:
            return talk.episode(await generate.score(first.text, prompt))
        talk.reply(" no, again:")  # shown to the model and never trained
        second = await talk.generate()
        score = await generate.score(second.text, prompt)
        return talk.episode({name: value / 2 for name, value in score.items()})
