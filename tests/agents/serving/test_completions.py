"""What clients are answered: the engine's own tokens and log-probabilities, whole or in parts."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest

from agent_peft.agents.serving.conversation import text_prompt
from agent_peft.policies.engine import load_sampler
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.policies.thinking import forced_places
from agent_peft.seeding import derive
from agent_peft.types import Message

from .conftest import CLIENT, USER, post
from .templates import HERMES, QWEN, policy_of, script, tokens_of

openai = pytest.importorskip("openai")


class Alone:
    """A conversation of one action, for the engine's own call."""

    def __init__(self, prompt, seed):
        self.prompt, self.seed = prompt, seed

    def act(self, action, logprobs, room):
        self.tokens, self.logprobs = list(action), list(logprobs)


def own(policy, prompt, seed=0, **keys):
    """The engine's tokens and log-probabilities for one prompt."""
    one = Alone(prompt, seed)
    sampler_of(policy).generate([one], SamplingConfig(max_tokens=600, **keys))
    return one.tokens, one.logprobs


sampler_of = cache(load_sampler)


def opening(policy, text="1+2="):
    return policy.chat.opening([Message("user", text)])


def chunks_of(answer):
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


SAMPLINGS = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 5},
)


@pytest.mark.parametrize("keys", SAMPLINGS)
def test_the_official_client_gets_the_engines_tokens_and_logprobs(serving, policies, keys):
    client = openai.OpenAI(base_url=f"{serving().url}/v1", api_key="none", max_retries=0)
    for name, policy in policies.items():
        tokens, logprobs = own(policy, opening(policy), seed=3, max_new_tokens=24, **keys)
        extra = {key: value for key, value in keys.items() if key == "top_k"}
        answer = client.chat.completions.create(
            model=name,
            messages=USER,
            max_completion_tokens=24,
            seed=3,
            logprobs=True,
            top_logprobs=2,
            extra_body={"return_token_ids": True, **extra},
            **{key: value for key, value in keys.items() if key != "top_k"},
        )
        (choice,) = answer.choices
        assert choice.token_ids == tokens
        assert answer.prompt_token_ids == opening(policy)
        assert [one.logprob for one in choice.logprobs.content] == pytest.approx(logprobs, abs=1e-4)
        assert choice.message.content == policy.chat.decode_action(tokens)
        assert choice.finish_reason == ("stop" if tokens[-1] in policy.chat.end_of_turn else "length")
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, len(tokens))
        for one in choice.logprobs.content:
            best = [other.logprob for other in one.top_logprobs]
            assert (
                1 <= len(best) <= 2 and best == sorted(best, reverse=True) and best[0] >= one.logprob - 1e-4
            )


def test_adapter_and_base_draw_differently(serving, policies):
    url = serving().url
    texts = [
        post(url, model=name, messages=USER, max_tokens=24, temperature=0).json()["choices"][0]["message"]
        for name in policies
    ]
    assert texts[0] != texts[1]
    names = [model["id"] for model in CLIENT.get(f"{url}/v1/models").json()["data"]]
    assert names == ["trained", "base"]
    assert CLIENT.get(f"{url}/v1/models/base").json()["id"] == "base"
    assert post(url, model="other", messages=USER).json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "ls"}}]])
def test_a_stream_is_the_whole_answer_in_parts(serving, policies, tools):
    url = serving().url
    body = {
        "messages": USER, "max_tokens": 40, "seed": 5, "n": 3, "logprobs": True, "return_token_ids": True,
        "stop": ["a", "7"], **({"tools": tools} if tools else {}),
    }  # fmt: skip
    whole = post(url, **body).json()
    chunks = chunks_of(post(url, **body, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1]["usage"] == whole["usage"] and not chunks[-1]["choices"]
    for choice in whole["choices"]:
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert parts[0]["delta"]["role"] == "assistant"
        assert "".join(part["delta"].get("content", "") for part in parts) == choice["message"]["content"]
        assert [t for part in parts for t in part.get("token_ids", [])] == choice["token_ids"]
        told = [one["logprob"] for part in parts for one in (part["logprobs"] or {"content": ()})["content"]]
        expected = [one["logprob"] for one in choice["logprobs"]["content"]]
        assert told == pytest.approx(expected, abs=1e-4)
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == [choice["finish_reason"]]
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]


def test_answers_are_those_of_the_classes_of_openai(serving):
    """Its client does not check what it parses, so each answer is validated here, in strict mode."""
    from openai import types

    url, keys = serving().url, {"max_tokens": 24, "seed": 5, "n": 2, "return_token_ids": True}
    chat = keys | {"messages": USER, "logprobs": True, "top_logprobs": 2}
    text = keys | {"prompt": ["ab", "cd"], "logprobs": 2}
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = chunks_of(post(url, **chat, **streamed))
    parts = chunks_of(post(url, "completions", **text, **streamed))
    for choice in (choice for part in parts for choice in part["choices"]):
        choice["finish_reason"] = choice["finish_reason"] or "stop"  # null in a stream, which the class lacks
    for kind, answers in (
        (types.chat.ChatCompletion, [post(url, **chat).json()]),
        (types.chat.ChatCompletionChunk, chunks),
        (types.Completion, [post(url, "completions", **text).json(), *parts]),
        (types.Model, CLIENT.get(f"{url}/v1/models").json()["data"]),
    ):
        assert answers
        for answer in answers:
            kind.model_validate_json(json.dumps(answer), strict=True)


def test_choices_are_seeded_and_a_stop_string_is_no_part_of_the_text(serving, policies):
    policy = policies["trained"]
    keys = {"max_new_tokens": 60, "stop": ("a", "7")}
    seeds = (8, *(derive(8, "choice", member) for member in (1, 2, 3)))
    expected = [own(policy, opening(policy), seed, **keys)[0] for seed in seeds]
    answer = post(
        serving().url, messages=USER, max_tokens=60, seed=8, n=4, stop=["a", "7"], return_token_ids=True
    ).json()
    assert [choice["token_ids"] for choice in answer["choices"]] == expected
    stopped = 0
    for choice in answer["choices"]:
        text = policy.chat.decode_action(choice["token_ids"])
        cut = min((text.find(stop) for stop in "a7" if stop in text), default=None)
        assert choice["message"]["content"] == text[:cut]
        if cut is not None:
            stopped += 1
            assert choice["finish_reason"] == "stop" and cut == len(text) - 1
    assert stopped


def test_continuations_of_texts_and_tokens(serving, policies):
    policy, url = policies["trained"], serving().url
    tokens, logprobs = own(policy, policy.chat.tokenizer.encode("ab"), 4, max_new_tokens=16)
    body = {"seed": 4, "logprobs": 1, "return_token_ids": True}
    ids = policy.chat.tokenizer.encode("ab")
    for prompt in ("ab", ids, ["ab"], [ids]):
        (choice,) = post(url, "completions", prompt=prompt, **body).json()["choices"]
        assert choice["token_ids"] == tokens and choice["prompt_token_ids"] == ids
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(logprobs, abs=1e-4)
        assert "".join(choice["logprobs"]["tokens"]).startswith(choice["text"])
    chunks = chunks_of(post(url, "completions", prompt=["ab", "cd"], stream=True, **body))
    parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == 0]
    assert [t for part in parts for t in part["token_ids"]] == tokens
    offsets = [offset for part in parts for offset in part["logprobs"]["text_offset"]]
    assert offsets == sorted(offsets) and len(offsets) == len(tokens)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    (choice,) = client.completions.create(model="trained", prompt="ab", seed=4, logprobs=0).choices
    assert choice.logprobs.token_logprobs == pytest.approx(logprobs, abs=1e-4)


def test_equal_prompts_of_one_request_have_seeds_of_their_own(serving, policies):
    policy = policies["trained"]
    ids = policy.chat.tokenizer.encode("ab")
    seeds = (8, *(derive(8, "choice", choice) for choice in range(1, 6)))
    expected = [own(policy, ids, seed, max_new_tokens=16)[0] for seed in seeds]
    body = {"prompt": ["ab"] * 3, "n": 2, "seed": 8, "max_tokens": 16, "return_token_ids": True}
    choices = post(serving().url, "completions", **body).json()["choices"]
    assert [choice["token_ids"] for choice in choices] == expected
    assert len({tuple(tokens) for tokens in expected}) > 1


def test_texts_and_chats_are_encoded_one_after_the_other(policies, monkeypatch):
    """Whether special tokens are split is a state of the tokenizer, which two threads would share."""
    policy = policies["trained"]
    inside: list[int] = []
    most: list[int] = []
    encode = type(policy.chat.tokenizer).encode

    def slowly(self, *arguments, **keys):
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.002)
        tokens = encode(self, *arguments, **keys)
        inside.pop()
        return tokens

    monkeypatch.setattr(type(policy.chat.tokenizer), "encode", slowly)
    with ThreadPoolExecutor(4) as threads:
        ways = [lambda: text_prompt("1+2=", policy), lambda: opening(policy)] * 10
        list(threads.map(lambda way: way(), ways))
    assert max(most) == 1


@pytest.mark.slow
def test_32_clients_at_once_share_the_rows(serving, policies):
    policy = policies["trained"]
    running = serving(rows=8, most=32)
    expected = [
        own(policy, opening(policy, f"{i}+{i}="), i, max_new_tokens=24, temperature=[0, 1][i % 2])[0]
        for i in range(32)
    ]

    def ask(i):
        message = {"role": "user", "content": f"{i}+{i}="}
        keys = {"max_tokens": 24, "seed": i, "temperature": [0, 1][i % 2], "return_token_ids": True}
        answer = post(running.url, model=["trained", None][i % 2], messages=[message], **keys)
        return answer.json()["choices"][0]["token_ids"]

    most = 0
    with ThreadPoolExecutor(32) as threads:
        asked = [threads.submit(ask, i) for i in range(32)]
        while not all(future.done() for future in asked):
            most = max(most, running.service.rows)
            time.sleep(0.001)
    assert [future.result() for future in asked] == expected
    assert most == 8
    assert not running.host.replies.under_way


def test_an_echo_has_the_log_probabilities_of_the_prompt(policies, serving):
    """As lm-eval asks: a sum over the continuation, and whether each of its tokens is the likeliest."""
    url, policy = serving().url, policies["trained"]
    tokens = opening(policy)
    prompts = [tokens, [*tokens, *own(policy, tokens, temperature=0.0, max_new_tokens=5)[0]]]
    for most in (0, 1):
        keys = {"max_tokens": most, "temperature": 0.0, "logprobs": 2, "echo": True, "return_token_ids": True}
        answer = post(url, "completions", prompt=prompts, **keys).json()
        for prompt, choice in zip(prompts, answer["choices"], strict=True):
            found = choice["logprobs"]
            assert len(found["tokens"]) == len(prompt) + most and len(choice["token_ids"]) == most
            assert choice["text"].startswith("".join(found["tokens"][: len(prompt)]))
            assert (found["token_logprobs"][0], found["top_logprobs"][0]) == (None, None)
            scores = sampler_of(policy).score(prompt, SamplingConfig())
            assert found["token_logprobs"][1 : len(prompt)] == pytest.approx(scores, abs=1e-4)
            assert all(len(top) == 2 for top in found["top_logprobs"][1 : len(prompt)])
        pairs = zip(found["token_logprobs"], found["top_logprobs"], strict=True)
        greedy = [top is not None and value > max(top.values()) - 1e-4 for value, top in pairs]
        assert all(greedy[len(tokens) :]) and not all(greedy[1 : len(tokens)])
        assert answer["usage"]["completion_tokens"] == 2 * most
    refused = post(url, "completions", prompt=tokens, max_tokens=0)
    assert refused.status_code == 400 and "needs echo: true" in refused.text


def test_a_server_closes_a_thought_only_where_there_are_marks(serving):
    refused = post(serving().url, messages=USER, max_thinking_tokens=4)
    assert refused.status_code == 400 and "a mark that opens a thought" in refused.text


def test_a_thought_that_is_too_long_is_closed(serving, tmp_path):
    policy = policy_of(tmp_path, QWEN.replace("CALL", HERMES))
    url, prompt = serving(thinker=policy).url, opening(policy)
    script(policy, len(prompt), tokens_of(policy, "<think>abcdefgh"))
    keys = {"max_thinking_tokens": 3, "temperature": 0.0, "return_token_ids": True}
    answer = post(url, messages=USER, logprobs=True, **keys).json()["choices"][0]
    assert answer["message"]["reasoning_content"] == "abc" and answer["message"]["content"] == "efgh"
    places = forced_places(policy.chat, 3, prompt, answer["token_ids"])
    assert [answer["logprobs"]["content"][place]["logprob"] for place in places] == [0.0]
    # as engine.kind: server asks
    other = post(url, "completions", prompt=prompt, max_tokens=30, **keys).json()["choices"][0]
    assert other["token_ids"] == answer["token_ids"]
