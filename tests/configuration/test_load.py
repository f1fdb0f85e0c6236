"""Configurations from Python: names, mappings, keyword arguments."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent_peft.configuration import bundled_configs
from agent_peft.configuration.load import dump_config, load_config, read_config
from agent_peft.configuration.read import find_config
from agent_peft.environments.arithmetic import ArithmeticConfig
from agent_peft.policies.config import PretrainedConfig
from agent_peft.training.optimizer import OptimizerConfig
from agent_peft.training.stage import StageConfig
from agent_peft.types import AgentPeftError

CONFIGS = Path(__file__).parent.parent.parent / "configs"
MAPPING = {
    "run_dir": Path("runs/a"),
    "policy": {"kind": "pretrained", "model": "smollm2-135m"},
    "environment": {"kind": "arithmetic", "digits": 1, "num_tasks": 10},
    "sampling": {"stop": ("\n",)},
    "stages": ["sft", {"algorithm": "rloo", "group_size": 4}],
    "steps": 3,
}


def test_a_mapping_is_read_as_a_file_with_the_same_keys(tmp_path):
    (tmp_path / "x.yaml").write_text(
        "run_dir: runs/a\npolicy: {kind: pretrained, model: smollm2-135m}\n"
        'environment: {kind: arithmetic, digits: 1, num_tasks: 10}\nsampling: {stop: ["\\n"]}\n'
        "stages: [sft, {algorithm: rloo, group_size: 4}]\nsteps: 3\n"
    )
    config = load_config(MAPPING)
    assert config == load_config(tmp_path / "x.yaml") == load_config(str(tmp_path / "x.yaml"))
    assert [stage.algorithm.kind for stage in config.stages] == ["sft", "rloo"]
    dump_config(config, tmp_path / "again.yaml")
    assert load_config(tmp_path / "again.yaml") == config


def test_configuration_objects_may_stand_in_a_mapping():
    objects = MAPPING | {
        "policy": PretrainedConfig(model="smollm2-135m"),
        "environment": ArithmeticConfig(digits=1, num_tasks=10),
        "stages": [
            StageConfig(algorithm="sft", steps=3),
            StageConfig(algorithm="rloo", group_size=4, steps=3),
        ],
    }
    del objects["steps"]
    assert load_config(objects) == load_config(MAPPING)


def test_overrides_are_keyword_arguments():
    config, provenance = read_config(
        MAPPING, {"seed": 5, "optimizer": {"learning_rate": 1e-3}, "stages.1.steps": 7}
    )
    assert (config.seed, [stage.steps for stage in config.stages]) == (5, [3, 7])
    assert [stage.optimizer for stage in config.stages] == [OptimizerConfig(learning_rate=1e-3)] * 2
    assert provenance.of("seed") == "argument" and provenance.of("policy.model") == "configuration"
    assert (
        load_config(MAPPING, algorithm="sft", **{"stages.1.algorithm": "reinforce"}).stages[1].group_size == 4
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"seeed": 1}, "argument: seeed: unknown key; did you mean 'seed'?"),
        ({"seed": "1"}, 'argument: seed: must be a whole number, got "1"'),
        (
            {"seed": object},
            "argument: seed: <class 'object'> has no place in a configuration; give a text or number",
        ),
        (
            {"": 1},
            "'': an override is written key=value without blanks, such as optimizer.learning_rate=1e-4",
        ),
        (
            {"optimizer": {"betas": [0.9, 0.9]}, "optimizer.betas": [0.9, 0.99]},
            "argument: 'optimizer' and 'optimizer.betas' set the same key; give one of them",
        ),
        ({"stages": []}, "argument: 'stages': name one stage and one of its keys, such as stages.0.steps=10"),
        ({"stages.2.steps": 1}, "argument: stages.2 is out of range: the last stage is stages.1"),
    ],
)
def test_a_wrong_argument(overrides, message):
    with pytest.raises(AgentPeftError) as error:
        load_config(MAPPING, **overrides)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "configuration: is empty; write at least run_dir, policy, environment, algorithm and steps"),
        (MAPPING | {"polcy": 1}, "configuration: polcy: unknown key; did you mean 'policy'?"),
        (
            MAPPING | {"stages": [3]},
            "configuration: stages.0: expected a mapping or an algorithm's name, got 3",
        ),
    ],
)
def test_a_wrong_mapping(content, message):
    with pytest.raises(AgentPeftError) as error:
        load_config(content)
    assert str(error.value) == message


def test_a_stage_takes_what_a_file_takes():
    stage = StageConfig(
        algorithm="rloo",
        steps=50,
        optimizer={"learning_rate": 3e-4},
        until={"metric": "success", "above": 0.9},
    )
    assert stage == StageConfig(
        algorithm={"kind": "rloo"},
        steps=50,
        optimizer=OptimizerConfig(learning_rate=3e-4),
        until={"metric": "success", "above": 0.9},
    )


def test_the_bundled_configurations_are_those_of_the_repository():
    assert bundled_configs() == {path.stem: path for path in sorted(CONFIGS.glob("*.yaml"))}


def test_a_bundled_configuration_is_read_by_its_name_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_config("quickstart") == load_config(CONFIGS / "quickstart.yaml")
    (tmp_path / "quickstart").write_text("run_dir: r\n")  # a file of this name comes first
    with pytest.raises(AgentPeftError, match=r"^quickstart: policy is missing"):
        load_config("quickstart")


@pytest.mark.parametrize("name", ["quikstart", "adder"])
def test_a_name_that_is_no_bundled_configuration(name):
    with pytest.raises(
        AgentPeftError, match=f"^{name}: there is no such file and no bundled configuration of this name; "
    ):
        find_config(name)
    assert find_config(f"{name}.yaml") == Path(f"{name}.yaml")
    assert find_config(os.path.join("here", name)) == Path("here", name)
