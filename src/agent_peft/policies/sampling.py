"""The sampling distribution, which the sampler uses token by token, and the trainer over whole trajectories;
and the strings that end an action.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Annotated

from pydantic import Field

from agent_peft.config import Config
from agent_peft.lazy_torch import Tensor, torch
from agent_peft.seeding import derive

# of an evaluation's sampling: where it sets none, those of the stage that it follows
LIMITS = ("max_new_tokens", "max_tokens", "max_thinking_tokens", "stop")
# how tokens are drawn: of no effect where demonstrations are scored
DISTRIBUTION = ("temperature", "top_p", "top_k", "min_p")


class SamplingConfig(Config):
    """How actions are drawn. Temperature 0 is the argmax (evaluation only: it has no density to train on)."""

    temperature: float = Field(
        default=1.0, ge=0.0, description="divides the logits; 0 takes the most likely token (evaluation only)"
    )
    top_p: float = Field(
        default=1.0,
        gt=0.0,
        le=1.0,
        description="keep the likeliest tokens whose probabilities reach this sum",
    )
    top_k: int = Field(default=0, ge=0, description="keep this many of the likeliest tokens; 0 keeps all")
    min_p: float = Field(
        default=0.0,
        ge=0.0,
        le=1.0,
        description="keep the tokens that have at least this share of the likeliest one's probability",
    )
    max_new_tokens: int = Field(default=128, ge=1, description="maximum tokens of one action")
    max_tokens: int = Field(
        default=1024, ge=2, description="maximum tokens of one episode, observations included"
    )
    max_thinking_tokens: int | None = Field(
        default=None,
        ge=1,
        description="maximum tokens of the thoughts of one action: then the sampler closes the thought, by "
        "tokens that are read and never trained; null sets no limit",
    )
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(), description="an action also ends when one of these appears in its text"
    )

    @property
    def truncates(self) -> bool:
        """Whether top-p, top-k or min-p make the support smaller than the vocabulary."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


def log_distribution(logits: Tensor, sampling: SamplingConfig, keep: Tensor | None = None) -> Tensor:
    """Log-probabilities (..., V) in fp32 nats of the sampling distribution: temperature, then min-p (Nguyen
    et al. 2024), then top-k, then top-p (Holtzman et al. 2020), in vLLM's order.

    Tokens outside the support get -inf. The most likely token is always inside.

    Args:
        keep: (...) int64 tokens that stay in the support in spite of the filter. The trainer passes the
            sampled tokens: an update may have moved one of them out of the support, and its gradient must
            stay finite.
    """
    return _filtered(logits, sampling, keep).log_softmax(-1)


def _filtered(logits: Tensor, sampling: SamplingConfig, keep: Tensor | None = None) -> Tensor:
    """Logits (..., V) in fp32 of the sampling distribution, -inf outside its support."""
    logits = logits.float()
    if sampling.temperature > 0.0 and sampling.temperature != 1.0:
        logits = logits / sampling.temperature
    if sampling.truncates:
        values, order = logits.sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(logits.shape[-1], device=logits.device)
        inside = torch.ones_like(values, dtype=torch.bool)
        if sampling.top_k > 0:
            inside &= rank < sampling.top_k
        if sampling.min_p > 0.0:
            inside &= values >= values[..., :1] + math.log(sampling.min_p)
        if sampling.top_p < 1.0:
            p = values.masked_fill(~inside, -torch.inf).softmax(-1)
            inside &= (p.cumsum(-1) - p) < sampling.top_p  # the token that crosses top_p is still inside
            inside |= rank == 0  # a top_p below the smallest number of fp32 is 0 there
        inside = torch.zeros_like(inside).scatter(-1, order, inside)
        if keep is not None:
            inside = inside.scatter(-1, keep.unsqueeze(-1), True)
        logits = logits.masked_fill(~inside, -torch.inf)
    return logits


def draw(logits: Tensor, uniforms: Tensor, sampling: SamplingConfig) -> tuple[Tensor, Tensor]:
    """Tokens (B,) and their log-probabilities (B,) in nats, by inverting the distributions of logits (B, V)
    at ``uniforms`` (B,) in [0, 1).

    A row's token depends on its own logits and its own uniform, and not on the rest of the batch.
    """
    p = _filtered(logits, sampling).softmax(-1)
    tokens = p.argmax(-1) if sampling.temperature == 0.0 else invert(p, uniforms)
    return tokens, p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).log()


def invert(p: Tensor, uniforms: Tensor) -> Tensor:
    """Tokens (B,) at which the running sums of ``p`` (B, V) pass ``uniforms`` (B,) of their totals. A token
    of probability 0 is never drawn.

    First the block of a token is found, then the token in it, so that most running sums are short. They are
    in fp64: in fp32 the error of a running sum over 50,000 small probabilities exceeds many of them.
    """
    # about the square root; a power of two divides most vocabularies without remainder
    size = 1 << (p.shape[-1].bit_length() // 2)
    if rest := -p.shape[-1] % size:
        p = torch.nn.functional.pad(p, (0, rest))
    blocks = p.view(p.shape[0], -1, size)
    ends = blocks.sum(-1).double().cumsum(-1)
    target = uniforms.to(ends).unsqueeze(-1) * ends[:, -1:]
    block = _passed(ends, target)
    before = ends.gather(-1, (block - 1).clamp_(min=0)).masked_fill_(block == 0, 0.0)
    inside = blocks.gather(1, block.unsqueeze(-1).expand(-1, 1, size)).squeeze(1).double().cumsum(-1)
    tokens: Tensor = block * size + _passed(inside, target - before)
    return tokens.squeeze(-1)


def _passed(ends: Tensor, target: Tensor) -> Tensor:
    """(B, 1) index of the first running sum (B, N) above ``target`` (B, 1), or of the last that grew."""
    last = (ends < ends[:, -1:]).sum(-1, keepdim=True)
    return torch.minimum(torch.searchsorted(ends, target, right=True), last)


def uniform(seed: int, position: int) -> float:
    """The uniform in [0, 1) with which an episode of ``seed`` draws the token at ``position``."""
    return (derive(seed, position) >> 10) / (1 << 53)


class StopMatcher:
    """Detects one of the stop strings in the text of the tokens of one action.

    It keeps only as many bytes as the longest stop string has, so a push costs the same however long the
    action grows. It compares bytes, since a stop string or a character may span several tokens.

    >>> matcher = StopMatcher([b"ab"], {0: b"xa", 1: b"bx"}.__getitem__)
    >>> matcher.push(0), matcher.push(1)
    (False, True)
    """

    def __init__(self, stop: Sequence[bytes], token_bytes: Callable[[int], bytes]) -> None:
        self._stop = tuple(stop)
        self._token_bytes = token_bytes
        self._keep = max((len(text) for text in self._stop), default=1) - 1
        self._tail = b""
        self.matched = False

    def push(self, token: int) -> bool:
        """Add one sampled token. Return whether a stop string has appeared so far."""
        if self._stop and not self.matched:
            text = self._tail + self._token_bytes(token)
            self.matched = any(stop in text for stop in self._stop)
            self._tail = text[-self._keep :] if self._keep else b""
        return self.matched


def end_of(
    action: Sequence[int], stops: Iterable[str], token_bytes: Callable[[int], bytes], ends: Container[int]
) -> int | None:
    """The number of tokens up to the one that ends an action: one of ``ends``, or the last of a stop string.
    None where only a limit ends it.
    """
    matcher = StopMatcher([text.encode() for text in stops], token_bytes)
    return next((n for n, token in enumerate(action, 1) if matcher.push(token) or token in ends), None)
