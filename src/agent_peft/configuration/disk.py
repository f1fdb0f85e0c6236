"""The size of a run's trajectories on disk."""

from __future__ import annotations

from agent_peft.configuration.run_config import TrainConfig
from agent_peft.policies.memory import in_words

TOKEN = 4 + 1 + 4 + 4 + 4  # token, mask, two log-probabilities, advantage
TEXT = 5  # bytes of a token's text, as JSON holds it; twice as many or more in scripts that JSON escapes
RECORD = 600  # bytes of a line without its text: seed, outcome, rewards


def step_bytes(episodes: int, tokens: int) -> int:
    """Bytes of a step's files for episodes of that many tokens: arrays, and text as it is in English.

    >>> step_bytes(64, 400)
    601600
    """
    return episodes * (tokens * (TOKEN + TEXT) + RECORD)


def trajectories_in_words(config: TrainConfig) -> str:
    """The size of a run's trajectories, if every episode has ``sampling.max_tokens``."""
    keep = config.trajectories
    sizes = [
        step_bytes((1 + stage.refill) * stage.episodes_per_step, stage.sampling.max_tokens)
        for stage in config.stages
        for _ in range(stage.steps)
    ]
    kept = sizes[:: keep.every]
    if keep.last is not None:
        kept = sorted(kept)[-keep.last :]
    return (
        f"at most about {in_words(max(sizes))} a step and {in_words(sum(kept))} in all, of {len(kept)} steps "
        f"({TOKEN + TEXT} bytes for each token up to sampling.max_tokens)"
    )
