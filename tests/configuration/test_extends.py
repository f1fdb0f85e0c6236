"""A configuration that extends another one: whose key wins, where each value comes from, and one line for
each mistake.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_peft.configuration.load import dump_config, load_config, read_config
from agent_peft.types import AgentPeftError

BASE = """\
run_dir: runs/base
policy: {kind: pretrained, model: smollm2-135m, lora: {rank: 4, alpha: 8}}
environment: {kind: arithmetic, num_tasks: 10, digits: 1, seed: 5}
sampling: {stop: [a, b], max_tokens: 99}
optimizer: {learning_rate: 1e-3, weight_decay: 0.1}
stages:
  - {algorithm: sft, steps: 3}
  - {algorithm: {kind: grpo, clip_low: 0.1, kl_coef: 0.5}, steps: 5, group_size: 4,
     optimizer: {learning_rate: 1e-5}}
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(**texts: str) -> None:
        for name, text in texts.items():
            path = Path(f"{name.replace('__', '/')}.yaml")
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)

    write(base=BASE)
    return write


@pytest.fixture
def refused(write):
    def refused(source, *overrides: str) -> str:
        with pytest.raises(AgentPeftError) as raised:
            read_config(source, overrides)
        assert "\n" not in str(raised.value)
        return str(raised.value)

    return refused


def test_its_own_keys_win_and_mappings_merge_key_by_key(write):
    write(own="extends: base.yaml\nrun_dir: runs/own\npolicy: {lora: {rank: 2}}\nsampling: {stop: [c]}\n")
    config, provenance = read_config("own.yaml")
    assert str(config.run_dir) == "runs/own"
    assert (config.policy.model, config.policy.lora.rank, config.policy.lora.alpha) == ("smollm2-135m", 2, 8)
    assert [stage.sampling.stop for stage in config.stages] == [("c",), ("c",)], "a list replaces the list"
    assert [stage.sampling.max_tokens for stage in config.stages] == [99, 99]
    origins = {
        "run_dir": "own.yaml:2",
        "policy.lora.rank": "own.yaml:3",
        "policy.lora.alpha": "base.yaml:2",
        "stages.1.sampling.stop": "own.yaml:4, for all stages",
        "stages.1.group_size": "base.yaml:8",
        "stages.0.tasks_per_step": "default",
    }
    assert {key: provenance.of(key) for key in origins} == origins


def test_it_is_the_other_file_with_the_same_overrides(write, tmp_path):
    write(own="extends: base.yaml\nrun_dir: r\nsteps: 9\noptimizer: {learning_rate: 0.5}\n")
    overridden = load_config("base.yaml", run_dir="r", steps=9, optimizer={"learning_rate": 0.5})
    config = load_config("own.yaml")
    assert config == overridden
    dump_config(config, tmp_path / "run.yaml")
    assert "extends" not in (tmp_path / "run.yaml").read_text()
    assert load_config(tmp_path / "run.yaml") == config


def test_a_key_of_a_stage_at_the_top_wins_in_every_stage_where_it_has_an_effect(write):
    write(own="extends: base.yaml\ngroup_size: 2\noptimizer: {learning_rate: 0.5}\n")
    sft, grpo = load_config("own.yaml").stages
    assert (sft.group_size, grpo.group_size) == (1, 2)
    assert [stage.optimizer.learning_rate for stage in (sft, grpo)] == [0.5, 0.5]
    assert [stage.optimizer.weight_decay for stage in (sft, grpo)] == [0.1, 0.1]


def test_stages_replace_the_stages(write):
    write(
        own="extends: base.yaml\nstages:\n  - {algorithm: rloo, steps: 2, optimizer: {learning_rate: 0.5}}\n"
    )
    (stage,) = load_config("own.yaml").stages
    assert (stage.algorithm.kind, stage.group_size, stage.optimizer.weight_decay) == ("rloo", 8, 0.1)
    assert stage.optimizer.learning_rate == 0.5, (
        "the other file's default is used nowhere, which is not an error"
    )


def test_what_has_no_effect_any_more_is_left_out(write):
    write(own="extends: base.yaml\nalgorithm: sft\n")
    assert [stage.group_size for stage in load_config("own.yaml").stages] == [1, 1]


def test_its_own_key_without_an_effect_is_an_error(write, refused):
    write(own="extends: base.yaml\nalgorithm: sft\ngroup_size: 3\n")
    assert refused("own.yaml").startswith("own.yaml:3: group_size has no effect, because every stage learns")
    write(own="extends: base.yaml\ndigits: 3\n")
    assert refused("own.yaml") == "own.yaml:2: digits: unknown key; did you mean 'environment.digits'?"


def test_several_files_come_in_their_order(write):
    write(one="seed: 1\nthreads: 1\n", two="seed: 2\nengine: {rows: 7}\n")
    write(own="extends: [base.yaml, one.yaml, two.yaml]\nengine: {overlap: 3}\n")
    config = load_config("own.yaml")
    assert (config.seed, config.threads, config.engine.rows, config.engine.overlap) == (2, 1, 7, 3)


def test_a_path_is_relative_to_the_file_that_names_it(write, tmp_path, monkeypatch):
    write(sub__middle="extends: ../base.yaml\nseed: 1\n", own="extends: sub/middle.yaml\nthreads: 2\n")
    expected = load_config("own.yaml")
    assert (expected.seed, expected.threads) == (1, 2)
    monkeypatch.chdir(tmp_path.parent)
    assert load_config(tmp_path / "own.yaml") == expected


def test_a_bundled_configuration_and_a_mapping(write):
    write(own="extends: quickstart\nrun_dir: mine\n")
    assert load_config("own.yaml") == load_config("quickstart", run_dir="mine")
    assert load_config({"extends": "quickstart", "run_dir": "mine"}) == load_config("own.yaml")
    assert load_config({"extends": "base.yaml", "seed": 3}).seed == 3


def test_the_command_line_comes_last(write):
    write(own="extends: base.yaml\nseed: 1\nsteps: 4\n")
    config, provenance = read_config("own.yaml", ["seed=2", "stages.1.steps=6"])
    assert (config.seed, [stage.steps for stage in config.stages]) == (2, [4, 6])
    assert provenance.of("seed") == "command line" and provenance.of("stages.0.steps").startswith(
        "own.yaml:3"
    )


# -- another kind --------------------------------------------------------------------------------------------


def test_another_kind_keeps_the_keys_that_both_kinds_have(write, caplog):
    write(own="extends: base.yaml\nenvironment: {kind: openenv, url: 'http://a'}\nalgorithm: rloo\n")
    config, provenance = read_config("own.yaml")
    assert (config.environment.num_tasks, config.environment.seed) == (10, 5)
    assert provenance.of("environment.num_tasks") == "base.yaml:3"
    assert [stage.algorithm.kind for stage in config.stages] == ["rloo", "rloo"]
    assert config.stages[1].algorithm.kl_coef == 0.5 and not hasattr(config.stages[1].algorithm, "clip_low")
    assert not caplog.records, "the file says so itself"


def test_another_kind_on_the_command_line_tells_what_it_keeps_and_drops(write, caplog):
    config = read_config("base.yaml", ["environment.kind=openenv", "environment.url=http://a"])[0]
    assert (config.environment.num_tasks, config.environment.seed) == (10, 5)
    assert [record.getMessage() for record in caplog.records] == [
        "command line: environment has another kind than in base.yaml; of its other keys there it keeps "
        "num_tasks, seed and drops digits"
    ]


def test_another_kind_keeps_the_keys_of_sections_that_both_kinds_have(write):
    """And leaves out those inside them that only the other kind has."""
    generate = "generate: {num_tasks: 7, combined: 0.5, skills: [mkdir]}"
    write(own=f"extends: base.yaml\nenvironment: {{kind: os_interaction, {generate}}}\n")
    config = load_config(
        "own.yaml", **{"environment.kind": "db_bench", "environment.generate.skills": ["insert"]}
    )
    assert (config.environment.generate.num_tasks, config.environment.generate.skills) == (7, ("insert",))


def test_steps_and_epochs_replace_each_other(write):
    write(own="extends: base.yaml\nepochs: 2\n")
    assert [(stage.steps, stage.epochs) for stage in load_config("own.yaml").stages] == [(0, 2), (0, 2)]
    config = load_config("own.yaml", **{"stages.1.steps": 4})
    assert [(stage.steps, stage.epochs) for stage in config.stages] == [(0, 2), (4, None)]
    assert [stage.steps for stage in load_config("own.yaml", steps=3).stages] == [3, 3]


# -- mistakes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\nextends: nowhere.yaml", "own.yaml:2: extends: there is no file 'nowhere.yaml'; "),
        (
            "extends: bsae.yaml",
            "own.yaml:1: extends: there is no file 'bsae.yaml'; did you mean 'base.yaml'?",
        ),
        (
            "extends: quikstart",
            "own.yaml:1: extends: there is no file 'quikstart'; did you mean 'quickstart'?",
        ),
        ("extends: own.yaml", "own.yaml:1: extends: own.yaml extends own.yaml, a circle; remove one of them"),
        (
            "extends: [base.yaml, middle.yaml]",
            "middle.yaml:1: extends: own.yaml extends middle.yaml extends own.yaml, a circle; remove one",
        ),
        (
            "extends: [base.yaml, 3]",
            "own.yaml:1: extends: must be a file, the name of a bundled configuration",
        ),
        ("extends: {a: b}", "own.yaml:1: extends: must be a file, the name of a bundled configuration, or"),
        (
            "extends: null",
            "own.yaml:1: extends: must be a file, the name of a bundled configuration, or a list",
        ),
        ("extends: list.yaml", "list.yaml: is not a mapping of keys to values"),
        ("extends: .", "own.yaml:1: extends: there is no file '.'"),
        ("extends: base.yaml\nsede: 1", "own.yaml:2: sede: unknown key; did you mean 'seed'?"),
        ("extends: wrong.yaml", 'wrong.yaml:2: seed: must be a whole number, got "x"'),
    ],
)
def test_a_mistake_is_one_line_with_its_place(write, refused, text, message):
    write(own=text, middle="extends: own.yaml", list="[1]", wrong="extends: base.yaml\nseed: x")
    assert refused("own.yaml").startswith(message)


def test_a_strangers_file_cannot_make_us_read_for_ever(write, refused):
    """Each file names the next one many times."""
    for number in range(9):
        write(**{f"f{number}": f"extends: [{', '.join([f'f{number + 1}.yaml'] * 9)}]"})
    write(f9="seed: 1")
    assert refused("f0.yaml").endswith("extends: 50 files are the most; write some as one")


def test_it_is_no_key_of_the_command_line(write, refused):
    assert refused("base.yaml", "extends=quickstart").startswith("command line: extends: unknown key; ")
