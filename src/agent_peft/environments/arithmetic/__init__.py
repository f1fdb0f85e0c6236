"""Arithmetic: one question such as ``12+34=``, one answer, graded by exact match."""

from agent_peft.environments.arithmetic.environment import ALPHABET, Arithmetic, ArithmeticConfig
from agent_peft.environments.arithmetic.operations import OPERATIONS, Operation

__all__ = ["ALPHABET", "OPERATIONS", "Arithmetic", "ArithmeticConfig", "Operation"]
