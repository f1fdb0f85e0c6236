"""The teacher of a distillation: a frozen model, or the reference with privileged context.

The reference does not move. In a try with the policy's present weights, teacher and policy soon agreed on one
reply to all tasks: the divergence is zero there, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from agent_peft.batch import Batch
from agent_peft.environments.base import Environment, Mistake
from agent_peft.environments.templates import fill
from agent_peft.policies.config import Dtype, PretrainedConfig, ReferenceKind
from agent_peft.policies.loading import load_policy
from agent_peft.policies.models.start import start_of
from agent_peft.policies.policy import Policy, Teaching
from agent_peft.policies.reference import reference_of
from agent_peft.training.teacher_config import TeacherConfig
from agent_peft.types import AgentPeftError, Message, Trajectory

Opening = tuple[int, Sequence[int]]
"""The number of tokens before the first action, and the tokens that the teacher reads in their place."""


class Teacher:
    """Reads the policy's episodes. Its passes share prefixes as the policy's do.

    Args:
        divergence: (log-probabilities (n, V) of the policy and of the teacher) -> (n,) nats.
    """

    def __init__(
        self,
        policy: Policy,
        config: TeacherConfig,
        kind: ReferenceKind,
        environment: Environment,
        divergence: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        self.config, self.environment, self.divergence = config, environment, divergence
        self.chat = policy.chat
        self.policy = policy if config.model is None else load_frozen(config.model, policy)
        self.reference = reference_of(policy.model, kind) if config.model is None else None
        self.openings: list[Opening] = []  # by the row of the step's batch; empty where it has the policy's

    def begin_step(self, trajectories: Sequence[Trajectory]) -> None:
        """Make the prompts of a step's rows."""
        if self.config.prompt is not None:
            if any(len(trajectory.rows) > 1 for trajectory in trajectories):
                raise AgentPeftError(
                    "teacher.prompt needs episodes of one row, and the chat template rewrites their history; "
                    "set policy.thoughts: keep, or teacher.model and teacher.prompt: null"
                )
            self.openings = [self._opening(trajectory) for trajectory in trajectories]

    def read(self, batch: Batch, rows: Sequence[int]) -> Teaching:
        """The teacher's states for these rows of the step's batch. No gradient."""
        length = batch.tokens.shape[1]
        if self.openings:
            openings = [self.openings[row] for row in rows]
            read = [[*new, *row[old:]] for (old, new), row in zip(openings, batch.sequences, strict=True)]
            tokens = torch.zeros(len(read), max(map(len, read)), dtype=torch.int64)
            for place, row in enumerate(read):
                tokens[place, : len(row)] = torch.tensor(row)
            batch = replace(batch, tokens=tokens, lengths=torch.tensor([len(row) for row in read]))
        with torch.no_grad(), self._acting():
            hidden, predictors, _ = self.policy.states(batch.to(self.policy.device))
        if self.openings:  # from the places of the teacher's tokens to those of the policy's
            shift = torch.tensor([len(new) - old for old, new in openings])
            places = (torch.arange(length) + shift[:, None]).clamp(0, predictors.shape[1] - 1)
            predictors = predictors.gather(1, places.to(predictors.device))
        return Teaching(hidden, predictors, self._logits, self.divergence)

    def _logits(self, states: Tensor) -> Tensor:
        with self._acting():
            return self.policy.logits(states)

    def _acting(self) -> AbstractContextManager[None]:
        return nullcontext() if self.reference is None else self.reference.acting(self.policy.model)

    def _opening(self, trajectory: Trajectory) -> Opening:
        if not trajectory.turns:
            return 0, ()
        actions = [n for n, message in enumerate(trajectory.messages) if message.role == "assistant"]
        *before, last = trajectory.messages[: actions[-len(trajectory.turns)]]
        with closing(self.environment.episode(trajectory.task, 0)) as episode:
            if episode.tools:
                raise AgentPeftError(
                    "teacher.prompt shows plain messages, and the environment's episodes declare tools; "
                    "choose another protocol, or set teacher.model, and teacher.prompt: null"
                )
        solution = self.environment.demonstration(trajectory.task)
        if solution is None:
            raise AgentPeftError(
                f"task {trajectory.task.id}: there is no demonstration for teacher.prompt to show; "
                "set teacher.model, and teacher.prompt: null"
            )
        shown = "\n".join(action for action in solution if not isinstance(action, Mistake))
        text = fill(self.config.prompt or "", {"task": last.content, "solution": shown})
        opening = self.chat.opening([*before, Message(last.role, text)])
        return len(trajectory.turns[0].observation), opening


def load_frozen(model: str, policy: Policy) -> Policy:
    """The model of a teacher on the policy's device and in its dtype. An adapter is merged into it."""
    dtype: Dtype = "float32" if policy.dtype == torch.float32 else "bfloat16"
    config = PretrainedConfig(model=model, dtype=dtype, device=str(policy.device), lora=None)
    try:
        merges = start_of(config).adapter is not None
        teacher = load_policy(config, merge_adapter=merges, packing=policy.packing)
    except AgentPeftError as error:
        raise AgentPeftError(f"teacher.model: {str(error).removeprefix('policy.model: ')}") from error
    if teacher.chat.tokenizer.get_vocab() != policy.chat.tokenizer.get_vocab():
        raise AgentPeftError(
            f"teacher.model: {model!r} has another tokenizer than the policy; name a model of the same family"
        )
    teacher.model.requires_grad_(False)
    return teacher
