"""Preference losses: of pairs of a chosen and a rejected reply (dpo, orpo, simpo), and of single replies that
are desirable or not (kto). A reply y is all trained tokens of a trajectory; the rest of it is x.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import Field

from agent_peft.algorithms.base import Algorithm, AlgorithmConfig, Metrics, SumOverRanks, one_rank
from agent_peft.batch import Batch, PolicyOutput
from agent_peft.lazy_torch import Tensor, torch
from agent_peft.types import AgentPeftError

CERTAIN = 2.0**-23  # nats: a reply that is more likely than exp(-CERTAIN) has these odds, which are finite
PAIR_METRICS = (
    "reward_chosen",
    "reward_rejected",
    "margin",
    "accuracy",
    "logprob_chosen",
    "logprob_rejected",
)


@dataclass(frozen=True)
class Side:
    """One side of P pairs, or B single replies."""

    logprobs: Tensor  # (P,) log π(y | x), the sum over the tokens
    tokens: Tensor  # (P,) fp32, |y|, at least 1
    reference: Tensor | None  # (P,) log π_ref(y | x)

    @property
    def log_ratio(self) -> Tensor:
        """(P,) log π(y | x) / π_ref(y | x)."""
        if self.reference is None:
            raise ValueError("this loss needs the reference's log-probabilities in the batch")
        return self.logprobs - self.reference

    @property
    def mean_logprob(self) -> Tensor:
        """(P,) log π(y | x) / |y|."""
        return self.logprobs / self.tokens


PairLoss = Callable[[Side, Side], tuple[Tensor, Tensor, Tensor]]
"""(chosen, rejected) -> (loss, reward of the chosen, reward of the rejected), (P,) each"""


def dpo(beta: float) -> PairLoss:
    """-log σ(β log-ratio of the chosen - β log-ratio of the rejected) (Rafailov et al., 2023, equation 7)."""

    def loss(chosen: Side, rejected: Side) -> tuple[Tensor, Tensor, Tensor]:
        rewards = beta * chosen.log_ratio, beta * rejected.log_ratio
        return -torch.nn.functional.logsigmoid(rewards[0] - rewards[1]), *rewards

    return loss


def ipo(beta: float) -> PairLoss:
    """(h - 1 / (2 β))² with h the difference of the log-ratios (Azar et al., 2023, equation 17, where β is
    τ).
    """

    def loss(chosen: Side, rejected: Side) -> tuple[Tensor, Tensor, Tensor]:
        ratios = chosen.log_ratio, rejected.log_ratio
        return (ratios[0] - ratios[1] - 1 / (2 * beta)).square(), beta * ratios[0], beta * ratios[1]

    return loss


def orpo(odds_coef: float) -> PairLoss:
    """-log P(chosen) - λ log σ(log odds(chosen) / odds(rejected)), with P the geometric mean of the tokens'
    probabilities and odds = P / (1 - P) (Hong et al., 2024, equations 6 and 7).
    """

    def log_odds(replies: Side) -> Tensor:
        logp = replies.mean_logprob.clamp(max=-CERTAIN)
        return logp - (-torch.expm1(logp)).log()

    def loss(chosen: Side, rejected: Side) -> tuple[Tensor, Tensor, Tensor]:
        odds = log_odds(chosen), log_odds(rejected)
        return -chosen.mean_logprob - odds_coef * torch.nn.functional.logsigmoid(odds[0] - odds[1]), *odds

    return loss


def simpo(beta: float, gamma: float) -> PairLoss:
    """-log σ(β log π(chosen) / |chosen| - β log π(rejected) / |rejected| - γ) (Meng et al., 2024, equation
    6).
    """

    def loss(chosen: Side, rejected: Side) -> tuple[Tensor, Tensor, Tensor]:
        rewards = beta * chosen.mean_logprob, beta * rejected.mean_logprob
        return -torch.nn.functional.logsigmoid(rewards[0] - rewards[1] - gamma), *rewards

    return loss


class Pairwise(Algorithm):
    """loss = mean over pairs of ``pair_loss``. A group is a pair, the chosen trajectory first. ``weights``
    have the weight of the pair at each of its trained tokens.

    A pair with a reply without a trained token is left out, as the mean over no tokens is nothing.

    >>> Pairwise("dpo", dpo(0.1), needs_reference=True).keeps_groups_whole
    True
    """

    on_policy = False
    preferences = "pairs"
    learns_at_zero_advantage = True
    keeps_groups_whole = True
    metrics = PAIR_METRICS

    def __init__(
        self, kind: str, pair_loss: PairLoss, *, needs_reference: bool, formula: str = "", paper: str = ""
    ) -> None:
        self.kind, self.pair_loss, self.needs_reference = kind, pair_loss, needs_reference
        self.formula, self.paper = formula, paper

    def prepare(self, batch: Batch, sum_over_ranks: SumOverRanks = one_rank) -> Batch:
        """Advantages are 1 for chosen and -1 for rejected trajectories. They are shown, and not used."""
        advantages = torch.zeros_like(batch.advantages)
        for number, rows in batch.rows_by_group().items():
            if len(rows) != 2:
                raise AgentPeftError(
                    f"{self.kind} learns from pairs, and group {number} has {len(rows)} trajectories; give a "
                    "source of pairs"
                )
            advantages[rows[0]], advantages[rows[1]] = 1.0, -1.0
        return replace(batch, advantages=advantages * batch.action_mask)

    def weigh(self, minibatch: Batch) -> tuple[Batch, Tensor]:
        chosen, rejected = _sides(minibatch)
        has_tokens = minibatch.action_mask.any(1)
        whole = has_tokens[chosen] & has_tokens[rejected]  # (P,)
        counts = torch.zeros_like(has_tokens)
        counts[chosen], counts[rejected] = whole, whole
        return replace(
            minibatch, weights=(minibatch.action_mask & counts[:, None]).float()
        ), whole.sum().float()

    def loss(self, output: PolicyOutput, microbatch: Batch) -> tuple[Tensor, Metrics]:
        """Metrics, means over pairs: reward_chosen and reward_rejected (what ``pair_loss`` compares), margin
        (their difference), accuracy (the share of pairs with a margin above 0; one of exactly 0 counts half),
        logprob_chosen and logprob_rejected (log π(y | x), nats).
        """
        replies, sides = _replies(output, microbatch), _sides(microbatch)
        chosen, rejected = (_select(replies, rows) for rows in sides)
        weights = microbatch.weights.amax(1)[sides[0]]  # (P,)
        losses, *rewards = self.pair_loss(chosen, rejected)
        with torch.no_grad():
            margin = rewards[0] - rewards[1]
            values = (*rewards, margin, (margin.sign() + 1) / 2, chosen.logprobs, rejected.logprobs)
            metrics = {name: (weights * x).sum() for name, x in zip(PAIR_METRICS, values, strict=True)}
        return (weights * losses).sum(), {"weight": weights.sum(), **metrics}


class Kto(Algorithm):
    """loss = mean over replies of λ_D (1 - σ(β (r - z0))) where y is desirable, and λ_U (1 - σ(β (z0 - r)))
    where it is not, with r = log π(y | x) / π_ref(y | x) (Ethayarajh et al., 2024, equations 7 and 8).

    z0, the KL between the policy and the reference, is estimated as in section 4.1: max(0, mean of r over
    replies y' to another task's x), without a gradient, and of the policy before the step's update. The mean
    is over the whole step and all ranks, so microbatches do not change it. A source puts the replies y' into
    ``Group.mismatched``; without any, z0 is 0.

    A reply without a trained token is left out.
    """

    kind = "kto"
    on_policy = False
    preferences = "labels"
    learns_at_zero_advantage = True
    needs_reference = True
    metrics = (*PAIR_METRICS, "z0", "balance")

    def __init__(self, config: KtoConfig) -> None:
        self.config = config
        self.z0 = torch.tensor(0.0)  # of the step
        self.shares = (0.0, 0.0)  # of desirable and of other replies in the step
        self.formula = (
            "mean over replies of λ (1 - σ(β (r - z0))), or of λ (1 - σ(β (z0 - r))) where the reply is not "
            "desirable; r = log π(y) / π_ref(y); z0 = max(0, mean r of replies to other tasks)"
        )
        self.paper = "Ethayarajh et al., 2024, equation 8, https://arxiv.org/abs/2402.01306"

    def prepare(self, batch: Batch, sum_over_ranks: SumOverRanks = one_rank) -> Batch:
        """Advantages are 1 for desirable trajectories and -1 for others. A label decides, or the return where
        there is none.
        """
        mismatched, has_tokens = batch.groups < 0, batch.action_mask.any(1)
        desirable = batch.returns > self.config.threshold
        if batch.labels is not None:
            desirable = torch.where(batch.labels != 0, batch.labels > 0, desirable)
        desirable &= ~mismatched
        total = torch.zeros(4, dtype=torch.float64)
        if batch.reference_logprobs is not None:  # a rank may have no trajectory
            ratios = (batch.logprobs - batch.reference_logprobs).double() * batch.action_mask
            total[0] = ratios[mismatched].sum()
        own = has_tokens & ~mismatched
        for place, rows in ((1, mismatched & has_tokens), (2, own & desirable), (3, own & ~desirable)):
            total[place] = rows.sum()
        total = sum_over_ranks(total)
        self.z0 = (total[0] / total[1].clamp(min=1)).clamp(min=0).float()
        counted = total[2] + total[3]
        self.shares = (float(total[2] / counted), float(total[3] / counted)) if counted else (0.0, 0.0)
        signs = desirable.float() * 2 - 1
        return replace(batch, advantages=signs[:, None] * batch.action_mask)

    def observe(self, batch: Batch, sum_over_ranks: SumOverRanks = one_rank) -> dict[str, float]:
        """z0 (nats per reply), and balance: the weight of all desirable replies over that of all others. A
        step without the one or the other has none. TRL's guide advises 1 to 4/3.
        """
        metrics = {"z0": float(self.z0)}
        if all(self.shares):
            desirable, rest = self.shares
            weights = self.config.desirable_weight, self.config.undesirable_weight
            metrics["balance"] = weights[0] * desirable / (weights[1] * rest)
        return metrics

    def weigh(self, minibatch: Batch) -> tuple[Batch, Tensor]:
        mask = minibatch.action_mask
        return replace(minibatch, weights=mask.float()), mask.any(1).sum().float()

    def loss(self, output: PolicyOutput, microbatch: Batch) -> tuple[Tensor, Metrics]:
        """Metrics: those of ``Pairwise``, with β r as the reward, the mean over the desirable replies as
        that of the chosen, and accuracy (the share of replies with r on their side of z0). The means of a
        kind of reply that the step has none of are left out, and then the margin, too.
        """
        config = self.config
        replies = _replies(output, microbatch)
        weights = microbatch.weights.amax(1)  # (B,)
        desirable = microbatch.advantages.amax(1) > 0
        z0 = self.z0.to(weights.device)
        side = torch.where(desirable, 1.0, -1.0)
        price = torch.where(desirable, config.desirable_weight, config.undesirable_weight)
        above = side * (replies.log_ratio - z0)
        loss = (weights * price * (1 - torch.sigmoid(config.beta * above))).sum()
        with torch.no_grad():
            metrics = {"weight": weights.sum(), "accuracy": (weights * (above.sign() + 1) / 2).sum()}
            for name, rows, share in zip(
                ("chosen", "rejected"), (desirable, ~desirable), self.shares, strict=True
            ):
                if share:
                    part = weights * rows / share
                    metrics[f"reward_{name}"] = (part * config.beta * replies.log_ratio).sum()
                    metrics[f"logprob_{name}"] = (part * replies.logprobs).sum()
            if all(self.shares):
                metrics["margin"] = metrics["reward_chosen"] - metrics["reward_rejected"]
        return loss, metrics


def _replies(output: PolicyOutput, batch: Batch) -> Side:
    """The trajectories of a batch, (B,) each."""
    mask, reference = batch.action_mask, batch.reference_logprobs
    return Side(
        logprobs=(output.logprobs * mask).sum(1),
        tokens=mask.sum(1).clamp(min=1).float(),
        reference=None if reference is None else (reference * mask).sum(1),
    )


def _select(replies: Side, rows: Tensor) -> Side:
    reference = replies.reference
    return Side(replies.logprobs[rows], replies.tokens[rows], None if reference is None else reference[rows])


def _sides(batch: Batch) -> tuple[Tensor, Tensor]:
    """The rows of the chosen and of the rejected trajectories, (P,) int64 each."""
    pairs = torch.tensor(list(batch.rows_by_group().values()), dtype=torch.int64).view(-1, 2)
    return pairs[:, 0].to(batch.groups.device), pairs[:, 1].to(batch.groups.device)


class DpoConfig(AlgorithmConfig):
    """Direct preference optimization, or IPO. It learns from pairs, against the reference of the stage."""

    kind: Literal["dpo"] = "dpo"
    beta: float = Field(
        default=0.1,
        gt=0,
        description="β: the larger, the closer the policy stays to the reference; τ of ipo",
    )
    loss: Literal["sigmoid", "ipo"] = Field(
        default="sigmoid",
        description="sigmoid is that of DPO; ipo pulls the difference of the log-ratios to 1 / (2 β), and no "
        "further",
    )

    def build(self) -> Pairwise:
        h = "log π(chosen) / π_ref(chosen) - log π(rejected) / π_ref(rejected)"
        if self.loss == "ipo":
            formula = f"mean over pairs of (h - 1 / (2 β))²; h = {h}"
            paper = "Azar et al., 2023, equation 17, https://arxiv.org/abs/2310.12036"
            return Pairwise(self.kind, ipo(self.beta), needs_reference=True, formula=formula, paper=paper)
        formula = f"mean over pairs of -log σ(β h); h = {h}"
        paper = "Rafailov et al., 2023, equation 7, https://arxiv.org/abs/2305.18290"
        return Pairwise(self.kind, dpo(self.beta), needs_reference=True, formula=formula, paper=paper)


class KtoConfig(AlgorithmConfig):
    """Kahneman-Tversky optimization. It learns from single replies that are desirable or not, against the
    reference of the stage.
    """

    kind: Literal["kto"] = "kto"
    beta: float = Field(
        default=0.1, gt=0, description="β: the larger, the sooner a reply counts as good or bad enough"
    )
    desirable_weight: float = Field(default=1.0, gt=0, description="λ_D, of replies that are desirable")
    undesirable_weight: float = Field(default=1.0, gt=0, description="λ_U, of replies that are not")
    threshold: float = Field(
        default=0.5,
        description="with episodes_of, an episode is desirable if its reward (rewards) is above this; the "
        "replies of an environment have labels",
    )

    def build(self) -> Kto:
        return Kto(self)


class OrpoConfig(AlgorithmConfig):
    """Odds ratio preference optimization: supervised learning of the chosen replies, and a term that makes
    them likelier than the rejected ones. It needs no reference.
    """

    kind: Literal["orpo"] = "orpo"
    odds_coef: float = Field(default=0.1, gt=0, description="λ of the odds ratio's term")

    def build(self) -> Pairwise:
        formula = (
            "mean over pairs of -log P(chosen) - λ log σ(log odds(chosen) / odds(rejected)); P = geometric "
            "mean of the tokens' π; odds = P / (1 - P)"
        )
        paper = "Hong et al., 2024, equations 6 and 7, https://arxiv.org/abs/2403.07691"
        return Pairwise(self.kind, orpo(self.odds_coef), needs_reference=False, formula=formula, paper=paper)


class SimpoConfig(AlgorithmConfig):
    """Simple preference optimization: the reward is the mean log-probability of a reply's tokens. It needs no
    reference.
    """

    kind: Literal["simpo"] = "simpo"
    beta: float = Field(default=2.0, gt=0, description="β of the reward, β log π(y) / |y|")
    gamma: float = Field(
        default=1.0, ge=0, description="γ: by how much the chosen reward is to be above the rejected one"
    )

    def build(self) -> Pairwise:
        formula = "mean over pairs of -log σ(β log π(chosen) / |chosen| - β log π(rejected) / |rejected| - γ)"
        paper = "Meng et al., 2024, equation 6, https://arxiv.org/abs/2405.14734"
        loss = simpo(self.beta, self.gamma)
        return Pairwise(self.kind, loss, needs_reference=False, formula=formula, paper=paper)
