"""The one loop. It knows no algorithm and no environment by name."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from agent_peft.algorithms import Algorithm, averages, build_algorithm
from agent_peft.batch import Batch, collate
from agent_peft.environments.base import Environment
from agent_peft.policies.engine import Engine
from agent_peft.policies.language_model import Policy
from agent_peft.rollout.collector import Collection, Collector, demonstrate
from agent_peft.seeding import derive, generator
from agent_peft.training import trust
from agent_peft.training.config import StageConfig
from agent_peft.training.distributed import ALONE, Ranks, gather_collection
from agent_peft.training.microbatching import Microbatching
from agent_peft.training.optimizer import build_optimizer
from agent_peft.training.state_file import load_state, save_state
from agent_peft.types import AgentPeftError, Group, Task, Trajectory, TrustError

logger = logging.getLogger(__name__)

LEARNT = {"updates_skipped": 0.0, "nonfinite_updates": 0.0}
COUNTS = ("nonfinite_updates",)


@dataclass(frozen=True)
class Step:
    """What one trip through the loop did."""

    number: int  # of the stage, from 0
    collection: Collection
    metrics: dict[str, float]


class NonFiniteError(TrustError):
    """The loss or the gradient is NaN or infinite. Told on all ranks alike, before it has touched anything."""

    def __init__(self, message: str, collection: Collection) -> None:
        super().__init__(message)
        self.collection = collection  # what the step was to be learnt from


class Trainer:
    """One stage of training: tasks -> groups -> batch -> loss -> update, ``stage.steps`` times.

    Everything that carries over from step to step is in ``state_dict``; everything random is derived from ``seed`` and the step.
    """

    def __init__(
        self, stage: StageConfig, policy: Policy, engine: Engine, environment: Environment, seed: int, ranks: Ranks = ALONE
    ) -> None:
        self.stage, self.policy, self.engine, self.environment, self.seed, self.ranks = stage, policy, engine, environment, seed, ranks
        self.algorithm: Algorithm = build_algorithm(stage.algorithm)
        updates = stage.steps * self.algorithm.update_epochs * self.algorithm.minibatches
        self.parameters = policy.trainable_parameters()
        critic = self.algorithm.critic
        own = [(list(policy.attach_value_head(critic.trunk_gradient).parameters()), critic.learning_rate)] if critic else []
        self.optimizer, self.scheduler = build_optimizer(self.parameters, stage.optimizer, updates, own)
        self.parameters += [p for parameters, _ in own for p in parameters]
        ranks.assert_equal(self.parameters, "the weights at the start of a stage")
        self.collector = Collector(environment, engine)
        self.microbatching = Microbatching(stage.microbatch_tokens, policy.count_nodes)
        # a group that failing environments left with one trajectory has nothing to compare; it is dropped, and the failures are counted
        self.fewest = min(2, stage.group_size) if self.algorithm.on_policy else 1
        self.step = 0
        self.updates = 0
        self.learning = False  # proven
        self.recent: list[float] = []  # values of the metric that ``until`` looks at
        self._order: tuple[int, list[int]] | None = None

    def __iter__(self) -> Iterator[Step]:
        """The main loop."""
        while self.step < self.stage.steps:
            self.collection = collection = self.collect(self.step)
            groups = [group for group in collection.groups if len(group.trajectories) >= self.fewest]
            batch = self.prepare(groups)
            totals: list[Mapping[str, float]] = []
            for epoch in range(self.algorithm.update_epochs):
                for number, minibatch in enumerate(self.minibatches(batch, len(groups), epoch)):
                    totals.append(self.update(minibatch, on_policy=self.algorithm.on_policy and epoch == number == 0))
                if self.algorithm.is_done(totals[-1]):
                    break
            observed = self.algorithm.observe(batch, self.ranks.sum) | {"epochs_done": float(epoch + 1)}
            metrics = describe(groups, collection) | mean_of(totals) | observed | self.halvings()
            done, self.step = self.step, self.stage.steps if self.has_arrived(metrics) else self.step + 1
            yield Step(done, collection, metrics)

    def halvings(self) -> dict[str, float]:
        """How often, since it was asked last, microbatches were halved on any rank because the memory was too small."""
        taken, self.microbatching.halvings = self.microbatching.halvings, 0
        return {"microbatch_halvings": float(self.ranks.sum(torch.tensor(float(taken))))}

    def has_arrived(self, metrics: Mapping[str, float]) -> bool:
        """Whether the stage may end here, before its last step: ``until`` says what for."""
        until = self.stage.until
        if until is None:
            return False
        if until.metric not in metrics:
            raise AgentPeftError(f"until.metric: {until.metric!r} is no metric of this stage; choose one of {', '.join(sorted(metrics))}")
        self.recent = [*self.recent, metrics[until.metric]][-until.over :]
        return len(self.recent) == until.over and until.is_reached(sum(self.recent) / until.over)

    def collect(self, step: int) -> Collection:
        """The step's groups, of all ranks: rollouts of the policy, or demonstrations where the algorithm learns from those."""
        stage, seed = self.stage, derive(self.seed, "rollout", step)
        tasks = self.tasks(step)
        positions = self.ranks.share(range(len(tasks)))
        if self.algorithm.on_policy:
            mine = self.collector.collect(tasks, stage.group_size, stage.sampling, stage.rewards, seed, positions)
        else:
            shown = [demonstrate(self.environment, tasks[p], self.policy.chat, stage.rewards, seed) for p in positions]
            mine = Collection([Group(trajectory.task, [trajectory]) for trajectory in shown])
        return gather_collection(self.ranks, mine, tasks)

    def prepare(self, groups: list[Group]) -> Batch:
        """This rank's share of the step, its advantages set. Groups keep the numbers that they have among those of all ranks."""
        batch = collate_groups(groups)
        mine = set(self.ranks.share(range(len(groups))))
        batch = batch.select([row for row, group in enumerate(batch.groups.tolist()) if group in mine])
        policy, sampling = self.policy, self.stage.sampling
        if self.algorithm.critic:
            batch = replace(batch, values=self.score(batch, policy.values))
        self.before = self.algorithm.state_dict()
        batch = self.algorithm.prepare(batch, self.ranks.sum)
        if self.algorithm.needs_reference and len(batch):
            batch = replace(batch, reference_logprobs=self.score(batch, lambda part: policy.reference_logprobs(part, sampling)))
        return batch

    def tasks(self, step: int) -> list[Task]:
        """``tasks_per_step`` tasks: one trip after the other through all of them, each in an order of its own."""
        everything, chosen = self.environment.tasks, []
        for position in range(step * self.stage.tasks_per_step, (step + 1) * self.stage.tasks_per_step):
            trip, index = divmod(position, len(everything))
            chosen.append(everything[self.order(trip)[index]])
        return chosen

    def order(self, trip: int) -> Sequence[int]:
        """The order of one trip through the tasks. The last one is kept: with many tasks it costs more than a step."""
        if self._order is None or self._order[0] != trip:
            order = list(range(len(self.environment.tasks)))
            if self.stage.task_order == "shuffle":
                generator(self.seed, "tasks", trip).shuffle(order)
            self._order = (trip, order)
        return self._order[1]

    def minibatches(self, batch: Batch, num_groups: int, epoch: int) -> Iterator[Batch]:
        """Whole groups, shuffled where there is more than one minibatch: of the ``num_groups`` of all ranks, those that are here."""
        names = list(range(num_groups))
        if self.algorithm.minibatches > len(names):
            raise AgentPeftError(
                f"algorithm.minibatches: {self.algorithm.minibatches} is more than the {len(names)} groups of a step; lower it"
            )
        if self.algorithm.minibatches > 1:
            generator(self.seed, "minibatches", self.step, epoch).shuffle(names)
        for part in range(self.algorithm.minibatches):
            mine = set(names[part :: self.algorithm.minibatches])
            yield batch.select([row for row, group in enumerate(batch.groups.tolist()) if group in mine])

    def update(self, minibatch: Batch, on_policy: bool) -> dict[str, float]:
        """One optimizer update. Weights are divided by the minibatch's denominator first, so that microbatches only sum."""
        weighed, denominator = self.algorithm.weigh(minibatch)
        weighed = replace(weighed, weights=weighed.weights / self.ranks.sum(denominator))
        sums = self.microbatching.within_memory(lambda: self.backward(weighed, on_policy))
        sums = self.ranks.sum_named(sums)
        if not sums:  # every group had one outcome only: there is nothing to learn from
            return {**LEARNT, "updates_skipped": 1.0}
        self.ranks.sum_gradients(self.parameters)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.stage.optimizer.max_grad_norm)
        for what, found in {"loss": float(sums["loss"]), "gradient's norm": float(norm)}.items():
            if not math.isfinite(found):
                return self.refuse(f"the {what} is {found} at step {self.step}")
        rate = self.scheduler.get_last_lr()[0]
        self.optimizer.step()
        self.scheduler.step()
        self.updates += 1
        self.check_update(minibatch)
        loss_value = float(sums.pop("loss"))
        return {**averages(sums), "loss": loss_value, "gradient_norm": float(norm), "learning_rate": float(rate), **LEARNT}

    def backward(self, weighed: Batch, on_policy: bool) -> dict[str, torch.Tensor]:
        """The minibatch's gradient, from nothing and one microbatch at a time; the sums of what the loss reports. No rank waits here."""
        stage, policy = self.stage, self.policy
        sums: dict[str, torch.Tensor] = {}
        self.optimizer.zero_grad(set_to_none=True)
        for number, microbatch in enumerate(self.microbatches(weighed)):
            masks = derive(self.seed, "dropout", self.updates, number * self.ranks.world + self.ranks.rank) if policy.dropouts else None
            wanted = {"entropy": self.algorithm.needs_entropy, "values": self.algorithm.critic is not None}
            output = policy.forward(microbatch, stage.sampling, **wanted, dropout_seed=masks)
            microbatch = microbatch.to(output.logprobs.device)
            if on_policy:  # the sampler drops nothing, so with dropout the check scores once more
                scored = output.logprobs if masks is None else self.logprobs(microbatch)
                trust.assert_on_policy(policy, microbatch, scored, stage.sampling)
            loss, metrics = self.algorithm.loss(output, microbatch)
            if not loss.requires_grad:
                raise TrustError("the loss has no gradient: the policy's log-probabilities are detached, so nothing would be learnt")
            loss.backward()  # type: ignore[no-untyped-call]
            for name, value in {**metrics, "loss": loss.detach()}.items():
                sums[name] = sums[name] + value if name in sums else value
        return sums

    def refuse(self, fault: str) -> dict[str, float]:
        """An update that would spoil the weights: the end, or left out, as ``nonfinite`` says. The weights, the optimizer and what the
        algorithm remembers stay as they were before the step."""
        self.optimizer.zero_grad(set_to_none=True)
        self.algorithm.load_state_dict(self.before)
        if self.stage.nonfinite == "stop":
            raise NonFiniteError(f"{fault}: lower optimizer.learning_rate, or look at the step's trajectories", self.collection)
        if self.ranks.leads:
            logger.warning("%s: the update is skipped", fault)
        return {**LEARNT, "nonfinite_updates": 1.0}

    def logprobs(self, microbatch: Batch) -> torch.Tensor:
        """(B, T) log-probabilities under the policy as it acts, without dropout and without gradient."""
        with torch.no_grad():
            return self.policy.forward(microbatch, self.stage.sampling).logprobs

    def score(self, batch: Batch, scores: Callable[[Batch], torch.Tensor]) -> torch.Tensor:
        """(B, T) of what ``scores`` says of each microbatch, without gradient."""

        def work() -> torch.Tensor:
            found = torch.zeros_like(batch.logprobs)
            for rows in self.microbatching.cut(batch, torch.ones(len(batch), dtype=torch.bool)):
                part = scores(batch.select(rows)).cpu()
                found[rows, : part.shape[1]] = part
            return found

        return self.microbatching.within_memory(work)

    def microbatches(self, minibatch: Batch) -> Iterator[Batch]:
        """The minibatch, cut. Rows without a gradient are left out."""
        live = minibatch.weights.abs().sum(1) > 0
        if not self.algorithm.learns_at_zero_advantage:
            live &= (minibatch.advantages != 0).any(1)  # one that is NaN has its forward, and is found out
        for rows in self.microbatching.cut(minibatch, live):
            yield minibatch.select(rows)

    def check_update(self, minibatch: Batch) -> None:
        # a first step of groups without variance has no gradient but a penalty's, which is zero where the policy is its reference
        if not self.learning and bool(minibatch.advantages.any() or not self.algorithm.on_policy):
            trust.assert_learning(self.policy)
            self.learning = True
        self.ranks.assert_equal(self.parameters, "the weights after an update")
        if len(minibatch):
            trust.assert_same_policy(self.engine, minibatch.tokens[0, : int(minibatch.lengths[0])].tolist())

    # -- what a checkpoint remembers, beside the adapter ----------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        self.policy.save(folder)
        save_state(self.state_dict(), folder / "trainer.pt")

    def load(self, folder: Path) -> None:
        self.policy.load(folder)
        self.load_state_dict(load_state(folder / "trainer.pt"))

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "updates": self.updates,
            "recent": self.recent,
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "algorithm": self.algorithm.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step, self.updates, self.recent = state["step"], state["updates"], state["recent"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.algorithm.load_state_dict(state["algorithm"])


def collate_groups(groups: list[Group]) -> Batch:
    if not groups:
        raise AgentPeftError(
            "in every episode of this step the environment failed before the agent had acted: see the log for the cause, then run again"
        )
    return collate(*zip(*((t, number) for number, group in enumerate(groups) for t in group.trajectories), strict=True))


def describe(groups: list[Group], collection: Collection) -> dict[str, float]:
    """A step's trajectories in numbers. Shares are of trajectories, but for ``zero_variance_groups``, of groups. Failures are counted."""
    trajectories: list[Trajectory] = [t for group in groups for t in group.trajectories]
    turns = sum(len(t.turns) for t in trajectories)

    def share(count: int) -> float:
        return count / len(trajectories)

    return {
        "reward": sum(t.reward for t in trajectories) / len(trajectories),
        "success": share(sum(t.outcome == "correct" for t in trajectories)),
        "episodes": float(len(trajectories)),
        "turns": share(turns),
        "action_tokens": share(sum(t.num_action_tokens for t in trajectories)),
        "invalid_actions": sum(t.num_invalid for t in trajectories) / max(turns, 1),
        "truncated": share(sum(t.stop_reason == "token_limit" for t in trajectories)),
        "out_of_turns": share(sum(t.stop_reason == "turn_limit" for t in trajectories)),
        "zero_variance_groups": sum(len({t.reward for t in g.trajectories}) == 1 for g in groups if len(g.trajectories) > 1) / len(groups),
        "infrastructure_failures": float(collection.failures),
        "crashed": float(collection.crashed),
        "defects": float(collection.defects),
    }


def mean_of(records: list[Mapping[str, float]]) -> dict[str, float]:
    """Means of what the updates of one step reported, each over those that reported it; ``COUNTS`` are added up."""
    names = dict.fromkeys(name for record in records for name in record)
    values = {name: [record[name] for record in records if name in record] for name in names}
    return {name: sum(found) / (1 if name in COUNTS else len(found)) for name, found in values.items()}
