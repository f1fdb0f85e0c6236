"""A budget for the thoughts of a reply: what closes them, and what the sampler draws after it."""

from __future__ import annotations

import pytest

from agent_peft.policies.engine.base import EngineConfig
from agent_peft.policies.engine.local import LocalEngine
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.policies.thinking import forced_places
from agent_peft.policies.tokenization import ChatTokenizer
from agent_peft.types import AgentPeftError, TrustError
from tests.agents.serving.templates import HERMES, MARKS, QWEN, policy_of, script, tokens_of
from tests.policies.engine.test_local import Talk, own_logprobs
from tests.policies.test_native import chat_of

TEMPLATE = QWEN.replace("CALL", HERMES)


def encoded(chat: ChatTokenizer, text: str) -> list[int]:
    return chat.tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("before", "action", "forced"),
    [
        ("", "<think>abcd</think>e", ""),
        ("", "<think>abcde</think>f", None),  # the sampler would have forced the mark one token earlier
        ("", "ab<think>cdef</think>g", "</think>"),
        ("<think>\n", "abcd</think>e", "</think>"),
        ("<think>\n", "abc</think>d<think>e</think>f", "</think>"),  # all thoughts of a reply together
        ("<think>\n", "ab</think>cdefgh", ""),
        ("<think>\n\n</think>\n\n", "abcdefgh", ""),
        ("typed <think> before<|im_end|>\n<|im_start|>assistant\n", "abcdefgh", ""),
    ],
)
def test_the_closing_mark_is_forced_where_the_budget_ends(before, action, forced):
    chat = chat_of(TEMPLATE)
    tokens = encoded(chat, action)
    if forced is None:
        with pytest.raises(TrustError, match=r"longer than sampling.max_thinking_tokens: 4"):
            forced_places(chat, 4, encoded(chat, before), tokens)
        return
    places = forced_places(chat, 4, encoded(chat, before), tokens)
    shown = chat.decode_action([tokens[place] for place in places])
    ends_by_itself = "abcd</think>" in action and not before
    assert shown == ("</think>" if ends_by_itself else forced)


def test_a_mark_of_several_tokens_is_forced_token_by_token():
    chat = chat_of(TEMPLATE, MARKS[:2])
    tokens = encoded(chat, "ab<think>cdef</think>g")
    assert forced_places(chat, 4, [], tokens) == tuple(range(13, 21))


def test_typed_marks_open_no_thought():
    chat = chat_of(TEMPLATE)
    typed = [encoded(chat, letter)[0] for letter in "<think>abcdefgh"]
    assert forced_places(chat, 2, [], typed) == ()


def test_the_engine_closes_a_thought_and_reads_the_mark(tmp_path):
    """What follows is drawn given the forced mark, at the same places and with the same uniforms."""
    policy = policy_of(tmp_path, TEMPLATE)
    prompt, wish = encoded(policy.chat, "<think>\n"), tokens_of(policy, "abcdefgh")
    script(policy, len(prompt), wish)
    for temperature in (1.0, 0.0):  # also with drafts
        sampling = SamplingConfig(
            temperature=temperature, top_k=1, max_new_tokens=12, max_tokens=90, max_thinking_tokens=3
        )
        talk = Talk(prompt, seed=1)
        LocalEngine(policy, EngineConfig()).generate([talk, Talk(prompt, seed=2)], sampling)
        (action,) = talk.actions
        close = encoded(policy.chat, "</think>")
        assert list(action) == [*wish[:3], *close, *wish[4:]]
        assert forced_places(policy.chat, 3, prompt, action) == (3,)
        assert talk.logprobs[0][3] == 0.0
        own = own_logprobs(policy, talk, sampling).tolist()
        assert talk.logprobs[0][4:] == pytest.approx(own[4:], abs=1e-5)


def test_a_limit_without_effect_and_a_model_without_thoughts_are_refused(tmp_path, make_policy):
    talk, limits = Talk([1, 5, 6], seed=0), {"max_new_tokens": 6, "max_tokens": 60}
    engine = LocalEngine(make_policy(), EngineConfig())
    with pytest.raises(AgentPeftError, match=r"a mark that opens a thought .*; remove the key"):
        engine.generate([talk], SamplingConfig(max_thinking_tokens=3, **limits))
    with pytest.raises(AgentPeftError, match=r"max_thinking_tokens: 6 has no effect within .*: 6"):
        engine.generate([talk], SamplingConfig(max_thinking_tokens=6, **limits))
