"""Agent-PEFT teaches language-model agents by letting them act."""

__version__ = "0.1.0"
