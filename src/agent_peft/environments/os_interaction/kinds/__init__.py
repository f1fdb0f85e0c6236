"""The kinds of generated tasks, by the skill they are about."""

from __future__ import annotations

from pathlib import Path

from agent_peft.environments.os_interaction.kinds import accounts, chains, files, lines, listings, text
from agent_peft.environments.os_interaction.kinds.base import Kind, Slots

ALL = (*files.KINDS, *listings.KINDS, *text.KINDS, *lines.KINDS, *accounts.KINDS)
KINDS: dict[str, tuple[Kind, ...]] = {
    skill: tuple(kind for kind in ALL if kind.skills[0] == skill)
    for skill in dict.fromkeys(kind.skills[0] for kind in ALL)
}
CHAINS = chains.KINDS
CHECKS = "".join(  # the functions that checks are written in
    line
    for line in (Path(__file__).parent / "checks.sh").read_text(encoding="utf-8").splitlines(keepends=True)
    if line.strip() and not line.startswith("#")
)

__all__ = ["CHAINS", "CHECKS", "KINDS", "Kind", "Slots"]
