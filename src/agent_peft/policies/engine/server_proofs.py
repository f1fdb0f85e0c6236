"""Proofs that a server samples what the trainer learns from: the same base model in the same dtype, the
distribution that tokens are drawn from, and the adapter of one version.

The canary is a few tokens, the beginning of a conversation. Trainer and server score them; the difference is
rounding if they compute the same, and tenths of nats or more if they do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor

from agent_peft.policies import adapters, proofs
from agent_peft.policies.engine.wire import ServerClient
from agent_peft.policies.forward.attention import attempt
from agent_peft.policies.forward.layers import in_float32
from agent_peft.policies.policy import Policy
from agent_peft.policies.sampling import SamplingConfig, log_distribution
from agent_peft.types import AgentPeftError, Message, TrustError

NEARER = 2.0  # times nearer to another version than to the expected one: rounding does not point anywhere
OTHER_DTYPE = 0.25  # of our rounding to 16 bits: a server that is so near to fp32 computes in another dtype
PLAIN = SamplingConfig()
TRIAL = SamplingConfig(temperature=0.5, max_new_tokens=16)
QUESTION = Message("user", "1+1=")


def refuse_adapter(policy: Policy) -> PeftModel:
    """The model of a policy whose adapter every server applies as a whole."""
    if not policy.has_adapter:
        raise AgentPeftError("engine.kind: servers sample with an adapter; set policy.lora, or local")
    model = cast(PeftModel, policy.model)
    config = cast(LoraConfig, model.peft_config[adapters.ADAPTER])
    head, saved = isinstance(policy.head, LoraLayer), config.modules_to_save
    if head or saved or config.use_dora or config.bias != "none":
        raise AgentPeftError(
            "engine.kind: servers drop in silence what an adapter trains of the output layer, whole "
            "modules, biases or DoRA; leave it out of policy.lora"
        )
    return model


@dataclass(frozen=True)
class Version:
    """An adapter on the servers; ``expected`` (n - 1) are the trainer's log-probabilities of the canary, and
    ``bound`` is their rounding.
    """

    name: str
    folder: Path
    digest: str
    expected: Tensor
    bound: float


class Canary:
    """Tokens that trainer and servers score.

    Attributes:
        base: the trainer's log-probabilities (n - 1) in nats with the adapter off, and their rounding.
    """

    def __init__(self, policy: Policy) -> None:
        most = None if policy.bound is None else policy.bound.positions - TRIAL.max_new_tokens
        self.policy, self.tokens = policy, policy.opening()[:most]
        self.base, self.bound = self.measure(adapter=False)

    def measure(self, adapter: bool = True) -> tuple[Tensor, float]:
        """The trainer's log-probabilities (n - 1) in nats, and the bound on ``drift`` that rounding explains:
        in 16 bits it is measured with the present weights.
        """
        scores, exact = self.score(adapter=adapter), self._exact(adapter)
        rounding = 0.0 if exact is None else proofs.ALLOWED * self.policy.drift(scores - exact)
        return scores, max(self.policy.rounding, rounding)

    def score(
        self, tokens: Sequence[int] = (), sampling: SamplingConfig = PLAIN, adapter: bool = True
    ) -> Tensor:
        """The trainer's log-probabilities (T - 1) in nats of tokens[1:]; of the canary without ``tokens``."""
        policy, off = self.policy, cast(PeftModel, self.policy.model).disable_adapter
        ids = torch.tensor(tokens or self.tokens, device=policy.device)
        with torch.no_grad(), nullcontext() if adapter else off():
            logp = log_distribution(policy.logits(policy.read(ids[None])[0, :-1]), sampling)
        return logp.gather(-1, ids[1:, None])[:, 0].cpu()

    def _exact(self, adapter: bool) -> Tensor | None:
        """As ``score``, in fp32 from weights of 16 bits; None where there are none, or the model refuses."""

        def read() -> Tensor:
            with in_float32(self.policy.model):
                return self.score(adapter=adapter)

        scores = attempt(read) if self.policy.dtype != torch.float32 else None
        return scores if isinstance(scores, Tensor) else None

    def prove(self, server: ServerClient, version: Version, before: Version | None) -> None:
        """Prove that a server acts with a version: its scores are the trainer's, and not nearer to the base
        model's or to those of the version before it.
        """
        found, name = torch.tensor(server.score(version.name, self.tokens)), version.name
        distance, others = float((found - version.expected).norm()), {"the base model": self.base}
        if before is not None:
            others[f"the version before it ({before.name})"] = before.expected
        for other, scores in others.items():
            if NEARER * float((found - scores).norm()) < distance:
                raise TrustError(
                    f"{server.url}: acts with {other} under the name {name}: the adapter has not arrived; "
                    "start the server again"
                )
        if not (drift := self.policy.drift(found - version.expected)) <= version.bound:
            raise TrustError(
                f"{server.url}: scores the same tokens under {name} {drift:.3g} nats apart from the trainer "
                f"({version.bound:.2g} is rounding): it acts with other weights; were the files changed?"
            )

    def prove_base(self, server: ServerClient) -> None:
        """Refuse a server with another model, dtype or chat template, or with log-probabilities of another
        distribution than the one that it draws from.
        """
        policy, dtype = self.policy, str(self.policy.dtype).removeprefix("torch.")
        found, exact = torch.tensor(server.score(server.base, self.tokens)), self._exact(adapter=False)
        if not (drift := policy.drift(found - self.base)) <= self.bound:
            raise TrustError(
                f"{server.url}: its model {server.base} scores the same tokens {drift:.3g} nats apart from "
                f"policy.model ({self.bound:.2g} is rounding): start it with the same model and dtype "
                f"({dtype}), or set engine.model"
            )
        if exact is not None and (found - exact).norm() < OTHER_DTYPE * (self.base - exact).norm():
            raise TrustError(
                f"{server.url}: its model {server.base} computes with more bits than the trainer: start it "
                f"with --dtype {dtype}"
            )
        limits = TRIAL.model_copy(update={"max_tokens": len(self.tokens) + TRIAL.max_new_tokens})
        action, logprobs = server.draw(server.base, self.tokens, limits, seed=None)
        tokens, drawn = [*self.tokens, *action], torch.tensor(logprobs)
        ours, raw = (self.score(tokens, one, adapter=False)[-len(action) :] for one in (TRIAL, PLAIN))
        apart = drawn - ours
        if policy.drift(apart) > self.bound and NEARER * (drawn - raw).norm() < apart.norm():
            raise TrustError(
                f"{server.url}: returns log-probabilities before the temperature, not those of the "
                "distribution that tokens are drawn from: start it with --logprobs-mode processed_logprobs"
            )
        try:
            template = policy.chat.opening([QUESTION])
        except AgentPeftError:  # of an alphabet that cannot write it
            return
        if server.opening([QUESTION.to_json()]) not in (None, template):
            raise TrustError(
                f"{server.url}: its chat template writes a conversation as other tokens than policy.model's: "
                "start it with the same tokenizer and template (vllm serve --chat-template)"
            )
