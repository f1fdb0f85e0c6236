"""The copy of what a run starts from, ``RUN/start``: with it, a run depends on no other run and no adapter
elsewhere.
"""

from __future__ import annotations

from agent_peft.configuration.run_config import TrainConfig
from agent_peft.files import sync
from agent_peft.policies.config import PolicyConfig, PretrainedConfig
from agent_peft.policies.loading import save_start
from agent_peft.policies.models.start import START, from_start, start_of
from agent_peft.runs.checkpoint import remove, sync_tree


def keep_start(config: TrainConfig) -> None:
    """Write ``RUN/start`` if the policy starts from an adapter or from a checkpoint of a run, and the folder
    is not there yet. It is whole or absent.
    """
    folder, policy = config.run_dir / START, config.policy
    if folder.is_dir() or not isinstance(policy, PretrainedConfig):
        return
    start = start_of(policy)
    if start.adapter is None and not start.of_run:
        return
    aside = folder.with_name(f".aside-{START}")
    remove(aside)
    save_start(policy, aside)
    sync_tree(aside)
    aside.rename(folder)
    sync(config.run_dir)


def started(config: TrainConfig) -> PolicyConfig:
    """Return the configuration of the run's policy, with ``RUN/start`` where there is one."""
    policy = config.policy
    return from_start(policy, config.run_dir) if isinstance(policy, PretrainedConfig) else policy
