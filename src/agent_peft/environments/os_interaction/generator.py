"""Tasks with one focus skill each, or with several, made up in LifelongAgentBench's format.

Each is one of `kinds()`, its slots filled from the names of its split. The evaluation looks at what is there
afterwards, not at how it came about, so another right way passes too.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from agent_peft.environments.contract import configured
from agent_peft.environments.os_interaction.config import OSGenerateConfig
from agent_peft.environments.os_interaction.kinds import CHECKS, Kind, chains, kinds
from agent_peft.environments.os_interaction.kinds.base import SPLITS, Names
from agent_peft.environments.os_interaction.problems import SKILLS
from agent_peft.environments.os_interaction.tasks import by_rarity
from agent_peft.seeding import derive, generator
from agent_peft.types import AgentPeftError

_ATTEMPTS = 1_000


def generate(
    num_tasks: int,
    seed: int,
    skills: Sequence[str] | None = None,
    split: str = "train",
    combined: float = 0.25,
) -> dict[str, dict[str, Any]]:
    """Entries by id, the skills taking turns. The same arguments, which are the keys of `OSGenerateConfig`,
    give the same entries, and fewer tasks are the first of more.
    """
    skills = tuple(skills or SKILLS)
    keys = {"num_tasks": num_tasks, "seed": seed, "skills": skills, "split": split, "combined": combined}
    configured(OSGenerateConfig, keys, "generate")
    entries: dict[str, dict[str, Any]] = {}
    seen: set[str] = set()
    for i in range(num_tasks):
        skill = skills[i % len(skills)]
        rng = generator(seed, "os_interaction", split, skill, i)
        for _ in range(_ATTEMPTS):
            several = rng.random() < combined
            drawn = _combination(skill, skills, rng) if several else [rng.choice(kinds()[skill])]
            entry = make_entry(i, drawn, split, rng)
            whole = f"{entry['instruction']}\n{entry['initialization_command_item']['script']}"
            if whole not in seen:
                break
        else:
            raise AgentPeftError(
                f"no further distinct {skill} task was found in {_ATTEMPTS} draws; ask for fewer tasks"
            )
        seen.add(whole)
        entries[f"{split}-{i:04d}-{'+'.join(kind.skills[0] for kind in drawn)}"] = entry
    return entries


def _combination(skill: str, skills: Sequence[str], rng: random.Random) -> list[Kind]:
    """A chain that uses the skill, or two or three kinds one after another; of the wanted skills only."""
    fitting = [chain for chain in chains() if skill in chain.skills and set(chain.skills) <= set(skills)]
    if fitting and rng.random() < 0.5:
        return [rng.choice(fitting)]
    others = rng.sample([other for other in skills if other != skill] or [skill], 1)
    if len(set(skills)) > 2 and rng.random() < 0.3:
        others.append(rng.choice([other for other in skills if other not in (skill, others[0])]))
    combination = [rng.choice(kinds()[each]) for each in (skill, *others)]
    rng.shuffle(combination)
    return combination


def make_entry(index: int, kinds: Sequence[Kind], split: str, rng: random.Random) -> dict[str, Any]:
    """A task that asks for one thing of each kind, in this order."""
    used: set[str] = set()  # so that requests of one task do not get into each other's way
    pools = SPLITS[split]
    worlds = []
    requests, init, gold, end = [], [], [], []
    for kind in kinds:
        slots = kind.slots(pools, rng, used)
        worlds.append((kind, slots))
        requests.append(slots.fill(rng.choice(kind.train if split == "train" else kind.heldout)))
        init.append(slots.fill(kind.init))
        gold.append(slots.fill(kind.gold))
        end.append(slots.fill(kind.before if kind.after is None else kind.after))
    if len(requests) > 1:
        joints = rng.choice(pools.joints)
        requests = [joint + request for joint, request in zip(joints, requests, strict=False)]
    instruction, solution = "".join(requests), " && ".join(gold)
    check = [slots.fill(kind.check) for kind, slots in worlds]
    rng = random.Random(derive(0, "twins", instruction, solution))
    for kind, asked in worlds:
        if not kind.before:
            continue
        # what is done to all that look alike is done to these
        alike = {slot: asked[slot] for slot in ("ext", "shell") if slot in asked}
        twin = kind.slots(pools, rng, used, **alike)
        init.append(twin.fill(kind.init))
        end.append(twin.fill(kind.before))
        check.append(twin.fill(kind.kept))
    check += [slots.fill(kind.runs) for kind, slots in worlds]
    return {
        "sample_index": index,
        "instruction": instruction,
        "initialization_command_item": {"command_name": "bash", "script": "\n".join(filter(None, init))},
        "evaluation_info": {
            "evaluation_command_item": {
                "command_name": "bash",
                "script": _evaluation(pools, " ".join(end).split(), check),
            },
            "ground_truth_command_item": {"command_name": "bash", "script": solution},
        },
        "skill_list": list(by_rarity(skill for kind in kinds for skill in kind.skills)),
        "raw_entry_hash": derive(0, instruction, solution),
    }


def _evaluation(pools: Names, end: Sequence[str], checks: Sequence[str]) -> str:
    """The script that checks which of the pools' names exist at the ``end``, and the other checks."""
    tops = [top.removeprefix("/") for top in pools.tops]
    patterns = {"tops": tops, "folders": pools.folders, "people": pools.users, "teams": pools.groups}
    paths = [word for word in end if word.startswith("/")]
    accounts = [word for word in end if not word.startswith("/")]
    asked = [" ".join([name, *words]) for name, words in (("tree", paths), ("accounts", accounts)) if words]
    lines = [
        CHECKS,
        *(f"{name}='{'|'.join(pool)}'" for name, pool in patterns.items()),
        " &&\n".join([*asked, *filter(None, checks)]),
    ]
    return "\n".join(lines)
