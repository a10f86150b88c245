"""Tokens in, tokens out: a conversation is one stream of ids, and only what was sampled is trained."""

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from asyncrl.chat import Chat
from asyncrl.env import Conversation, Env, checked
from asyncrl.models import tiny_tokenizer
from asyncrl.scripted import CHAT_TEMPLATE, Scripted, byte_tokenizer
from asyncrl.types import NOT_SAMPLED, Episode

CORPUS = ["the answer is forty two", "the tool says 42", "42 is the answer", "answer the tool", "<|im_end|>"] * 20


def merging_tokenizer() -> Any:
    """A BPE that was trained on whole sentences, spaces included: it merges across every seam it can."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|im_end|>", "<|im_start|>"]
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=special)
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


MERGING = merging_tokenizer()


def talk(
    tokenizer: Any, prompt: Any, turns: list[tuple[str, str]], last: str, **limits: int
) -> tuple[Scripted, Episode]:
    async def run() -> tuple[Scripted, Episode]:
        generate = Scripted(Env(), [r for r, _ in turns] + [last], chat=Chat(tokenizer=tokenizer), **limits)
        conversation = Conversation(generate, prompt)
        for _, answer in turns:
            await conversation.generate()
            conversation.reply(answer)
        await conversation.generate()
        return generate, conversation.episode(1.0)

    return asyncio.run(run())


def test_the_tokenizer_of_this_test_merges_across_the_seam() -> None:
    """Otherwise the tests below would prove nothing."""
    apart = MERGING.encode("the ans") + MERGING.encode("wer is forty two")
    assert MERGING.encode("the answer is forty two") != apart


words = st.sampled_from(["the ans", "wer is", " forty", "two", "the tool ", "says 4", "2", ""])


@settings(max_examples=40, deadline=None)
@given(turns=st.lists(st.tuples(words, words), max_size=3), last=words, chat=st.booleans())
def test_sampled_ids_are_trained_as_they_were_sampled(turns: list[tuple[str, str]], last: str, chat: bool) -> None:
    prompt: Any = [{"role": "user", "content": "the ans"}] if chat else "the ans"
    generate, episode = talk(MERGING, prompt, turns, last)
    sampled = np.concatenate([c.token_ids for c in generate.calls])
    assert (episode.token_ids[episode.loss_mask] == sampled).all()
    whole = [*episode.prompt_ids, *episode.token_ids]
    for call in generate.calls:  # each completion was conditioned on exactly the ids that are trained before it
        assert list(call.prompt_ids) == whole[: len(call.prompt_ids)]
    assert list(generate.calls[-1].prompt_ids) + list(generate.calls[-1].token_ids) == whole


@settings(max_examples=20, deadline=None)
@given(turns=st.lists(st.tuples(words, words), min_size=1, max_size=3), last=words)
def test_what_the_policy_was_shown_is_never_trained(turns: list[tuple[str, str]], last: str) -> None:
    _, episode = talk(MERGING, [{"role": "user", "content": "hi"}], turns, last)
    shown = ~episode.loss_mask
    assert shown.any()
    assert (episode.versions[shown] == NOT_SAMPLED).all()
    assert (episode.versions[~shown] >= 0).all()
    assert (episode.logprobs[shown] == 0).all()


def test_a_conversation_reads_as_the_template_would_have_written_it() -> None:
    tokenizer = byte_tokenizer()
    _, episode = talk(tokenizer, [{"role": "user", "content": "a"}], [("b", "c")], "d")
    messages = [
        {"role": r, "content": c} for r, c in (("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    ]
    text = tokenizer.decode([*episode.prompt_ids, *episode.token_ids])
    assert text + "\n" == tokenizer.apply_chat_template(messages, tokenize=False)


def test_a_reply_that_was_cut_off_is_closed_before_the_next_turn() -> None:
    tokenizer = byte_tokenizer()
    _, episode = talk(tokenizer, [{"role": "user", "content": "a"}], [("long reply", "c")], "d", max_tokens=4)
    assert "long<|im_end|>\n<|im_start|>user\nc" in tokenizer.decode(episode.token_ids)


def test_plain_text_conversations_need_no_template() -> None:
    _, episode = talk(tiny_tokenizer(), "guess:", [("50", "higher\n")], "60")
    assert tiny_tokenizer().decode(episode.token_ids) == "50<|eos|>higher\n60<|eos|>"


def test_observations_after_the_last_reply_are_left_out() -> None:
    async def run() -> Episode:
        conversation = Conversation(Scripted(Env(), "x"), "p")
        await conversation.generate()
        conversation.reply("never answered")
        return conversation.episode(0.0)

    episode = asyncio.run(run())
    assert episode.loss_mask.all()
    assert episode.metadata["turns"] == 1


def test_a_model_without_template_gets_plain_roles() -> None:
    chat = Chat(tokenizer=tiny_tokenizer())
    assert chat.is_plain
    assert "hello" in chat.tokenizer.decode(chat.encode([{"role": "user", "content": "hello"}]))


def test_the_system_prompt_is_put_before_messages_that_have_none() -> None:
    chat = Chat(tokenizer=byte_tokenizer(), system_prompt="be brief")
    assert "be brief" in chat.tokenizer.decode(chat.encode([{"role": "user", "content": "a"}]))
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "a"}]
    assert "be brief" not in chat.tokenizer.decode(chat.encode(own))


def test_the_end_of_a_turn_is_a_stop_token_even_when_it_is_not_eos() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = "<|pad|>"
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    chat = Chat(tokenizer=tokenizer)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert set(chat.stop_ids) == {tokenizer.eos_token_id, end}
    after_end, after_eos, cut = (
        chat.turn([{"role": "user", "content": "x"}], after=a) for a in (end, chat.pad_id, None)
    )
    assert after_end == after_eos == cut[1:]


def test_a_tokenizer_without_eos_is_refused() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no EOS"):
        Chat(tokenizer=tokenizer)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), "1", None, {}, {"a": None}, [1.0]])
def test_a_score_that_is_no_number_is_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match="reward"):
        checked(bad)


def test_numbers_of_any_kind_are_scores() -> None:
    assert checked(True) == 1.0
    assert checked(np.float32(0.5)) == 0.5
    assert checked({"a": 1, "b": np.int64(2)}) == {"a": 1.0, "b": 2.0}
