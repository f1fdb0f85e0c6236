"""Generated tasks: the same for the same seed, apart between the splits, and short."""

import json
import re
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_peft.environments.os_interaction import kinds as package
from agent_peft.environments.os_interaction.generator import SPLITS, generate
from agent_peft.environments.os_interaction.kinds import chains, kinds
from agent_peft.environments.os_interaction.problems import SKILLS
from agent_peft.environments.os_interaction.tasks import by_rarity, read_problem
from agent_peft.environments.task_commands import generate_tasks, validate_tasks
from agent_peft.types import AgentPeftError

SEVERAL = {split: generate(580, 0, split=split) for split in SPLITS}
NAMES = {
    split: {
        name
        for pool in ("folders", "stems", "users", "groups", "words")
        for name in getattr(SPLITS[split], pool)
    }
    for split in SPLITS
}

EVERY_KIND = [*(kind for of_skill in kinds().values() for kind in of_skill), *chains()]


def gold(entry):
    return entry["evaluation_info"]["ground_truth_command_item"]["script"]


def scripts(entry):
    info = entry["evaluation_info"]
    return [
        entry["initialization_command_item"]["script"],
        info["evaluation_command_item"]["script"],
        gold(entry),
    ]


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ("gold: ls\n  skill: [ls]", "ls: KeyError"),
        ("gold: ls\n  skills: [ls]\n  train: []\n  heldout: []\n  drow: x", "ls: .*drow"),
    ],
)
def test_a_wrong_row_of_a_data_file_is_named(row, fault, tmp_path, monkeypatch):
    (tmp_path / "lines.yaml").write_text(f"- {row}\n")
    monkeypatch.setattr(package, "_FOLDER", tmp_path)
    with pytest.raises(ValueError, match=f"lines.yaml: .*{fault}"):
        list(package._read("lines"))


def test_every_skill_is_made_and_taken_in_turn():
    assert set(kinds()) == set(SKILLS) and len(SKILLS) == 29
    for i, (name, entry) in enumerate(SEVERAL["train"].items()):
        assert SKILLS[i % 29] in entry["skill_list"], name


@pytest.mark.parametrize("split", SPLITS)
def test_entries_are_of_the_format_and_say_their_skills(split):
    for name, entry in SEVERAL[split].items():
        assert read_problem(name, entry).gold == gold(entry)
        assert "{" not in entry["instruction"]
        assert tuple(entry["skill_list"]) == by_rarity(entry["skill_list"])
        words = set(re.findall(r"[a-z]+", gold(entry)))
        assert set(entry["skill_list"]) <= words, name  # each command is there


def test_the_same_seed_gives_the_same_entries_and_another_others():
    assert SEVERAL["train"] == generate(580, 0)
    assert list(generate(29, 1).values()) != list(SEVERAL["train"].values())[:29]
    assert list(SEVERAL["train"].items())[:40] == list(generate(40, 0).items())  # fewer are the first of more


@pytest.mark.parametrize("split", SPLITS)
def test_tasks_are_distinct(split):
    seen = [
        (entry["instruction"], entry["initialization_command_item"]["script"])
        for entry in SEVERAL[split].values()
    ]
    assert len(set(seen)) == len(seen)


def test_single_commands_are_well_represented():
    golds = [gold(entry) for entry in SEVERAL["train"].values()]
    assert sum(" && " not in script and len(script) < 80 for script in golds) > 0.5 * len(golds)
    alone = generate(290, 0, combined=0)
    assert not any("+" in name for name in alone)
    assert max(len(gold(entry)) for entry in alone.values()) < 120
    assert max(len(entry["instruction"]) for entry in alone.values()) < 160


def test_combined_tasks_ask_for_several_things():
    together = generate(290, 0, combined=1)
    assert all(" && " in gold(entry) or " | " in gold(entry) for entry in together.values())
    assert {name.count("+") for name in together} == {0, 1, 2}  # a chain, two things, three things
    assert all(len(entry["skill_list"]) >= 2 for entry in together.values())


def test_only_the_wanted_skills_are_used():
    wanted = {"mkdir", "echo", "chmod"}
    for entry in generate(60, 0, sorted(wanted), combined=0.5).values():
        assert set(entry["skill_list"]) <= wanted
    assert all(entry["skill_list"] == ["sed"] for entry in generate(30, 0, ["sed"], combined=1).values())


def test_the_splits_share_no_phrasing():
    skeleton = re.compile(r"\{[^}]*\}")
    train = {skeleton.sub("_", template) for kind in EVERY_KIND for template in kind.train}
    heldout = {skeleton.sub("_", template) for kind in EVERY_KIND for template in kind.heldout}
    assert not train & heldout
    assert not set(SPLITS["train"].joints) & set(SPLITS["heldout"].joints)


def test_the_splits_share_no_name():
    assert not NAMES["train"] & NAMES["heldout"]
    for pool in ("tops", "extensions"):
        assert not set(getattr(SPLITS["train"], pool)) & set(getattr(SPLITS["heldout"], pool))
    for split, other in (("train", "heldout"), ("heldout", "train")):
        for name, entry in SEVERAL[split].items():
            placed = " ".join(re.findall(r"/\S+", entry["instruction"]))
            assert not NAMES[other] & set(re.findall(r"[a-z]+", placed)), name


@pytest.mark.parametrize("kind", EVERY_KIND, ids=lambda kind: kind.gold[:30])
def test_the_request_says_all_that_the_solution_needs(kind):
    fields = {field.split(".")[0] for _, field, _, _ in string.Formatter().parse(kind.gold) if field}
    for template in (*kind.train, *kind.heldout):
        said = {field.split(".")[0] for _, field, _, _ in string.Formatter().parse(template) if field}
        missing = fields - said - ({"column"} if "ordinal" in said else set())
        assert not missing, template


def test_requests_of_one_task_do_not_get_into_each_others_way():
    for entry in generate(300, 7, ["ls", "mkdir", "rm", "cp", "find", "chmod"], combined=1).values():
        paths = re.findall(r"/[a-z]+/[a-z]+(?=[/\s.]|$)", entry["instruction"])
        made = [
            path
            for path in re.findall(r"mkdir (\S+)(?: (\S+))?", gold(entry))
            for path in path
            if path.startswith("/")
        ]
        for path in made:
            assert paths.count(path) <= 1 + entry["instruction"].count(f"{path}/"), entry["instruction"]
            assert path not in entry["initialization_command_item"]["script"].split(), entry


def test_nothing_in_a_script_is_left_to_chance():
    for split in SPLITS:
        for entry in SEVERAL[split].values():
            assert not re.search(r"\$RANDOM|date\b", " ".join(scripts(entry)))


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(1, 12),
    st.sampled_from(sorted(SPLITS)),
    st.sets(st.sampled_from(SKILLS), min_size=1),
    st.floats(0, 1),
)
def test_any_arguments_make_tasks(seed, count, split, skills, combined):
    entries = generate(count, seed, sorted(skills), split, combined)
    assert len(entries) == count
    assert json.loads(json.dumps(entries)) == entries


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"num_tasks": 0}, "generate.num_tasks: must be greater than 0"),
        ({"skills": ["mkdri"]}, "did you mean 'mkdir'"),
        ({"split": "test"}, "generate.split: .*'heldout'"),
        ({"combined": 1.5}, "generate.combined: .* less than or equal to 1"),
        ({"num_tasks": 5_000, "skills": ["addgroup"], "split": "heldout", "combined": 0}, None),
    ],
)
def test_wrong_arguments_are_told(arguments, told):
    arguments = {"num_tasks": 1, "seed": 0, **arguments}
    if told is None:
        assert len(generate(**arguments)) == 5_000  # group IDs make them distinct
        return
    with pytest.raises(AgentPeftError, match=told):
        generate(**arguments)


def test_too_many_of_too_few_are_told():
    with pytest.raises(AgentPeftError, match="ask for fewer tasks"):
        generate(2_000, 0, ["chsh"], "heldout", combined=0)


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS)
def test_every_kind_fails_before_and_passes_after(split, sandboxed, tmp_path):
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps(generate(116, 11, split=split)))
    found = validate_tasks("os_interaction", tasks=path)
    assert (found["tasks"], found["gold_correct"], found["nothing_correct"]) == (116, 116, 0)
    assert found["rejected"] == []


def test_a_key_of_another_environment_is_told(tmp_path):
    settings = {"num_tasks": 3, "skills": ["mkdir"], "combined": 0.0}
    assert generate_tasks("os_interaction", **settings) == generate(3, 0, ["mkdir"], combined=0)
    for call, fault in (
        (lambda: generate_tasks("db_bench", num_tasks=3, sandbox="none"), "generate.sandbox: unknown key"),
        (lambda: generate_tasks("os_interaction"), "generate.num_tasks: "),
        (lambda: generate_tasks("chess"), "there is no kind 'chess'; give one of arithmetic, db_bench"),
        (lambda: generate_tasks("gsm8k"), "gsm8k has no tasks to generate; choose db_bench or os_interac"),
        (lambda: validate_tasks("os_interaction", tasks=tmp_path / "x.json", sandbox="jail"), "oci"),
        (lambda: validate_tasks("os_interaction", tasks="x.json", replay_threads=0), "replay_threads: "),
    ):
        with pytest.raises(AgentPeftError, match=fault):
            call()
