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
from agent_peft.out_of_memory import telling_out_of_memory
from agent_peft.policies.engine.local import Engine
from agent_peft.policies.policy import Policy
from agent_peft.policies.reference import Reference, reference_of
from agent_peft.ranks import ALONE, Ranks, checksum
from agent_peft.rollout.collector import Collection, CollectionSchedule, Collector, demonstrate
from agent_peft.rollout.demonstrations import DemonstrationCheck
from agent_peft.rollout.gathering import gather_collection
from agent_peft.seeding import derive, generator
from agent_peft.training import checks
from agent_peft.training.microbatching import Microbatching
from agent_peft.training.optimizer import MasterWeights, build_optimizer
from agent_peft.training.stage import StageConfig, compares_within_groups
from agent_peft.training.state_file import load_state, save_state
from agent_peft.training.step_metrics import describe, mean_of
from agent_peft.types import AgentPeftError, Group, Task, TrustError

logger = logging.getLogger(__name__)

BARREN = 10  # steps in a row without a signal, after which there is a warning
LEARNT = {"updates_skipped": 0.0, "nonfinite_updates": 0.0}
SMALLER = "set policy.dtype=auto, lower policy.lora.rank, or train an adapter where policy.lora is null"


@dataclass(frozen=True)
class Step:
    """What one trip through the loop did."""

    number: int  # of the stage, from 0
    collection: Collection
    metrics: dict[str, float]


class NonFiniteError(TrustError):
    """The loss or the gradient is NaN or infinite. Told on all ranks alike, before it has touched
    anything.
    """

    def __init__(self, message: str, collection: Collection) -> None:
        super().__init__(message)
        self.collection = collection  # what the step was to be learnt from


class Trainer:
    """One stage of training: tasks -> groups -> batch -> loss -> update, ``stage.steps`` times.

    Everything that carries over from step to step is in ``state_dict``; everything random is derived from
    ``seed`` and the step.
    """

    def __init__(
        self,
        stage: StageConfig,
        policy: Policy,
        engine: Engine,
        environment: Environment,
        seed: int,
        ranks: Ranks = ALONE,
    ) -> None:
        self.stage, self.policy, self.engine, self.environment, self.seed, self.ranks = (
            stage,
            policy,
            engine,
            environment,
            seed,
            ranks,
        )
        self.schedule_of: Callable[[int], CollectionSchedule] | None = (
            None  # of a step, where a run keeps them
        )
        self.algorithm: Algorithm = build_algorithm(stage.algorithm)
        updates = stage.steps * self.algorithm.update_epochs * self.algorithm.minibatches
        self.masters = MasterWeights(policy.trainable_parameters())
        self.parameters = list(self.masters.parameters)
        self.reference = (
            reference_of(policy.model, stage.reference) if self.algorithm.needs_reference else None
        )
        self.at_step: Reference | None = (
            None  # the policy that a step began with, where dropout makes that worth keeping
        )
        critic = self.algorithm.critic
        own = (
            [(list(policy.attach_value_head(critic.trunk_gradient).parameters()), critic.learning_rate)]
            if critic
            else []
        )
        self.optimizer, self.scheduler = build_optimizer(self.parameters, stage.optimizer, updates, own)
        self.parameters += [p for parameters, _ in own for p in parameters]
        ranks.assert_equal(self.parameters, "the weights at the start of a stage")
        self.collector = Collector(environment, engine)
        self.microbatching = Microbatching(stage.microbatch_tokens, policy.count_nodes)
        self.demonstrations = DemonstrationCheck(policy.chat, stage.sampling, warns=ranks.leads)
        # a group that failing environments left with too few trajectories to compare is dropped, and the
        # failures are counted
        self.fewest = 2 if compares_within_groups(stage.build()) else 1
        self.canary = checks.Canary(engine)
        self.step = 0
        self.updates = 0
        self.learning = False  # proven
        self.barren = 0  # steps without a signal, up to now and in a row
        self.recent: list[float] = []  # values of the metric that ``until`` looks at
        self._order: tuple[int, list[int]] | None = None

    def __iter__(self) -> Iterator[Step]:
        """The main loop."""
        while self.step < self.stage.steps:
            self.collection = collection = self.collect(self.step)
            groups = [group for group in collection.groups if len(group.trajectories) >= self.fewest]
            if not groups:
                raise AgentPeftError(
                    f"no group of this step has {self.fewest} episode{'s'[: self.fewest - 1]} left: in the others the environment failed "
                    "before the agent had acted; see the log for the cause, then run again"
                )
            batch = self.prepare(groups)
            totals: list[Mapping[str, float]] = []
            for epoch in range(self.algorithm.update_epochs):
                for number, minibatch in enumerate(self.minibatches(batch, len(groups), epoch)):
                    totals.append(
                        self.update(minibatch, on_policy=self.algorithm.on_policy and epoch == number == 0)
                    )
                if self.algorithm.is_done(totals[-1]):
                    break
            observed = (
                self.algorithm.observe(batch, self.ranks.sum)
                | self.observe(batch, groups)
                | {"epochs_done": float(epoch + 1)}
            )
            metrics = describe(groups, collection) | mean_of(totals) | observed | self.halvings()
            done, self.step = self.step, self.stage.steps if self.has_arrived(metrics) else self.step + 1
            yield Step(done, collection, metrics)

    def halvings(self) -> dict[str, float]:
        """How often, since it was asked last, microbatches were halved on any rank because the memory was
        too small.
        """
        taken, self.microbatching.halvings = self.microbatching.halvings, 0
        return {"microbatch_halvings": float(self.ranks.sum(torch.tensor(float(taken))))}

    def has_arrived(self, metrics: Mapping[str, float]) -> bool:
        """Whether the stage may end here, before its last step: ``until`` says what for. Steps that lack
        its metric do not count.
        """
        until = self.stage.until
        if until is None or until.metric not in metrics:
            return False
        self.recent = [*self.recent, metrics[until.metric]][-until.over :]
        return len(self.recent) == until.over and until.is_reached(sum(self.recent) / until.over)

    def collect(self, step: int) -> Collection:
        """The step's groups, of all ranks: rollouts of the policy, or demonstrations where the algorithm
        learns from those.
        """
        stage, seed = self.stage, derive(self.seed, "rollout", step)
        tasks = self.tasks(step)
        positions = self.ranks.share(range(len(tasks)))
        if self.algorithm.on_policy:
            schedule = self.schedule_of(step) if self.schedule_of else None
            acting = (tasks, stage.group_size, stage.sampling, stage.rewards, seed, positions)
            mine = self.collector.collect(*acting, schedule.followed if schedule else None)
            if schedule is not None:
                schedule.write(mine.schedule)
        else:
            shown = [
                demonstrate(self.environment, tasks[p], self.policy.chat, stage.rewards, seed)
                for p in positions
            ]
            mine = Collection([Group(trajectory.task, [trajectory]) for trajectory in shown])
        return gather_collection(self.ranks, mine, tasks)

    def prepare(self, groups: list[Group]) -> Batch:
        """This rank's share of the step, its advantages set. Groups keep the numbers that they have among
        those of all ranks.
        """
        batch = collate_groups(groups, self.stage.mask_cut_actions)
        mine = set(self.ranks.share(range(len(groups))))
        batch = batch.select([row for row, group in enumerate(batch.groups.tolist()) if group in mine])
        policy, sampling = self.policy, self.stage.sampling
        if self.algorithm.critic:
            batch = replace(batch, values=self.score(batch, policy.values))
        self.before = self.algorithm.state_dict()
        batch = self.algorithm.prepare(batch, self.ranks.sum)
        if policy.dropouts and self.algorithm.on_policy:
            self.at_step = reference_of(policy.model)
        elif (reference := self.reference) is not None and len(batch):
            batch = replace(
                batch,
                reference_logprobs=self.score(
                    batch, lambda part: policy.reference_logprobs(part, sampling, reference)
                ),
            )
        return batch

    def observe(self, batch: Batch, groups: list[Group]) -> dict[str, float]:
        """What there was to learn from: the share of groups in which any advantage is not zero, or the
        faults of demonstrations.
        """
        if not self.algorithm.on_policy:
            return self.demonstrations.count(groups)
        mine = len(batch.groups[(batch.advantages != 0).any(1)].unique())  # type: ignore[no-untyped-call]
        signal = float(self.ranks.sum(torch.tensor(float(mine)))) / len(groups)
        self.barren = 0 if signal else self.barren + 1
        if self.barren == BARREN and self.ranks.leads:
            logger.warning(
                "%d steps in a row without a signal: no episode had another reward than those it is compared with, so nothing is learnt; "
                "read the trajectories, then train on demonstrations first (sft), take easier tasks, or price partial success (rewards)",
                BARREN,
            )
        return {"groups_with_signal": signal}

    def tasks(self, step: int) -> list[Task]:
        """``tasks_per_step`` tasks: one trip after the other through all of them, each in an order of its
        own.
        """
        everything, chosen = self.environment.tasks, []
        for position in range(step * self.stage.tasks_per_step, (step + 1) * self.stage.tasks_per_step):
            trip, index = divmod(position, len(everything))
            chosen.append(everything[self.order(trip)[index]])
        return chosen

    def order(self, trip: int) -> Sequence[int]:
        """The order of one trip through the tasks. The last one is kept: with many tasks it costs more
        than a step.
        """
        if self._order is None or self._order[0] != trip:
            order = list(range(len(self.environment.tasks)))
            if self.stage.task_order == "shuffle":
                generator(self.seed, "tasks", trip).shuffle(order)
            self._order = (trip, order)
        return self._order[1]

    def minibatches(self, batch: Batch, num_groups: int, epoch: int) -> Iterator[Batch]:
        """Whole groups, shuffled where there is more than one minibatch: of the ``num_groups`` of all
        ranks, those that are here.
        """
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
        """One optimizer update. Weights are divided by the minibatch's denominator first, so that
        microbatches only sum.
        """
        weighed, denominator = self.algorithm.weigh(minibatch)
        weighed = replace(weighed, weights=weighed.weights / self.ranks.sum(denominator))
        sums = self.microbatching.within_memory(lambda: self.backward(weighed, on_policy))
        sums, mismatch = self.ranks.sum_named(sums), self.mismatch.over(self.ranks)
        checks.assert_on_policy(self.policy, mismatch, self.stage.sampling)
        if not sums:  # every group had one outcome only: there is nothing to learn from
            return {**LEARNT, "updates_skipped": 1.0, "learning_rate": self.learning_rate}
        self.ranks.sum_gradients(self.parameters)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.stage.optimizer.max_grad_norm)
        for what, found in {"loss": float(sums["loss"]), "gradient's norm": float(norm)}.items():
            if not math.isfinite(found):
                return self.refuse(f"the {what} is {found} at step {self.step}")
        rate = self.learning_rate
        with telling_out_of_memory("in the optimizer's step", SMALLER):
            self.canary.before_update(self.canary_tokens(minibatch))
            unlearnt = 0 if self.learning else checksum(self.parameters)
            self.optimizer.step()
            self.masters.publish()
        self.scheduler.step()
        self.updates += 1
        with telling_out_of_memory("as an update was checked", SMALLER):
            self.check_update(minibatch, unlearnt)
        loss_value = float(sums.pop("loss"))
        return {
            **averages(sums),
            **mismatch.metrics,
            "loss": loss_value,
            "gradient_norm": float(norm),
            "learning_rate": rate,
            **LEARNT,
        }

    @property
    def learning_rate(self) -> float:
        """Of the next update."""
        return float(self.scheduler.get_last_lr()[0])

    def backward(self, weighed: Batch, on_policy: bool) -> dict[str, torch.Tensor]:
        """The minibatch's gradient, from nothing and one microbatch at a time; the sums of what the loss
        reports. No rank waits here.
        """
        stage, policy = self.stage, self.policy
        sums: dict[str, torch.Tensor] = {}
        self.mismatch = checks.Mismatch()
        self.optimizer.zero_grad(set_to_none=True)
        for number, microbatch in enumerate(self.microbatches(weighed)):
            masks = (
                derive(self.seed, "dropout", self.updates, number * self.ranks.world + self.ranks.rank)
                if policy.dropouts
                else None
            )
            wanted = {"entropy": self.algorithm.needs_entropy, "values": self.algorithm.critic is not None}
            output = policy.forward(microbatch, stage.sampling, **wanted, dropout_seed=masks)
            microbatch = microbatch.to(output.logprobs.device)
            if on_policy:  # the sampler drops nothing, so with dropout the check scores once more
                scored = output.logprobs if masks is None else self.logprobs(microbatch)
                self.mismatch.add(scored[microbatch.action_mask], microbatch.logprobs[microbatch.action_mask])
            if masks is not None and self.algorithm.on_policy:
                microbatch = self.under_masks(
                    microbatch, masks, output.logprobs.detach() if on_policy else None
                )
            loss, metrics = self.algorithm.loss(output, microbatch)
            if not loss.requires_grad:
                raise TrustError(
                    "the loss has no gradient: the policy's log-probabilities are detached, so nothing would be learnt"
                )
            loss.backward()  # type: ignore[no-untyped-call]
            self.masters.take_gradients()
            for name, value in {**metrics, "loss": loss.detach()}.items():
                sums[name] = sums[name] + value if name in sums else value
        return sums

    def under_masks(self, microbatch: Batch, masks: int, fresh: torch.Tensor | None) -> Batch:
        """The microbatch, and what its loss compares the policy with, scored under the very dropout masks of
        this update: so that the ratio and the KL tell of changed weights, and not of what was dropped
        (Hausknecht and Wagener, 2022, https://arxiv.org/abs/2202.11818).

        Args:
            fresh: (B, T) log-probabilities under these masks, where the policy is still the one that sampled.
        """

        def scored(by: Reference) -> torch.Tensor:
            return self.policy.reference_logprobs(microbatch, self.stage.sampling, by, masks)

        assert self.at_step is not None
        sampled = scored(self.at_step) if fresh is None else fresh
        reference = None if self.reference is None else scored(self.reference)
        return replace(microbatch, logprobs=sampled, reference_logprobs=reference)

    def refuse(self, fault: str) -> dict[str, float]:
        """An update that would spoil the weights: the end, or left out, as ``nonfinite`` says. The
        weights, the optimizer and what the algorithm remembers stay as they were before the step.
        """
        self.optimizer.zero_grad(set_to_none=True)
        self.algorithm.load_state_dict(self.before)
        if self.stage.nonfinite == "stop":
            raise NonFiniteError(
                f"{fault}: lower optimizer.learning_rate, or look at the step's trajectories", self.collection
            )
        if self.ranks.leads:
            logger.warning("%s: the update is skipped", fault)
        return {**LEARNT, "nonfinite_updates": 1.0, "learning_rate": self.learning_rate}

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

    def canary_tokens(self, minibatch: Batch) -> list[int]:
        """The minibatch's first trajectory; none where this rank has no part in it."""
        return minibatch.tokens[0, : int(minibatch.lengths[0])].tolist() if len(minibatch) else []

    def check_update(self, minibatch: Batch, unlearnt: int) -> None:
        # a first step of groups without variance has no gradient but a penalty's, which is zero where the
        # policy is its reference
        if not self.learning and bool(minibatch.advantages.any() or not self.algorithm.on_policy):
            checks.assert_learning(self.policy, checksum(self.parameters) != unlearnt)
            self.learning = True
        self.ranks.assert_equal(self.parameters, "the weights after an update")
        self.canary.after_update(self.canary_tokens(minibatch))

    # -- what a checkpoint remembers, beside the adapter -----------------------------------------------------

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
            "masters": self.masters.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "algorithm": self.algorithm.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step, self.updates, self.recent = state["step"], state["updates"], state["recent"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.masters.load_state_dict(state["masters"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.algorithm.load_state_dict(state["algorithm"])


def collate_groups(groups: list[Group], mask_cut: bool = False) -> Batch:
    trajectories, numbers = zip(
        *((t, number) for number, group in enumerate(groups) for t in group.trajectories), strict=True
    )
    return collate(trajectories, numbers, mask_cut)
