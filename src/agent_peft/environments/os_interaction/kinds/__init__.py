"""The kinds of generated tasks, by the skill they are about."""

from agent_peft.environments.os_interaction.kinds import accounts, chains, files, text
from agent_peft.environments.os_interaction.kinds.base import Kind, Slots

ALL = (*files.KINDS, *text.KINDS, *accounts.KINDS)
KINDS: dict[str, tuple[Kind, ...]] = {
    skill: tuple(kind for kind in ALL if kind.skills[0] == skill) for skill in dict.fromkeys(kind.skills[0] for kind in ALL)
}
CHAINS = chains.KINDS

__all__ = ["CHAINS", "KINDS", "Kind", "Slots"]
