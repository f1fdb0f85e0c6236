"""How likely a policy finds recorded replies that no outcome grades: the loss of held-out conversations, and
of held-out pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from agent_peft.algorithms.base import Algorithm
from agent_peft.batch import Batch, PolicyOutput, collate_groups
from agent_peft.environments.base import Environment
from agent_peft.policies.forward.microbatching import Microbatching
from agent_peft.policies.policy import Policy
from agent_peft.policies.reference import Reference
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.ranks import Ranks
from agent_peft.rollout.demonstrations import demonstrate
from agent_peft.rollout.intervals import Mean, mean_over_tasks, rate_of
from agent_peft.rollout.pairs import replay_sides
from agent_peft.rollout.rewards import RewardConfig
from agent_peft.rollout.statistics import EvaluationReport
from agent_peft.types import AgentPeftError, Group, Task

TASKS = 64  # that are in memory at once
POSITIONS = 4096  # of a forward, as in training by default
WHOLE = SamplingConfig()  # the distribution at temperature 1, as in a supervised stage

Row = tuple[float, int, float, float]
"""Of a conversation: its loss in nats, its target tokens, how many of them are the likeliest, and 0. Of a
pair: its loss, the tokens of both replies, accuracy, and margin."""


@dataclass(frozen=True)
class Likelihood:
    """Measures replies.

    Args:
        pairs: the algorithm whose loss pairs have; None for conversations.
        reference: what the loss compares the policy with; None counts as probability 1 for all replies.
        on_task: called when a task of this rank is measured.
    """

    policy: Policy
    environment: Environment
    rewards: RewardConfig
    pairs: Algorithm | None
    reference: Reference | None
    on_task: Callable[[], None] | None

    def report(self, tasks: Sequence[Task], ranks: Ranks) -> EvaluationReport:
        """The report of tasks, of which each rank reads its share. A task without a target token is left
        out.
        """
        whole = self.pairs is not None
        microbatching = Microbatching(POSITIONS, self.policy.count_nodes, keeps_groups_whole=whole)
        mine, rows = ranks.share(range(len(tasks))), dict[int, Row]()
        for start in range(0, len(mine), TASKS):
            groups = {place: self._group(tasks[place]) for place in mine[start : start + TASKS]}
            batch = collate_groups(groups)
            rows |= microbatching.within_memory(partial(self._read, batch, microbatching))
            if self.on_task is not None:
                for _ in groups:
                    self.on_task()
        parts = ranks.gather_objects([[place, *row] for place, row in rows.items()])
        found: dict[str, Row] = {
            tasks[place].id: (loss, number, one, other)
            for place, loss, number, one, other in sorted(row for part in parts for row in part)
        }
        if not found:
            raise AgentPeftError("there is nothing to evaluate: no reply of the table has a token to measure")
        return _report(found, pairs=whole)

    def _group(self, task: Task) -> Group:
        chat = self.policy.chat
        if self.pairs is not None:
            return replay_sides(self.environment, task, chat, self.rewards, seed=0)
        return Group(task, [demonstrate(self.environment, task, chat, self.rewards, seed=0)])

    @torch.no_grad()
    def _read(self, batch: Batch, microbatching: Microbatching) -> dict[int, Row]:
        """The rows of the groups, by their numbers."""
        found: dict[int, Row] = {}
        for rows in microbatching.cut(batch, torch.ones(len(batch), dtype=torch.bool)):
            part = batch.select(rows)
            output = self.policy.forward(part, WHOLE, greedy=self.pairs is None)
            part = part.to(output.logprobs.device)
            if self.pairs is None:
                assert output.greedy is not None
                losses, hits = -output.logprobs.double().sum(1), output.greedy.sum(1)
                values = zip(losses.tolist(), part.action_mask.sum(1).tolist(), hits.tolist(), strict=True)
                pairs = zip(part.groups.tolist(), values, strict=True)
                found |= {group: (loss, n, hit, 0.0) for group, (loss, n, hit) in pairs if n}
            else:
                found |= self._of_pairs(part, output, self.pairs)
        return found

    def _of_pairs(self, part: Batch, output: PolicyOutput, algorithm: Algorithm) -> dict[int, Row]:
        if algorithm.needs_reference:
            known = self.reference
            scores = torch.zeros_like(output.logprobs)
            if known is not None:  # by the policy's forward, so that an untrained policy is equal to the bit
                scores = self.policy.reference_logprobs(part, WHOLE, known)
            part = replace(part, reference_logprobs=scores)
        found: dict[int, Row] = {}
        for group, rows in part.rows_by_group().items():
            pair, number = algorithm.weigh(algorithm.prepare(part.select(rows)))
            if number:  # each reply has a token
                of_pair = PolicyOutput(output.logprobs[rows, : pair.tokens.shape[1]], entropy=None)
                loss, metrics = algorithm.loss(of_pair, pair)
                tokens, accuracy, margin = pair.action_mask.sum(), metrics["accuracy"], metrics["margin"]
                found[group] = (float(loss), int(tokens), float(accuracy), float(margin))
        return found


def _report(found: dict[str, Row], pairs: bool) -> EvaluationReport:
    losses, counts, ones, others = zip(*found.values(), strict=True)
    if pairs:
        accuracy = rate_of((value, 1) for value in ones)
        means = {
            "loss": mean_over_tasks(losses),
            "accuracy": Mean(accuracy.value, accuracy.low, accuracy.high, accuracy.tasks),
            "margin": mean_over_tasks(others),
        }
    else:
        weighted = ([x / n for x, n in zip(values, counts, strict=True)] for values in (losses, ones))
        loss, accurate = (mean_over_tasks(values, counts) for values in weighted)
        if accurate.low is not None and accurate.high is not None:
            accurate = replace(accurate, low=max(0.0, accurate.low), high=min(1.0, accurate.high))
        means = {"loss": loss, "token_accuracy": accurate}
    return EvaluationReport(
        attempts=len(found),
        mean_action_tokens=sum(counts) / len(found),
        means=means,
        losses={task: (row[0], 1 if pairs else row[1]) for task, row in found.items()},
    )
