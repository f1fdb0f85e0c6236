"""Values of a checked configuration that follow from the model and the adapter it names."""

from __future__ import annotations

from agent_peft.configuration.errors import Document
from agent_peft.configuration.run_config import TrainConfig
from agent_peft.policies.config import PretrainedConfig
from agent_peft.policies.models.positions import bound_of, fit
from agent_peft.policies.models.start import from_start, split_run, with_adapter
from agent_peft.policies.sampling import SamplingConfig


def fit_lengths(config: TrainConfig, document: Document) -> tuple[TrainConfig, dict[str, str]]:
    """Lower ``max_tokens`` to the model's positions wherever it is the default, and return the origin of each
    such value. One that was set and is more is refused. A model that is not here yet is read when it is
    loaded.
    """
    from agent_peft.policies.models.shape import config_at_hand

    model = config_at_hand(config.policy)
    bound = None if model is None else bound_of(model)
    if bound is None:
        return config, {}
    origins: dict[str, str] = {}

    def fitted(sampling: SamplingConfig, *keys: str) -> dict[str, SamplingConfig]:
        path = (*keys, "sampling", "max_tokens")
        is_set = "max_tokens" in sampling.model_fields_set
        found = fit(sampling, bound, document.place(path) if is_set else "")
        if found is not sampling:
            origins[".".join(path)] = "the positions of policy.model"
        return {"sampling": found}

    stages = tuple(
        stage.model_copy(update=fitted(stage.sampling, "stages", str(place)))
        for place, stage in enumerate(config.stages)
    )
    evaluation = config.evaluation and config.evaluation.following(stages[-1].sampling)
    if evaluation is not None and not evaluation.of_replies:
        evaluation = evaluation.model_copy(update=fitted(evaluation.sampling, "evaluation"))
    return config.model_copy(update={"stages": stages, "evaluation": evaluation}), origins


def fit_adapter(config: TrainConfig) -> tuple[TrainConfig, dict[str, str]]:
    """Set ``policy.lora`` as the adapter that the policy starts from needs it, and return the origin of each
    changed key. If ``policy.model`` is not here, the copy in the run directory counts.
    """
    if not isinstance(policy := config.policy, PretrainedConfig):
        return config, {}
    here = split_run(policy.model)[0].exists()
    fitted = with_adapter(policy if here else from_start(policy, config.run_dir))
    if fitted.lora == policy.lora or fitted.lora is None or policy.lora is None:
        return config, {}
    changed = [key for key, value in fitted.lora if value != getattr(policy.lora, key)]
    policy = policy.model_copy(update={"lora": fitted.lora})
    origins = {f"policy.lora.{key}": "the adapter that it continues with" for key in changed}
    return config.model_copy(update={"policy": policy}), origins
