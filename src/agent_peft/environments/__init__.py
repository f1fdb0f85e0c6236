"""Environments: tasks, and episodes that answer actions with facts. Torch is never loaded from here."""
