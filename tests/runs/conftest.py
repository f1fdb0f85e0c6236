"""Small runs, and kills."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from agent_peft.configuration.load import read_config
from agent_peft.configuration.run_config import TrainConfig
from agent_peft.configuration.yaml12 import dump


class Killed(BaseException):
    """A kill, which no code of ours catches."""


@pytest.fixture
def small(tmp_path, policy_config) -> dict[str, Any]:
    """Keys of a run of a tiny policy on sums of one digit; it has no stages."""
    return {
        "run_dir": str(tmp_path / "run"),
        "policy": policy_config.model_dump(mode="json"),
        "environment": {"kind": "arithmetic", "digits": 1, "num_tasks": 10},
    }


@pytest.fixture
def read(tmp_path) -> Callable[..., TrainConfig]:
    """``read(settings, *overrides)``: the configuration, from a file ``c.yaml``."""

    def read(settings: dict[str, Any], *overrides: str) -> TrainConfig:
        (tmp_path / "c.yaml").write_text(dump(settings))
        return read_config(tmp_path / "c.yaml", overrides)[0]

    return read


@pytest.fixture
def configure(read, settings) -> Callable[..., TrainConfig]:
    """``configure(**changes)``: the configuration of the file's ``settings`` with other keys."""
    return lambda **changes: read({**settings, **changes})


def killing(work: Callable[..., Any], left: list[int]) -> Callable[..., Any]:
    """``work``, which is killed when it is called after ``left[0]`` more calls."""

    def working(*arguments: Any, **keywords: Any) -> Any:
        if not left[0]:
            raise Killed
        left[0] -= 1
        return work(*arguments, **keywords)

    return working
