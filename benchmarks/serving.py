"""32 clients at once at ``agent-peft serve-policy``, next to the engine's own call on the same prompts.

    python benchmarks/serving.py [--model smollm2-135m] [--clients 32] [--tokens 64] [--rounds 3]
    [--threads 2] [--other URL --other-model NAME --other-group PGID]

Each client sends one request of the round: a short question, temperature 1, its own seed. The engine's
own call gets the same tokens, seeds and limits, so both draw the same tokens, which is counted. Ways
alternate: the engine's own in this process, whole answers of the server, and streamed ones. The server is a
process of its own; the clients are threads of this one. ``--other`` names a further OpenAI-compatible server,
such as ``vllm serve``, which gets the same requests. ``--other-group``, the number of its process group,
stops it while the others run, because vLLM waits for work in a busy loop. The program prints a table, and
writes benchmarks/results/serving.json.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import torch
from measuring import OneTurn, command_line, policy_server, show, skipped, table, tiny_model, write

from agent_peft.policies.engine import load_sampler
from agent_peft.policies.engine.base import EngineConfig, Sampler
from agent_peft.policies.loading import load_policy
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.types import Message

OWN, WHOLE, STREAMED, OTHER = "the engine's own", "served", "served, streamed", "other server"
MAX_TOKENS = 2048


@dataclass
class Reply(OneTurn):
    """A conversation of one action, and a client's answer."""

    first: float = 0.0  # seconds until the first token
    last: float = 0.0


@dataclass
class Way:
    """What was measured of one way."""

    seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    equal: int = 0  # replies with the engine's own tokens
    replies: list[Reply] = field(default_factory=list)


def questions(number: int, clients: int) -> list[str]:
    return [f"Round {number}. What is {i} + {number + 2 * i}? Explain your answer." for i in range(clients)]


def own(sampler: Sampler, texts: Sequence[str], tokens: int) -> list[Reply]:
    replies = [Reply(sampler.chat.opening([Message("user", text)]), i) for i, text in enumerate(texts)]
    sampler.generate(replies, SamplingConfig(max_new_tokens=tokens, max_tokens=MAX_TOKENS))
    return replies


def ask(client: httpx.Client, url: str, body: dict[str, Any]) -> Reply:
    begun, reply = time.perf_counter(), Reply()
    if not body.get("stream"):
        answer = client.post(f"{url}/chat/completions", json=body)
        answer.raise_for_status()
        reply.action = answer.json()["choices"][0]["token_ids"]
        reply.first = reply.last = time.perf_counter() - begun
        return reply
    drawn: list[int] = []
    with client.stream("POST", f"{url}/chat/completions", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    drawn += choice.get("token_ids") or []
                reply.first = reply.first or (time.perf_counter() - begun if drawn else 0.0)
    reply.action, reply.last = drawn, time.perf_counter() - begun
    return reply


def served(url: str, model: str, texts: Sequence[str], tokens: int, stream: bool) -> list[Reply]:
    limits = httpx.Limits(max_connections=None)
    with (
        httpx.Client(timeout=600, trust_env=False, limits=limits) as client,
        ThreadPoolExecutor(len(texts)) as threads,
    ):
        same = {"model": model, "max_tokens": tokens, "stream": stream, "return_token_ids": True}
        bodies = [
            {**same, "messages": [{"role": "user", "content": text}], "seed": i}
            for i, text in enumerate(texts)
        ]
        return list(threads.map(lambda body: ask(client, url, body), bodies))


@contextmanager
def stopped(group: int | None) -> Iterator[None]:
    """Stop a process group for a while."""
    try:
        if group is not None:
            os.killpg(group, signal.SIGSTOP)
        yield
    finally:
        if group is not None:
            os.killpg(group, signal.SIGCONT)


def main() -> None:
    given = command_line(
        __doc__,
        quick={"clients": 2, "tokens": 4, "rounds": 1, "threads": 1, "model": tiny_model},
        model="smollm2-135m",
        clients=32,
        tokens=64,
        rounds=3,
        threads=2,
        other=str,  # address of another server, with /v1
        other_model="model",
        other_group=int,  # process group of that server
    )
    if given.other is None:
        skipped("another server: --other names none")
    torch.set_num_threads(given.threads)
    policy = load_policy(given.model, lora=None, dtype="float32", device="cpu")
    sampler = load_sampler(policy, EngineConfig(rows=given.clients))
    ways = {OWN: Way(), WHOLE: Way(), STREAMED: Way(), **({OTHER: Way()} if given.other else {})}
    expected: list[Reply] = []
    options = ("--rows", str(given.clients), "--max-tokens", str(MAX_TOKENS), "--dtype", "float32")
    with policy_server(f"model={given.model}", *options, threads=given.threads) as url:
        calls: dict[str, Callable[[list[str]], list[Reply]]] = {
            OWN: lambda texts: own(sampler, texts, given.tokens),
            WHOLE: lambda texts: served(url, "model", texts, given.tokens, stream=False),
            STREAMED: lambda texts: served(url, "model", texts, given.tokens, stream=True),
            OTHER: lambda texts: served(given.other, given.other_model, texts, given.tokens, stream=False),
        }
        for number in range(-1, given.rounds):
            texts = questions(number, given.clients)
            for name, way in ways.items():
                with stopped(None if name == OTHER else given.other_group):
                    begin = time.perf_counter()
                    replies = calls[name](texts)
                    seconds = time.perf_counter() - begin
                if name == OWN:
                    expected = replies
                if number >= 0:  # the first round warms up
                    pairs = zip(replies, expected, strict=True)
                    way.seconds.append(seconds)
                    way.tokens += sum(len(reply.action) for reply in replies)
                    way.replies += replies
                    way.equal += sum(list(reply.action) == list(one.action) for reply, one in pairs)
    results, rows = {}, []
    for name, way in ways.items():
        rate, base = (w.tokens / sum(w.seconds) for w in (way, ways[OWN]))
        first, last = (
            statistics.median(times) if any(times := [getattr(r, key) for r in way.replies]) else None
            for key in ("first", "last")
        )
        first = first if name == STREAMED else None
        speed = {"tokens_per_second": rate, "of_own": rate / base, "seconds": way.seconds}
        times = {"median_first_token_s": first, "median_reply_s": last}
        results[name] = {**speed, **times, "equal": way.equal, "replies": len(way.replies)}
        rows.append((name, f"{rate:.0f}", rate / base, f"{way.equal}/{len(way.replies)}", first, last))
    title = f"{given.model}, {given.clients} clients, up to {given.tokens} tokens each"
    show(table("way|tokens/s|of the own|equal replies|first token s|whole reply s", rows, title))
    settings = {name: value for name, value in vars(given).items() if name != "results"}
    write(given.results / "serving.json", {"settings": settings, "ways": results})


if __name__ == "__main__":
    main()
