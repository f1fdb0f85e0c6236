"""Algorithms: pure tensor mathematics. Each is a row of ``ALGORITHMS``; a user's own is named as
``kind: "package.module:row"``.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, SerializeAsAny

from agent_peft.algorithms.advantages import (
    MovingAverageBaseline,
    group_centered,
    group_normalized,
    leave_one_out,
    mean_normalized,
    plain_return,
)
from agent_peft.algorithms.base import Algorithm, AlgorithmConfig, Metrics, averages, weighted
from agent_peft.algorithms.distillation import DistillConfig
from agent_peft.algorithms.parts import PolicyGradientConfig
from agent_peft.algorithms.policy_gradient import PolicyGradient
from agent_peft.algorithms.ppo import PpoConfig
from agent_peft.algorithms.preference import DpoConfig, KtoConfig, OrpoConfig, SimpoConfig
from agent_peft.algorithms.rows import (
    CispoConfig,
    DapoConfig,
    DrGrpoConfig,
    GrpoConfig,
    GspoConfig,
    MaxrlConfig,
    ReinforceConfig,
    ReinforcePlusPlusConfig,
    RlooConfig,
)
from agent_peft.algorithms.supervised import SftConfig
from agent_peft.algorithms.surrogates import (
    band,
    clipped,
    constant_length,
    ratio,
    score_function,
    sequence_clipped,
    sequence_mean,
    sequence_sum,
    token_mean,
    truncated,
)
from agent_peft.lookup import find, may_import, nearest

ALGORITHMS: dict[str, type[AlgorithmConfig]] = {
    "reinforce": ReinforceConfig,
    "reinforce_plus_plus": ReinforcePlusPlusConfig,
    "rloo": RlooConfig,
    "grpo": GrpoConfig,
    "dapo": DapoConfig,
    "dr_grpo": DrGrpoConfig,
    "gspo": GspoConfig,
    "cispo": CispoConfig,
    "maxrl": MaxrlConfig,
    "policy_gradient": PolicyGradientConfig,
    "ppo": PpoConfig,
    "distill": DistillConfig,
    "sft": SftConfig,
    "dpo": DpoConfig,
    "kto": KtoConfig,
    "orpo": OrpoConfig,
    "simpo": SimpoConfig,
}


CUSTOM = "your own as package.module:row"


class CustomAlgorithmConfig(AlgorithmConfig):
    """The configuration of a user's row or ``Algorithm`` subclass: it has no keys.

    A row is copied whenever it is built, so that no training run leaves its state in it.
    """

    def build(self) -> Algorithm:
        custom: Any = find(self.kind)
        algorithm: Algorithm = custom() if isinstance(custom, type) else copy.deepcopy(custom)
        return algorithm


class UncheckedAlgorithmConfig(CustomAlgorithmConfig):
    """The configuration of a user's algorithm while its code must not be imported: any key is accepted, and
    checked when the code may be imported. Its facts are the defaults.
    """

    model_config = ConfigDict(extra="allow")

    @cached_property
    def facts(self) -> Algorithm:
        return Algorithm()


def algorithm_config_class(kind: object) -> type[AlgorithmConfig]:
    """Return the class that configures algorithms of this kind: that of a row of ``ALGORITHMS``, or for
    ``package.module:row`` the named ``AlgorithmConfig`` subclass.

    Raises:
        ValueError: there is no such kind, it cannot be imported, or it is not an algorithm.
    """
    if isinstance(kind, str) and kind in ALGORITHMS:
        return ALGORITHMS[kind]
    if isinstance(kind, str) and ":" in kind:
        if not may_import(kind):
            return UncheckedAlgorithmConfig
        custom = find(kind, "package.module:row")
        if isinstance(custom, type) and issubclass(custom, AlgorithmConfig):
            return custom
        if isinstance(custom, Algorithm) or (isinstance(custom, type) and issubclass(custom, Algorithm)):
            return CustomAlgorithmConfig
        raise ValueError(
            f"{kind!r} is not an algorithm; name a row, or a subclass of Algorithm or AlgorithmConfig"
        )
    fault = "names no kind" if kind is None else f"there is no kind {kind!r}"
    raise ValueError(f"{fault}; {nearest(kind or '', ALGORITHMS.keys(), CUSTOM)}")


def _resolve_algorithm(value: Any) -> Any:
    if isinstance(value, str):
        value = {"kind": value}
    if isinstance(value, Mapping):
        config_class = algorithm_config_class(value.get("kind"))
        # JSON and strict: no text becomes a number; its mistakes keep their places in the whole configuration
        value = config_class.model_validate_json(json.dumps(value, default=str), strict=True)
    if isinstance(value, AlgorithmConfig) and type(value) not in ALGORITHMS.values():
        _check_custom(value)
    return value


def _check_custom(config: AlgorithmConfig) -> None:
    try:
        facts = config.facts
    except Exception as error:  # the user's code may fail in any way
        raise ValueError(f"{config.kind!r} cannot be built ({type(error).__name__}: {error})") from error
    if not isinstance(facts, Algorithm):
        raise ValueError(f"build() of {config.kind!r} must return an Algorithm, got {type(facts).__name__}")
    if type(facts) is not Algorithm and type(facts).loss is Algorithm.loss:
        raise ValueError(f"{config.kind!r} has no loss: define loss(self, output, microbatch) in its class")


AnyAlgorithm = Annotated[SerializeAsAny[AlgorithmConfig], BeforeValidator(_resolve_algorithm)]

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "AlgorithmConfig",
    "AnyAlgorithm",
    "CispoConfig",
    "DapoConfig",
    "DistillConfig",
    "DpoConfig",
    "DrGrpoConfig",
    "GrpoConfig",
    "GspoConfig",
    "KtoConfig",
    "MaxrlConfig",
    "Metrics",
    "MovingAverageBaseline",
    "OrpoConfig",
    "PolicyGradient",
    "PolicyGradientConfig",
    "PpoConfig",
    "ReinforceConfig",
    "ReinforcePlusPlusConfig",
    "RlooConfig",
    "SftConfig",
    "SimpoConfig",
    "UncheckedAlgorithmConfig",
    "algorithm_config_class",
    "averages",
    "band",
    "clipped",
    "constant_length",
    "group_centered",
    "group_normalized",
    "leave_one_out",
    "mean_normalized",
    "plain_return",
    "ratio",
    "score_function",
    "sequence_clipped",
    "sequence_mean",
    "sequence_sum",
    "token_mean",
    "truncated",
    "weighted",
]
