"""The one loop. It knows no algorithm, no environment and no source of trajectories by name."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from agent_peft.algorithms import Algorithm, averages
from agent_peft.algorithms.base import restore_algorithm
from agent_peft.batch import Batch, collate_groups
from agent_peft.environments.base import Environment
from agent_peft.environments.contract import refuse_class
from agent_peft.hardware import explain_oom
from agent_peft.policies.engine import load_sampler
from agent_peft.policies.engine.base import Sampler
from agent_peft.policies.policy import Policy
from agent_peft.ranks import ALONE, Ranks, checksum
from agent_peft.rollout.collector import Collection, ScheduleOf
from agent_peft.rollout.replays import Replays
from agent_peft.rollout.sources import Source
from agent_peft.seeding import derive, generator
from agent_peft.training import checks
from agent_peft.training.checks import Mismatch
from agent_peft.training.gradients import Gradients
from agent_peft.training.lag import LaggedSource, contents_of
from agent_peft.training.optimizer import (
    MasterWeights,
    build_optimizer,
    learning_rate_factor,
    restore_optimizer,
    set_rate,
)
from agent_peft.training.source import build_source
from agent_peft.training.stage import DROPOUT_UNDER_LAG, Stage, StageConfig
from agent_peft.training.state_file import load_state, save_state
from agent_peft.training.step_metrics import (
    SignalCounter,
    Step,
    describe,
    gather_values,
    mean_of,
    surprisal,
)
from agent_peft.training.teacher import Teacher
from agent_peft.types import AgentPeftError, Group, TrustError

logger = logging.getLogger(__name__)

UPDATE_COUNTS = {"updates_skipped": 0.0, "nonfinite_updates": 0.0}
SMALLER = "set policy.dtype=auto, lower policy.lora.rank, or train an adapter where policy.lora is null"


class NonFiniteError(TrustError):
    """The loss or the gradient is NaN or infinite. All ranks raise it, before anything changes."""

    def __init__(self, message: str, collection: Collection) -> None:
        super().__init__(message)
        self.collection = collection  # of the step


class Trainer:
    """One stage of training: tasks -> groups -> batch -> loss -> update, ``stage.steps`` times.

    All state that carries over from step to step is in ``state_dict``. All randomness is derived from
    ``seed`` and the step.

    Args:
        engine: samples with ``policy``; None makes one.
        source: gives the trajectories of each step. None takes those that the algorithm learns from: episodes
            of the policy, or the environment's demonstrations.
        schedule_of: for a step, where its sampling schedule is written, and the one to follow.
        replays: the successful episodes of the run so far; None begins with none.
    """

    def __init__(
        self,
        policy: Policy,
        environment: Environment,
        stage: StageConfig | Mapping[str, Any],
        engine: Sampler | None = None,
        seed: int = 0,
        ranks: Ranks = ALONE,
        *,
        source: Source | None = None,
        schedule_of: ScheduleOf | None = None,
        replays: Replays | None = None,
    ) -> None:
        refuse_class(environment)
        stage = stage if isinstance(stage, StageConfig) else Stage(**stage)
        self.stage = stage = stage.with_steps(environment.tasks)
        self.policy, self.environment = policy, environment
        self.seed, self.ranks = seed, ranks
        self.engine = engine or load_sampler(policy)
        self.algorithm: Algorithm = stage.algorithm.build()
        self.masters = MasterWeights(policy.trainable_parameters())
        self.parameters = list(self.masters.parameters)
        rates = []
        if critic := self.algorithm.critic:
            head = policy.attach_value_head(detach=critic.detach)
            rates = [(list(head.parameters()), critic.learning_rate)]
        self.optimizer = build_optimizer(self.parameters, stage.optimizer, rates)
        self.parameters += [parameter for parameters, _ in rates for parameter in parameters]
        ranks.assert_equal(self.parameters, "the weights at the start of a stage")
        self.replays = Replays(stage.replay_in_prompt) if replays is None else replays
        self.source = source or build_source(
            stage, environment, self.engine, seed, ranks, schedule_of, self.replays
        )
        self.lagged: LaggedSource | None = None
        if stage.lag:
            self.source = self.lagged = self.with_lag(self.source)
        divergence = self.algorithm.divergence
        self.teacher = (
            None
            if divergence is None
            else Teacher(policy, stage.teacher, stage.reference, environment, divergence)
        )
        self.gradients = Gradients(policy, self.algorithm, stage, self.masters, self.optimizer, self.teacher)
        self.canary = checks.Canary(policy, self.engine)
        self.signal = SignalCounter(warns=ranks.is_main)
        self.step = 0
        self.planned = 0  # number of the present update, those before it that were not made included
        self.updates = 0  # that were made
        self.learning = False  # proven
        self.recent: list[float] = []  # values of the metric that ``until`` looks at

    def __iter__(self) -> Iterator[Step]:
        """The main loop."""
        while self.step < self.stage.steps:
            collection = self.source.collect(self.step)
            collected = self.comparable(collection.groups)
            groups = self.comparable(collection.kept) if collection.dropped else collected
            snapshot = self.algorithm.state_dict()
            batch = self.prepare(groups)
            updates: list[Mapping[str, float]] = []
            with self.lagged.ahead(self.step) if self.lagged else nullcontext():
                for epoch in range(self.algorithm.update_epochs):
                    for part, minibatch in enumerate(self.minibatches(batch, len(groups), epoch)):
                        self.begin_update(epoch * self.algorithm.minibatches + part)
                        first = self.algorithm.on_policy and epoch == part == 0
                        try:
                            updates.append(self.update(minibatch, first))
                        except FloatingPointError as fault:
                            updates.append(self.handle_nonfinite(str(fault), snapshot, collection))
                    if self.algorithm.is_done(mean_of(updates[-self.algorithm.minibatches :])):
                        break
            metrics = {
                **describe(collected, collection, self.stage.samples, self.stage.limits_thoughts),
                **mean_of(updates),
                **self.observe(batch, len(groups)),
                **({"surprisal": surprisal(collected)} if self.algorithm.on_policy else {}),
                **collection.metrics,
                "epochs_done": float(epoch + 1),
                "microbatch_halvings": self.halvings(),
            }
            logprobs = self.gradients.first_logprobs if self.algorithm.on_policy else None
            values = gather_values(self.ranks, collection.groups, groups, batch, logprobs)
            done, self.step = self.step, self.stage.steps if self.has_arrived(metrics) else self.step + 1
            yield Step(done, collection, metrics, token_values=values)

    def comparable(self, groups: list[Group]) -> list[Group]:
        """The groups that failing environments left with enough trajectories to learn from."""
        fewest = 2 if self.algorithm.compares_groups else 1
        enough = [group for group in groups if len(group.trajectories) >= fewest]
        if groups and not enough:
            raise AgentPeftError(
                f"no group of this step has {fewest} episode{'s'[: fewest - 1]} left: in the others the "
                "environment failed before the agent had acted; see the log for the cause, then run again"
            )
        return enough

    def prepare(self, groups: list[Group]) -> Batch:
        """This rank's share of the step, with its advantages. Groups are numbered over all ranks."""
        batch = self.collate(groups)
        if self.teacher:
            share = self.ranks.share(groups)
            self.teacher.begin_step([t for group in share for t in group.trajectories])
        if self.algorithm.critic:
            batch = replace(batch, values=self.gradients.score(batch, self.policy.values))
        return self.algorithm.prepare(self.gradients.begin_step(batch), self.ranks.sum)

    def collate(self, groups: list[Group]) -> Batch:
        """This rank's share of the groups."""
        share = self.ranks.share(range(len(groups)))
        return collate_groups({number: groups[number] for number in share}, self.stage.mask_cut_actions)

    def minibatches(self, batch: Batch, num_groups: int, epoch: int) -> Iterator[Batch]:
        """Whole groups of the ``num_groups`` of all ranks, as far as they are here. They are shuffled where
        there is more than one minibatch.
        """
        numbers = list(range(num_groups))
        parts = self.algorithm.minibatches
        if parts > max(num_groups, 1):  # without a success there is no group, and nothing to update
            raise AgentPeftError(
                f"algorithm.minibatches: {parts} is more than the {num_groups} groups of a step; lower it"
            )
        if parts > 1:
            generator(self.seed, "minibatches", self.step, epoch).shuffle(numbers)
        rows = batch.rows_by_group()
        for part in range(parts):
            here = sorted(rows.keys() & set(numbers[part::parts]))
            yield batch.select([row for number in here for row in rows[number]])

    def begin_update(self, number: int) -> None:
        """Set the number in the stage and the learning rate of the step's update ``number``."""
        stage = self.stage
        self.planned = self.step * (stage.updates // stage.steps) + number
        factor = learning_rate_factor(stage.optimizer, stage.updates, self.planned, self.updates)
        set_rate(self.optimizer, factor)

    def update(self, minibatch: Batch, first: bool) -> dict[str, float]:
        """One optimizer update. Weights are divided by the minibatch's denominator first, so that
        microbatches only sum.

        Args:
            first: it is the step's first, of a stage that learns from episodes of the policy.

        Raises:
            FloatingPointError: the loss or the gradient is not finite; nothing has changed.
        """
        if not self.stage.optimizer.learning_rate:
            return {**UPDATE_COUNTS, "updates_skipped": 1.0, "learning_rate": 0.0}
        weighed, denominator = self.algorithm.weigh(minibatch)
        weighed = replace(weighed, weights=weighed.weights / self.ranks.sum(denominator))
        sums, apart = self.gradients.compute(weighed, first, self.dropout_seed)
        sums, apart = self.ranks.sum_named(sums), apart.over(self.ranks)
        if not self.lagged:
            self.assert_on_policy(weighed, apart)
        named = apart.metrics if not self.lagged else apart.staleness
        if not sums:  # every group had one outcome only: there is nothing to learn from
            return {**UPDATE_COUNTS, "updates_skipped": 1.0, "learning_rate": self.learning_rate}
        self.ranks.sum_gradients(self.parameters)
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self.stage.optimizer.max_grad_norm))
        loss = float(sums.pop("loss"))
        for name, value in {"loss": loss, "gradient's norm": norm}.items():
            if not math.isfinite(value):
                raise FloatingPointError(f"the {name} is {value} at step {self.step}")
        if self.lagged:
            self.lagged.wait()
        with explain_oom("in the optimizer's step", SMALLER):
            self.canary.before_update(checks.canary_tokens(minibatch))
            checksum_before = 0 if self.learning else checksum(self.parameters)
            self.optimizer.step()
            self.masters.publish()
        self.updates += 1
        with explain_oom("as an update was checked", SMALLER):
            self.check_update(minibatch, checksum_before, norm)
        measured = {"loss": loss, "gradient_norm": norm, "learning_rate": self.learning_rate}
        return {**averages(sums), **named, **measured, **UPDATE_COUNTS}

    def assert_on_policy(self, minibatch: Batch, mismatch: Mismatch) -> None:
        """The mismatch of a minibatch that the present weights have sampled is no more than rounding."""
        sampling = self.stage.sampling
        checks.assert_on_policy(
            self.policy,
            mismatch,
            sampling,
            lambda: checks.measure_batch_rounding(self.policy, minibatch, sampling).over(self.ranks),
        )

    def with_lag(self, source: Source) -> LaggedSource:
        """The source with the stage's ``lag``. What arrives is compared with the weights that sampled it."""
        if self.policy.dropouts:
            raise AgentPeftError(f"{DROPOUT_UNDER_LAG} of the stage")

        def measure(collection: Collection) -> dict[str, float]:
            groups = collection.kept
            batch = self.collate(groups)
            batch = replace(batch, weights=batch.action_mask.float())
            mismatch = self.gradients.measure(batch).over(self.ranks)
            self.assert_on_policy(batch, mismatch)
            return mismatch.metrics

        overlaps = self.ranks.world_size == 1 and self.engine.hold() is not None
        if not overlaps and self.ranks.is_main:
            logger.warning("lag: sampling and learning take turns with this model, device or number of ranks")
        return LaggedSource(source, self.stage.lag, self.stage.steps, self.engine, measure, overlaps)

    @property
    def dropout_seed(self) -> int:
        """The seed of the present update's dropout masks."""
        return derive(self.seed, "dropout", self.planned)

    @property
    def learning_rate(self) -> float:
        """Of the present update, or of the latest one."""
        return float(self.optimizer.param_groups[0]["lr"])

    def handle_nonfinite(
        self, fault: str, snapshot: Mapping[str, Any], collection: Collection
    ) -> dict[str, float]:
        """End the run, or leave the update out, as ``nonfinite`` decides. The weights, the optimizer and
        the algorithm's state are those before the step.
        """
        self.optimizer.zero_grad(set_to_none=True)
        self.algorithm.load_state_dict(snapshot)
        if self.stage.nonfinite == "stop":
            advice = "lower optimizer.learning_rate, or look at the step's trajectories"
            raise NonFiniteError(f"{fault}: {advice}", collection) from None
        if self.ranks.is_main:
            logger.warning("%s: the update is skipped", fault)
        return {**UPDATE_COUNTS, "nonfinite_updates": 1.0, "learning_rate": self.learning_rate}

    def check_update(self, minibatch: Batch, checksum_before: int, norm: float) -> None:
        # a first step of groups without variance has no gradient but a penalty's, which is zero where the
        # policy is its reference; neither has one whose tokens were the only ones that top-p or top-k left
        learnable = (minibatch.advantages * minibatch.logprobs).any() or (self.teacher and norm > 0)
        if not self.learning and bool(learnable or not self.algorithm.on_policy):
            checks.assert_learning(self.policy, checksum(self.parameters) != checksum_before)
            self.learning = True
        self.ranks.assert_equal(self.parameters, "the weights after an update")
        self.canary.after_update(checks.canary_tokens(minibatch))

    def observe(self, batch: Batch, num_groups: int) -> dict[str, float]:
        """The algorithm's metrics of the step, and the share of groups to learn from."""
        metrics = self.algorithm.observe(batch, self.ranks.sum)
        if not self.algorithm.on_policy:
            share = num_groups / self.stage.tasks_per_step  # of the groups, those with a success
            return metrics | (self.signal.count(share) if self.stage.samples else {})
        signal = (batch.advantages != 0).any(1) if batch.signal is None else batch.signal
        mine = len(batch.groups[signal].unique())  # type: ignore[no-untyped-call]
        share = float(self.ranks.sum(torch.tensor(float(mine)))) / num_groups
        return metrics | self.signal.count(share)

    def halvings(self) -> float:
        """How often the ranks halved their microbatches for lack of memory, since the last call."""
        microbatching = self.gradients.microbatching
        number, microbatching.halvings = microbatching.halvings, 0
        return float(self.ranks.sum(torch.tensor(float(number))))

    def has_arrived(self, metrics: Mapping[str, float]) -> bool:
        """Whether ``until`` ends the stage here, before its last step. Steps without its metric do not
        count.
        """
        until = self.stage.until
        if until is None or until.metric not in metrics:
            return False
        self.recent = [*self.recent, metrics[until.metric]][-until.over :]
        return len(self.recent) == until.over and until.is_reached(sum(self.recent) / until.over)

    # -- what a checkpoint holds in addition to the adapter -------------------------------------------------

    def save(self, folder: Path) -> None:
        self.policy.save(folder)
        save_state(self.state_dict(), folder / "trainer.pt")
        if self.replays.size:
            self.replays.write(folder)
        if self.lagged and self.pending:
            self.lagged.write(folder, self.contents)

    def load(self, folder: Path) -> None:
        self.policy.load(folder)
        self.load_state_dict(state := load_state(folder / "trainer.pt"))
        if self.replays.size:
            self.replays.read(folder)
        if self.lagged:
            self.lagged.read(folder, self.contents, self.environment.tasks, state.get("pending", 0))

    @property
    def pending(self) -> int:
        """The number of steps that were sampled and not learned from; none where the stage is over."""
        return len(self.lagged.queue) if self.lagged and self.step < self.stage.steps else 0

    @property
    def contents(self) -> dict[str, Any]:
        """The digests of what decides the pending collections of a checkpoint, and of its weights."""
        contents = contents_of(self.stage, self.seed, self.environment.tasks, self.engine.chat)
        return {**contents, "adapter": checksum(self.parameters)}

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "updates": self.updates,
            "recent": self.recent,
            "optimizer": self.optimizer.state_dict(),
            "masters": self.masters.state_dict(),
            "algorithm": self.algorithm.state_dict(),
            **({"pending": self.pending} if self.lagged else {}),
            **({"canary": canary} if (canary := self.canary.state_dict()) else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step, self.updates, self.recent = state["step"], state["updates"], state["recent"]
        restore_optimizer(self.optimizer, state["optimizer"])
        self.masters.load_state_dict(state["masters"])
        restore_algorithm(self.algorithm, state["algorithm"])
        self.canary.load_state_dict(state.get("canary", {}))
