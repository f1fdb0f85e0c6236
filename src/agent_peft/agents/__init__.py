"""Agents that train, and policies that answer: uses of a run. The names are on the front door."""

from importlib.util import find_spec

# whether what trains is installed here
TRAINING_AVAILABLE: bool = all(find_spec(name) is not None for name in ("torch", "transformers", "peft"))
