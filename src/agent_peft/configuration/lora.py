"""The LoRA settings of a run that continues with an adapter: those of the adapter."""

from __future__ import annotations

from agent_peft.configuration.run_config import TrainConfig
from agent_peft.policies.config import PretrainedConfig
from agent_peft.policies.models.start import from_start, split_run, with_adapter

ORIGIN = "the adapter that it continues with"


def fit_adapter(config: TrainConfig) -> tuple[TrainConfig, dict[str, str]]:
    """Return the same run with ``policy.lora`` as its adapter needs it, and the origin of each changed key.

    If ``policy.model`` is not here, the copy in the run directory is asked.

    Raises:
        AgentPeftError: what ``policy.model`` names does not exist, or contradicts ``policy.lora``.
    """
    if not isinstance(policy := config.policy, PretrainedConfig):
        return config, {}
    here = split_run(policy.model)[0].exists()
    fitted = with_adapter(policy if here else from_start(policy, config.run_dir))
    if fitted.lora == policy.lora or fitted.lora is None or policy.lora is None:
        return config, {}
    changed = [key for key, value in fitted.lora if value != getattr(policy.lora, key)]
    policy = policy.model_copy(update={"lora": fitted.lora})
    return config.model_copy(update={"policy": policy}), {f"policy.lora.{key}": ORIGIN for key in changed}
