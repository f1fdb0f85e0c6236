"""The gradient of a minibatch, one microbatch at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.optim import Optimizer

from agent_peft.algorithms import Algorithm
from agent_peft.batch import Batch
from agent_peft.policies.forward.microbatching import Microbatching
from agent_peft.policies.policy import Policy
from agent_peft.policies.reference import Reference, reference_of
from agent_peft.ranks import merged
from agent_peft.training.checks import Mismatch, assert_mask
from agent_peft.training.optimizer import MasterWeights
from agent_peft.training.stage import StageConfig
from agent_peft.training.teacher import Teacher
from agent_peft.types import TrustError

CHECKED_POSITIONS = 512  # of what was sampled ahead


class Gradients:
    """Forwards and backwards over the microbatches of a batch. No rank waits for another one here.

    Attributes:
        reference: the policy that the KL is measured to, where the algorithm needs one.
        at_step: the policy that the step began with, where dropout makes a copy of it necessary.
        first_logprobs: (B, T) of the step's batch, the log-probabilities of the policy that the step begins
            with; NaN in rows that had no forward before the step's first update.
    """

    def __init__(
        self,
        policy: Policy,
        algorithm: Algorithm,
        stage: StageConfig,
        masters: MasterWeights,
        optimizer: Optimizer,
        teacher: Teacher | None = None,
    ) -> None:
        self.teacher = teacher
        self.policy, self.algorithm, self.sampling = policy, algorithm, stage.scoring
        self.masters, self.optimizer = masters, optimizer
        self.microbatching = Microbatching(
            stage.microbatch_tokens, policy.count_nodes, algorithm.keeps_groups_whole
        )
        self.reference = reference_of(policy.model, stage.reference) if algorithm.needs_reference else None
        self.at_step: Reference | None = None
        self.first_logprobs = self.groups = torch.empty(0)

    def begin_step(self, batch: Batch) -> Batch:
        """The step's batch with ``reference_logprobs`` and ``scored_logprobs``, where the algorithm needs
        them, and with the policy's ``logprobs`` of trajectories that are only measured. With dropout, each
        update has its own in addition.
        """
        policy = self.policy
        self.first_logprobs, self.groups = torch.full_like(batch.logprobs, math.nan), batch.groups
        if policy.dropouts and self.algorithm.on_policy:
            self.at_step = reference_of(policy.model)
        measured, reference = batch.groups < 0, self.reference
        if measured.any():
            batch = replace(batch, logprobs=batch.logprobs + self.score(batch, self._logprobs, measured))
        if reference is None:
            return batch

        def scores(part: Batch) -> Tensor:
            return policy.reference_logprobs(part, self.sampling, reference)

        # those to learn from alone, so in the microbatches of an update: there the policy is equal to the bit
        logprobs = self.score(batch, scores, ~measured)
        if measured.any():
            logprobs = logprobs + self.score(batch, scores, measured)
        batch = replace(batch, reference_logprobs=logprobs)
        if not self.algorithm.needs_scores:
            return batch
        # in the reference's microbatches and by its code, so that both are equal to the bit
        return replace(batch, scored_logprobs=self.score(batch, self._logprobs, ~measured))

    def score(self, batch: Batch, scores: Callable[[Batch], Tensor], live: Tensor | None = None) -> Tensor:
        """(B, T) values that ``scores`` gives for each microbatch, without gradient.

        Args:
            live: (B,) bool, the rows to score, and all by default. Others have zeros.
        """
        live = torch.ones(len(batch), dtype=torch.bool) if live is None else live

        def work() -> Tensor:
            values = torch.zeros_like(batch.logprobs)
            for rows in self.microbatching.cut(batch, live):
                part = scores(batch.select(rows)).cpu()
                values[rows, : part.shape[1]] = part
            return values

        return self.microbatching.within_memory(work)

    def measure(self, batch: Batch) -> Mismatch:
        """The difference between the sampler's and the policy's log-probabilities, over the first
        ``CHECKED_POSITIONS`` of a batch, or its first trajectory. The gradient in the parameters stays.
        """
        mismatch, everything = Mismatch(), torch.ones(len(batch), dtype=torch.bool)
        first = Microbatching(CHECKED_POSITIONS, self.policy.count_nodes).cut(batch, everything)
        part = batch.select(next(first, []))
        assert_mask(mask := part.action_mask, part.logprobs)
        mismatch.add(self.score(part, self._logprobs)[mask], part.logprobs[mask])
        return mismatch

    def compute(self, weighed: Batch, first: bool, dropout_seed: int) -> tuple[dict[str, Tensor], Mismatch]:
        """Leave the minibatch's gradient in the parameters.

        Args:
            first: the policy is still the one that the step began with, so its log-probabilities are compared
                with the sampler's.

        Returns:
            The sums of the loss and its metrics, empty where nothing has a gradient; and how far the
            policy is from the sampler.
        """
        return self.microbatching.within_memory(lambda: self._compute(weighed, first, dropout_seed))

    def _compute(self, weighed: Batch, first: bool, dropout_seed: int) -> tuple[dict[str, Tensor], Mismatch]:
        algorithm, policy = self.algorithm, self.policy
        sums: dict[str, Tensor] = {}
        mismatch = Mismatch()
        self.masters.drop_gradients()
        self.optimizer.zero_grad(set_to_none=True)
        places = torch.isin(self.groups, weighed.groups).nonzero()[:, 0]  # of its rows in the step's batch
        masks = dropout_seed if policy.dropouts else None
        for rows in self._microbatches(weighed):
            microbatch = weighed.select(rows)
            needs = {"entropy": algorithm.needs_entropy, "values": algorithm.critic is not None}
            # read first, while there are no activations of the policy
            taught = None if self.teacher is None else self.teacher.read(microbatch, places[rows].tolist())
            output = policy.forward(microbatch, self.sampling, **needs, teaching=taught, dropout_seed=masks)
            microbatch = microbatch.to(output.logprobs.device)
            if first:  # the sampler drops nothing, so with dropout the check scores once more
                scored = output.logprobs if masks is None else self._logprobs(microbatch)
                mask = microbatch.action_mask
                assert_mask(mask, microbatch.logprobs)
                mismatch.add(scored[mask], microbatch.logprobs[mask])
                self.first_logprobs[places[rows], : scored.shape[1]] = scored.detach().float().cpu()
            if masks is not None and algorithm.on_policy:
                at_step = output.logprobs.detach() if first else None
                microbatch = self._under_masks(microbatch, masks, at_step)
            elif masks is not None and self.reference is not None:
                reference = policy.reference_logprobs(microbatch, self.sampling, self.reference, masks)
                microbatch = replace(microbatch, reference_logprobs=reference)
            loss, metrics = algorithm.loss(output, microbatch)
            if not loss.requires_grad:
                raise TrustError(
                    "the loss has no gradient: the policy's log-probabilities are detached, so nothing would "
                    "be learned"
                )
            loss.backward()  # type: ignore[no-untyped-call]
            self.masters.take_gradients()
            for name, value in {**metrics, "loss": loss.detach()}.items():
                sums[name] = merged(name, sums[name], value) if name in sums else value
        return sums, mismatch

    def _microbatches(self, minibatch: Batch) -> Iterator[list[int]]:
        """The rows of each microbatch. Those without a gradient are left out."""
        live = minibatch.weights.abs().sum(1) > 0
        if not self.algorithm.learns_at_zero_advantage:
            live &= (minibatch.advantages != 0).any(1)  # NaN is not 0: its forward shows it in the loss
        yield from self.microbatching.cut(minibatch, live)

    def _under_masks(self, microbatch: Batch, masks: int, at_step: Tensor | None) -> Batch:
        """The microbatch with the log-probabilities that its loss compares the policy with, scored under the
        dropout masks of this update: so the ratio and the KL measure changed weights, and not which units
        were dropped (Hausknecht and Wagener, 2022, https://arxiv.org/abs/2202.11818).

        Args:
            at_step: (B, T) log-probabilities under these masks, where the policy is still the one that
                sampled.
        """

        def scored(by: Reference) -> Tensor:
            return self.policy.reference_logprobs(microbatch, self.sampling, by, masks)

        assert self.at_step is not None
        sampled = scored(self.at_step) if at_step is None else at_step
        reference = None if self.reference is None else scored(self.reference)
        return replace(microbatch, logprobs=sampled, reference_logprobs=reference)

    def _logprobs(self, microbatch: Batch) -> Tensor:
        """(B, T) log-probabilities of the policy as it acts, without dropout and without gradient."""
        with torch.no_grad():
            return self.policy.forward(microbatch, self.sampling).logprobs
