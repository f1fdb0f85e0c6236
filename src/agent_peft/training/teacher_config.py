"""The configuration of a teacher."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from agent_peft.config import Config
from agent_peft.environments.templates import with_placeholders

SOLVED = "{task}\n\nA correct solution:\n{solution}"
Prompt = Annotated[str, with_placeholders("task", "solution", needs="solution")]


class TeacherConfig(Config):
    """The policy whose distributions are the targets of a distillation: a frozen model, or the stage's
    reference with a prompt that shows it the solution.
    """

    model: str | None = Field(
        default=None,
        description="a model or a run, as policy.model may name them, with the policy's tokenizer; null is "
        "the stage's reference",
    )
    prompt: Prompt | None = Field(
        default_factory=lambda before: None if before.get("model") else SOLVED,
        description="the last message before the first action, as the teacher reads it: {task} is the "
        "policy's own, and {solution} the actions of the task's demonstration; null: the teacher reads what "
        "the policy reads; default: null with a model, otherwise both",
    )

    @model_validator(mode="after")
    def _differs(self) -> TeacherConfig:
        if self.model is None and self.prompt is None:
            raise ValueError(
                "the teacher would be the stage's reference, and hold the policy there; set teacher.model "
                "or teacher.prompt"
            )
        return self
