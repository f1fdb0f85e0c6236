"""Episodes no longer than the model can read, before any weights are loaded."""

from __future__ import annotations

from agent_peft.configuration.errors import Document
from agent_peft.configuration.run_config import TrainConfig
from agent_peft.policies.models.positions import bound_of, fit
from agent_peft.policies.models.shape import config_at_hand
from agent_peft.policies.sampling import SamplingConfig


def fit_lengths(config: TrainConfig, document: Document) -> tuple[TrainConfig, dict[str, str]]:
    """The same run with ``max_tokens`` lowered to the model's positions wherever it is the default, and where
    each such value comes from.

    A model that is not here yet is not asked; the engine asks it when it is loaded.

    Raises:
        AgentPeftError: ``max_tokens`` of a stage or of the evaluation was set, and is more.
    """
    model = config_at_hand(config.policy)
    bound = None if model is None else bound_of(model)
    if bound is None:
        return config, {}
    origins: dict[str, str] = {}

    def fitted(sampling: SamplingConfig, *keys: str) -> dict[str, SamplingConfig]:
        found = fit(sampling, bound, document.place((*keys, "sampling", "max_tokens")))
        if found is not sampling:
            origins[".".join((*keys, "sampling", "max_tokens"))] = "the positions of policy.model"
        return {"sampling": found}

    stages = tuple(
        stage.model_copy(update=fitted(stage.sampling, "stages", str(place)))
        for place, stage in enumerate(config.stages)
    )
    evaluation = config.evaluation and config.evaluation.following(stages[-1].sampling)
    evaluation = evaluation and evaluation.model_copy(update=fitted(evaluation.sampling, "evaluation"))
    return config.model_copy(update={"stages": stages, "evaluation": evaluation}), origins
