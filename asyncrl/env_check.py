"""Does an environment work? Runs it for a few prompts with a scripted model and says in plain words what is wrong.

`asyncrl envs check TARGET` runs it in a process of its own (env_trial.py), since an environment may hang or end its
process; tests call `check`. No engine and no model: what the environment calls a reference is played against it and
must score full marks, nonsense must score less, and the masks are compared with what the scripted model really said.
"""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

import asyncrl.envs
from asyncrl import keys
from asyncrl.chat import Chat
from asyncrl.env import Env
from asyncrl.models import tiny_tokenizer
from asyncrl.registry import ENVS
from asyncrl.scripted import OutOfScript, Scripted, byte_tokenizer, play
from asyncrl.settings import import_all, load
from asyncrl.types import NOT_SAMPLED, Episode, Prompt

NONSENSE = "zzz?"
MAX_TURNS = 200
SLOW_S = 1.0
LIMIT_S = 30.0
"""Default bound of every single step: building, reading prompts, one rollout."""
OURS_S = 120.0
"""Least bound of a step that is not the environment's own: the first import of big libraries takes a while."""
MARKS = {"error": "WRONG", "warning": "  hmm", "ok": "   ok"}
Level = Literal["error", "warning", "ok"]


class Finding(msgspec.Struct, frozen=True, tag=True):
    """One thing that was looked at."""

    level: Level
    text: str

    def __str__(self) -> str:
        return f"{MARKS[self.level]}  {self.text}"


class Step(msgspec.Struct, frozen=True, tag=True):
    """What is tried next."""

    what: str
    ours: bool = False
    """It is not the environment that takes the time: bounded by OURS_S at least."""


Told = Finding | Step


class Report(msgspec.Struct, kw_only=True):
    """Everything that was found about one environment."""

    target: str
    limit_s: float = LIMIT_S
    tell: Callable[[Told], None] = lambda told: None
    """Hears of each step and finding at once."""
    findings: list[Finding] = []

    @property
    def ok(self) -> bool:
        return all(f.level != "error" for f in self.findings)

    def add(self, level: Level, text: str) -> None:
        self.findings.append(Finding(level, text))
        self.tell(self.findings[-1])

    def step(self, what: str, *, ours: bool = False) -> None:
        self.tell(Step(what, ours))

    @property
    def verdict(self) -> str:
        wrong = sum(f.level == "error" for f in self.findings)
        says = "works" if not wrong else f"does not work: {wrong} thing{'s' * (wrong > 1)} wrong"
        return f"{self.target} {says}"

    def __str__(self) -> str:
        return "\n".join([*map(str, self.findings), self.verdict])


class Broken(Exception):
    """A check that cannot go on; its text is a finding."""


def check(
    target: str,
    *,
    build: Callable[[], Env] | None = None,
    num_prompts: int = 4,
    imports: Sequence[str] = (),
    limit_s: float = LIMIT_S,
    tell: Callable[[Told], None] = lambda told: None,
) -> Report:
    """Check the environment called `target` (a name or an import path), with its defaults or as `build` makes it.

    `imports` are modules or files that register it; they are imported here and, once more, in a fresh process.
    `limit_s` bounds what can be bounded from inside this process: coroutines, not code that blocks.

    Never raises for what is wrong with the environment: that is the report.
    """
    report = Report(target=target, limit_s=limit_s, tell=tell)
    try:
        report.step("building it")
        env = _built(target, build, imports)
        report.add("ok", f"{type(env).__name__} is built")
        _fresh_process(report, target, imports)
        prompts = _prompts(report, env, num_prompts)
        asyncio.run(_rollouts(report, env, prompts))
    except Broken as broken:
        report.add("error", str(broken))
    return report


def _built(target: str, build: Callable[[], Env] | None, imports: Sequence[str]) -> Env:
    with _blamed("it cannot be built"):
        import_all(imports)
        cls = ENVS.get(target)
        if not issubclass(cls, Env):
            raise Broken(f"{cls.__name__} must subclass asyncrl.Env")
        env = build() if build is not None else cls()
        again = keys.convert(msgspec.to_builtins(env), cls, section="env")
    if msgspec.to_builtins(again) != msgspec.to_builtins(env):
        raise Broken("its fields do not survive being written to config.yaml and read back, which every process does")
    return env


def _fresh_process(report: Report, target: str, imports: Sequence[str]) -> None:
    """Generators and reward workers import it anew, without torch."""
    script = "import sys, json; target, imports, sys.path[:] = json.loads(sys.argv[1]); "
    script += "from asyncrl.registry import ENVS, import_user_module; [import_user_module(m) for m in imports]; "
    script += "ENVS.get(target); print('torch' in sys.modules)"
    command = [sys.executable, "-c", script, json.dumps([target, list(imports), sys.path])]
    report.step("importing it in a fresh process", ours=True)  # it was imported before, within the bound
    bound_s = max(OURS_S, report.limit_s)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=bound_s, check=False)
    except subprocess.TimeoutExpired:
        raise Broken(f"importing it in a fresh process takes longer than {bound_s:g} s") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it ended without a word"]
        raise Broken(f"a fresh process cannot import it: {lines[-1]}")
    if done.stdout.strip().endswith("True"):
        report.add(
            "warning", "importing it imports torch, in the replay server and reward workers too: import it later"
        )
    else:
        report.add("ok", "a fresh process imports it, without torch")


def _prompts(report: Report, env: Env, num: int) -> list[Prompt]:
    """The first prompts, checked: types, ids, what travels, the same again, the same from the middle."""
    started = time.perf_counter()
    report.step("reading its first prompts")
    with _blamed("prompts() fails"):
        env.check()
        prompts = list(islice(env.prompts(), num))
    seconds = time.perf_counter() - started
    if not prompts:
        raise Broken("prompts() yields nothing")
    for position, prompt in enumerate(prompts):
        if not isinstance(prompt, Prompt):
            raise Broken(f"prompts() must yield asyncrl.Prompt, got {type(prompt).__name__}")
        if prompt.id != position:
            raise Broken(f"prompt ids must be positions: the prompt at position {position} has id {prompt.id}")
        _travels(report, prompt)
    report.step("reading its first prompts a second time")
    with _blamed("prompts() fails the second time"):
        if list(islice(env.prompts(), num)) != prompts:
            raise Broken("prompts() gives other prompts the second time: a resumed run would not see the same data")
        middle = len(prompts) // 2
        if list(islice(env.prompts(middle), num - middle)) != prompts[middle:]:
            raise Broken(
                f"prompts({middle}) does not go on where prompts() would be: a resumed run would lose its place"
            )
    report.add("ok", f"prompts: {len(prompts)} read in {seconds:.2f} s, resumable, the same each time")
    return prompts


def _travels(report: Report, prompt: Prompt) -> None:
    """Prompts go to generators as JSON-like values."""
    try:
        there = msgspec.msgpack.decode(msgspec.msgpack.encode(prompt), type=Prompt)
    except (TypeError, msgspec.MsgspecError) as error:
        raise Broken(f"prompt {prompt.id} cannot travel: target and metadata must be JSON values ({error})") from None
    if there != prompt:
        report.add("warning", f"prompt {prompt.id} changes on its way to a generator (tuples become lists, keys text)")


async def _rollouts(report: Report, env: Env, prompts: list[Prompt]) -> None:
    report.step("loading a tokenizer", ours=True)
    _chat()
    report.step("reference()")
    with _blamed("reference() fails"):
        references = [(p, env.reference(p)) for p in prompts]
    known = [(p, r) for p, r in references if r is not None]
    for prompt, reference in known:
        played, episode, seconds = await _played(report, env, prompt, reference, "its reference response")
        _masks(played, episode, prompt)
        if not math.isclose(episode.reward, env.full_marks, abs_tol=1e-6):
            more = "; if those are full marks, set `full_marks: ClassVar = ...` in the class"
            raise Broken(
                f"prompt {prompt.id}: its own reference response scores {episode.reward:g}, not {env.full_marks:g}"
                f"; the response was {reference!r}, the target {prompt.target!r}"
                + (more if episode.reward > env.full_marks else "")
            )
    if known:
        report.add("ok", f"rewards: {len(known)} reference responses score {env.full_marks:g}")
        observed = int((~episode.loss_mask).sum())
        report.add("ok", f"masks: what was sampled is trained, {observed} shown tokens of the last episode are not")
        report.add("ok", f"timing: the last rollout took {seconds:.3f} s, {len(played.calls)} turns")
    else:
        report.add("warning", "it has no reference(prompt): full marks cannot be checked")
    await _nonsense(report, env, prompts, has_references=bool(known))
    await _lengths(report, env, known or [(p, NONSENSE) for p in prompts])
    _siblings(report, env, prompts[0], [episode, episode] if known else [])


async def _nonsense(report: Report, env: Env, prompts: list[Prompt], *, has_references: bool) -> None:
    """What a model says at first: noise and nothing. It must score, and less than full marks."""
    scores = []
    for script in (NONSENSE, ""):
        for prompt in prompts[:2]:
            played, episode, _ = await _played(report, env, prompt, _limited(script), f"the response {script!r}")
            _masks(played, episode, prompt)
            scores.append(episode.reward)
    if has_references and min(scores) >= env.full_marks:
        raise Broken(f"nonsense scores {scores[0]:g} too: the reward tells nothing apart")
    report.add("ok", f"nonsense scores {min(scores):g} to {max(scores):g}")


async def _lengths(report: Report, env: Env, scripts: list[tuple[Prompt, Any]]) -> None:
    """Whether a run with the tiny model, whose tokens are characters, would drop every group as too_long."""
    with _blamed("its defaults for the tiny model cannot be read"):
        config = load(None, {"env.name": report.target})
    seq_len, limit = config.training.seq_len, config.generation.max_tokens
    report.step("loading the tiny model's tokenizer", ours=True)
    chat = Chat(tokenizer=tiny_tokenizer())
    needs = []
    for prompt, reference in scripts[:2]:
        script = _limited(reference) if reference == NONSENSE else reference
        played, _, _ = await _played(report, env, prompt, script, "the tokens of the tiny model", chat=chat)
        needs.append(max((len(call.prompt_ids) + limit for call in played.calls), default=0))
    if needs and min(needs) > seq_len:
        enough = 1 << (max(needs) - 1).bit_length()
        report.add(
            "warning",
            f"a run with the tiny model, the default, would drop every group as too_long: with a response of up to "
            f"generation.max_tokens {limit} a conversation takes {min(needs)} tokens (characters), and "
            f"training.seq_len is {seq_len}; --training.seq-len {enough} is enough for these",
        )


@cache
def _chat() -> Chat:
    """One token per byte and a chat template: any text, no model. Made before anything is timed."""
    return Chat(tokenizer=byte_tokenizer())


def _limited(text: str) -> Callable[[str], str]:
    turns = 0

    def reply(context: str) -> str:
        nonlocal turns
        turns += 1
        if turns > MAX_TURNS:
            raise OutOfScript(f"after {MAX_TURNS} turns the environment still asks: bound the number of turns")
        return text

    return reply


async def _played(
    report: Report, env: Env, prompt: Prompt, script: Any, what: str, *, chat: Chat | None = None
) -> tuple[Scripted, Episode, float]:
    """One rollout with its time."""
    rollout = f"rollout of prompt {prompt.id} with {what}"
    report.step(rollout)
    started = time.perf_counter()
    try:
        with _blamed(f"{rollout} fails"):
            played, episode = await asyncio.wait_for(play(env, prompt, script, chat=chat or _chat()), report.limit_s)
    except TimeoutError:
        raise Broken(f"{rollout} takes longer than {report.limit_s:g} s") from None
    seconds = time.perf_counter() - started
    if not isinstance(episode, Episode):
        raise Broken(f"rollout must return asyncrl.Episode, got {type(episode).__name__}")
    own_rollout = type(env).rollout is not Env.rollout
    if own_rollout and seconds > SLOW_S:
        report.add("warning", f"a rollout without a model took {seconds:.1f} s; what blocks belongs into score()")
    elif seconds > SLOW_S:
        report.add("warning", f"score() took {seconds:.1f} s; generation.reward_timeout_s ends it after 30 s")
    return played, episode, seconds


def _masks(played: Scripted, episode: Episode, prompt: Prompt) -> None:
    """The episode is made of exactly the tokens the model was given and said, and trains what it said."""
    size = len(episode.token_ids)
    for name in ("logprobs", "versions", "loss_mask"):
        if len(getattr(episode, name)) != size:
            raise Broken(f"prompt {prompt.id}: {name} has {len(getattr(episode, name))} entries for {size} tokens")
    mask = np.asarray(episode.loss_mask)
    if mask.dtype != bool:
        raise Broken(f"prompt {prompt.id}: loss_mask must be boolean, got {mask.dtype}")
    whole = [*map(int, episode.prompt_ids), *map(int, episode.token_ids)]
    spoken = np.zeros(len(whole), bool)
    for turn, call in enumerate(played.calls, 1):
        given = [*map(int, call.prompt_ids), *map(int, call.token_ids)]
        if whole[: len(given)] != given:
            raise Broken(
                f"prompt {prompt.id}, turn {turn}: the episode's tokens are not those the model was given and sampled; "
                "was text encoded again? Conversation keeps them"
            )
        spoken[len(call.prompt_ids) : len(given)] = True
    spoken = spoken[len(episode.prompt_ids) :]
    if (mask & ~spoken).any():
        raise Broken(
            f"prompt {prompt.id}: {int((mask & ~spoken).sum())} tokens are trained that the model did not sample"
        )
    if size and not mask.any():
        raise Broken(f"prompt {prompt.id}: no token is trained")
    if (np.asarray(episode.versions)[~spoken] != NOT_SAMPLED).any():
        raise Broken(f"prompt {prompt.id}: tokens that were not sampled must have version {NOT_SAMPLED}")
    _parts(episode, prompt)


def _parts(episode: Episode, prompt: Prompt) -> None:
    if not math.isfinite(episode.reward):
        raise Broken(f"prompt {prompt.id}: the reward is {episode.reward}")
    if episode.rewards and not math.isclose(sum(episode.rewards.values()), episode.reward, abs_tol=1e-6):
        raise Broken(f"prompt {prompt.id}: the named rewards {episode.rewards} do not add up to {episode.reward:g}")


def _siblings(report: Report, env: Env, prompt: Prompt, episodes: list[Episode]) -> None:
    if not episodes or type(env).score_group is Env.score_group:
        return
    report.step("score_group()")
    with _blamed("score_group fails"):
        scored = env.score_group(episodes, prompt)
    if len(scored) != len(episodes):
        raise Broken(f"score_group must return every sibling, got {len(scored)} of {len(episodes)}")
    report.add("ok", "score_group returns every sibling")


class _blamed:
    """Turns what the environment raises into a finding: it is the environment that is being tried."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, (Broken, TimeoutError)):
            where = _last_line(trace)
            raise Broken(f"{self.what}: {type(error).__name__}: {error}{where}") from error


def _last_line(trace: Any) -> str:
    """Where in the environment's own code it happened."""
    own = [f for f in traceback.extract_tb(trace) if is_theirs(f.filename)]
    return f" ({own[-1].filename}:{own[-1].lineno})" if own else ""


def is_theirs(filename: str) -> bool:
    """Code of the environment, or of what it uses: neither ours nor the standard library's."""
    known = (asyncrl.__file__, asyncrl.envs.__file__, traceback.__file__)
    folders = tuple(str(Path(file).parent) for file in known)
    return "site-packages" in filename or not filename.startswith((*folders, "<"))
