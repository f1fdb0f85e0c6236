"""A run and its directory: what lies there, what is found again, who may write, and what can be measured
afterwards.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from peft import PeftModel
from transformers import AutoModelForCausalLM

from agent_peft.configuration.load import read_config
from agent_peft.configuration.run_config import TrainConfig, resolved
from agent_peft.environments.arithmetic import Arithmetic
from agent_peft.policies.loading import load_policy
from agent_peft.runs import evaluations
from agent_peft.runs.folder import recorded_measured, with_policy
from agent_peft.runs.run import train
from agent_peft.runs.targets import evaluate_target, merge_run
from agent_peft.types import AgentPeftError
from tests.conftest import case
from tests.runs.conftest import Killed, killing


@pytest.fixture
def settings(small):
    """A resolved configuration of two supervised steps and two of RL, as a dict to change."""
    heldout = {"kind": "arithmetic", "digits": 1, "num_tasks": 6, "split": "heldout"}
    return {
        **small,
        "evaluation": {"environment": heldout, "every": 1, "sampling": {"max_new_tokens": 3}},
        "stages": [
            {
                "algorithm": {"kind": "sft"},
                "steps": 1,
                "tasks_per_step": 4,
                "optimizer": {"learning_rate": 0.1},
            },
            {
                "algorithm": {"kind": "rloo"},
                "steps": 3,
                "tasks_per_step": 2,
                "group_size": 4,
                "rewards": {"invalid_action": -0.5},
                "sampling": {"max_new_tokens": 3},
                "optimizer": {"learning_rate": 0.02},
            },
        ],
    }


@pytest.fixture
def finished(configure) -> TrainConfig:
    config = configure()
    train(config)
    return config


def test_a_budget_of_thoughts_is_refused_before_the_first_stage(configure, settings):
    """Also where only a later stage samples, and the model has no mark of thoughts."""
    settings["stages"][1]["sampling"]["max_thinking_tokens"] = 2
    config = configure(evaluation=None)
    with pytest.raises(AgentPeftError, match=r"max_thinking_tokens: neither the model's chat template nor"):
        train(config)
    assert not (config.run_dir / "metrics.jsonl").exists()


# -- what lies there -----------------------------------------------------------------------------------------


def test_a_run_directory_holds_what_it_should(finished):
    folder = finished.run_dir
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [(m["step"], m["stage"]) for m in metrics] == [(0, "sft"), (1, "rloo"), (2, "rloo"), (3, "rloo")]
    assert {
        "loss",
        "reward",
        "success",
        "zero_variance_groups",
        "truncated",
        "invalid_actions",
        "infrastructure_failures",
    } <= metrics[1].keys()
    assert [json.loads(line)["step"] for line in (folder / "timing.jsonl").read_text().splitlines()] == [
        0,
        1,
        2,
        3,
    ]
    assert [p.name for p in sorted((folder / "trajectories").iterdir())] == [
        f"step_{step:06d}.{kind}" for step in range(4) for kind in ("jsonl", "safetensors")
    ]
    assert len((folder / "trajectories" / "step_000001.jsonl").read_text().splitlines()) == 8
    # the end of each stage is kept, and the last two
    assert [p.name for p in sorted((folder / "checkpoints").iterdir())] == [
        "step_000001",
        "step_000003",
        "step_000004",
    ]
    for checkpoint in (folder / "checkpoints").iterdir():
        assert {"adapter_config.json", "adapter_model.safetensors", "trainer.pt", "position.json"} <= {
            p.name for p in checkpoint.iterdir()
        }
    measured = recorded_measured(folder)
    assert measured.keys() == {"dtype", "matmul"}, "auto is decided"
    assert read_config(folder / "config.yaml")[0] == with_policy(finished, **measured)
    assert resolved(finished)["run_dir"] == str(folder)


@pytest.mark.filterwarnings(
    "ignore:.*is_gradient_checkpointing:FutureWarning"
)  # between PEFT and Transformers
def test_checkpoints_load_with_peft_alone(finished):
    checkpoint = finished.run_dir / "checkpoints" / "step_000004"
    base = load_policy(finished.policy.model_copy(update={"lora": None}), finished.seed)
    theirs = PeftModel.from_pretrained(base.model, str(checkpoint)).eval()
    ours = load_policy(finished.policy, finished.seed)
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.no_grad():
        untrained = ours.model(input_ids=tokens).logits
        ours.load(checkpoint)
        expected = ours.model(input_ids=tokens).logits
        torch.testing.assert_close(theirs(input_ids=tokens).logits, expected, rtol=0, atol=1e-6)
    assert not torch.allclose(untrained, expected, atol=1e-3), "nothing was trained"


def test_two_runs_of_one_configuration_write_the_same_bytes(finished, configure, tmp_path, run_contents):
    train(configure(run_dir=str(tmp_path / "again")))
    ours, theirs = run_contents(finished.run_dir), run_contents(tmp_path / "again")
    del ours["config.yaml"], theirs["config.yaml"]  # names its folder
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []


# -- what is found again -------------------------------------------------------------------------------------


def test_evaluations_are_read_back_and_never_made_again(configure, monkeypatch, run_contents):
    config = configure()
    first = train(config)
    assert list(first) == ["base", "after sft", "step 2", "step 3", "after rloo"]
    before = run_contents(config.run_dir)
    monkeypatch.setattr(evaluations, "evaluate", lambda *_: pytest.fail("evaluated again"))
    assert train(config) == first
    assert run_contents(config.run_dir) == before


def test_an_evaluation_that_was_lost_is_that_of_its_own_moment(finished, run_contents):
    """A kill between a checkpoint and its evaluation, or a file removed by hand: it is made again with the
    weights of then.
    """
    folder = finished.run_dir / "evaluations"
    before = run_contents(folder)
    names = sorted(name for name in before if name.endswith(".json"))
    for name in (*names[:2], *names[3:]):  # not that of step 2, whose checkpoint is gone
        (folder / name).unlink()
    train(finished)
    assert run_contents(folder) == before


def test_a_kill_between_checkpoint_and_evaluation_loses_none(configure, monkeypatch, tmp_path, run_contents):
    whole = configure(run_dir=str(tmp_path / "whole"))
    expected = train(whole)
    config = configure()
    for survived in range(len(expected)):
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(evaluations, "evaluate", killing(evaluations.evaluate, [1 if survived else 0]))
            train(config)
    found = train(config)
    assert list(found) == list(expected)
    assert found == expected
    ours, theirs = run_contents(config.run_dir), run_contents(whole.run_dir)
    del ours["config.yaml"], theirs["config.yaml"]
    assert [name for name in theirs if ours.get(name) != theirs[name]] == []


def test_fresh_starts_over(finished, monkeypatch, run_contents):
    before = run_contents(finished.run_dir)
    (finished.run_dir / "notes.txt").write_text("a user's own")
    (finished.run_dir / "trajectories" / "step_000099.jsonl").write_text("of a longer run\n")
    train(finished, fresh=True)
    assert run_contents(finished.run_dir) == {**before, "notes.txt": b"a user's own"}


def test_fresh_takes_another_configuration(finished, configure):
    train(configure(seed=1), fresh=True)
    assert read_config(finished.run_dir / "config.yaml")[0].seed == 1
    train(configure(seed=1))


@pytest.mark.parametrize(
    "survived", [case(survived, fast=survived in (0, 3)) for survived in range(4)]
)  # then no result is left
def test_a_killed_fresh_start_is_no_run_of_another_configuration(
    finished, configure, monkeypatch, survived, run_contents
):
    """Killed in its n-th removal, half way through: the old run starts over to the same end, another is
    still refused.
    """
    before, left = run_contents(finished.run_dir), [survived]
    rmtree, unlink = shutil.rmtree, Path.unlink

    def stopping(remove):
        def removing(path, *arguments, **keywords):
            if path.parent != finished.run_dir or not path.exists():
                return remove(path, *arguments, **keywords)
            if not left[0]:
                for file in [file for file in path.rglob("*") if file.is_file()][::2]:
                    unlink(file)
                raise KeyboardInterrupt
            left[0] -= 1
            return remove(path, *arguments, **keywords)

        return removing

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", stopping(rmtree))
        patched.setattr(Path, "unlink", stopping(unlink))
        with pytest.raises(KeyboardInterrupt):
            train(configure(seed=1), fresh=True)
    with pytest.raises(AgentPeftError, match="another configuration"):
        train(configure(seed=1))
    train(finished)
    after = {
        name: found for name, found in run_contents(finished.run_dir).items() if not name.startswith(".gone")
    }
    assert after == before


# -- who may write -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"seed": 1}, "seed"),
        ({"environment": {"kind": "arithmetic", "digits": 1, "num_tasks": 9}}, "environment"),
    ],
    ids=["seed", "environment"],
)
def test_another_configuration_is_refused(finished, configure, changes, key, run_contents):
    before = run_contents(finished.run_dir)
    with pytest.raises(AgentPeftError, match=rf"another configuration \({key}\b.* differs\).*--fresh"):
        train(configure(**changes))
    assert run_contents(finished.run_dir) == before


def test_a_changed_stage_is_named(finished, configure, settings):
    settings["stages"][1]["steps"] = 2
    with pytest.raises(AgentPeftError, match=r"\(stages\b.* differs\)"):
        train(configure())


def test_a_second_process_is_refused(configure):
    config = configure()
    config.run_dir.mkdir()
    with (
        FileLock(config.run_dir / ".lock"),
        pytest.raises(AgentPeftError, match="another process is training there"),
    ):
        train(config)
    train(config)


def test_a_supervised_stage_without_demonstrations_is_refused_before_anything_is_computed(
    configure, monkeypatch
):
    for name in ("demonstration", "rejection"):
        monkeypatch.setattr(Arithmetic, name, lambda *_: None)
    config = configure()
    with pytest.raises(AgentPeftError, match="the environment has no demonstration, so a supervised stage"):
        train(config)
    assert not config.run_dir.exists()


# -- what can be measured afterwards -------------------------------------------------------------------------


def test_a_run_is_evaluated_as_it_was_in_training(finished):
    reports = train(finished)
    assert reports["base"] != reports["after sft"] != reports["after rloo"]
    assert evaluate_target(finished.run_dir) == reports["after rloo"]
    assert evaluate_target(finished.run_dir, base=True) == reports["base"]
    assert evaluate_target(finished.run_dir, checkpoint="step_000001") == reports["after sft"]
    with pytest.raises(
        AgentPeftError, match="no checkpoint step_000002; there is: step_000001, step_000003, step_000004"
    ):
        evaluate_target(finished.run_dir, checkpoint="step_000002")


@pytest.fixture
def model(configure, tmp_path) -> Path:
    """A model's folder."""
    base = load_policy(configure().policy.model_copy(update={"lora": None}), 0)
    base.save_merged(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def pretrained(configure, settings, model):
    """A finished run on a model of a folder."""
    policy = {
        "kind": "pretrained",
        "model": str(model),
        "device": "cpu",
        "lora": {"rank": 4, "alpha": 8},
    }
    settings["stages"][0]["steps"] = (
        30  # until some answers are right: a report that is never right shows little
    )
    settings["stages"][0] |= {"tasks_per_step": 10, "optimizer": {"learning_rate": 0.01}}
    heldin = {**settings["environment"], "num_tasks": 10}
    config = configure(policy=policy, evaluation={"environment": heldin, "sampling": {"max_new_tokens": 3}})
    train(config)
    return config


def test_an_adapter_and_a_merged_model_evaluate_as_the_run(pretrained, tmp_path):
    base, expected = evaluate_target(pretrained.run_dir, base=True), evaluate_target(pretrained.run_dir)
    assert expected.outcomes != base.outcomes
    assert expected.success.value > 0
    adapter = pretrained.run_dir / "checkpoints" / f"step_{33:06d}"
    assert evaluate_target(adapter, pretrained) == expected
    merge_run(pretrained.run_dir, tmp_path / "merged")
    assert not (tmp_path / "merged" / "adapter_config.json").exists()
    AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert evaluate_target(tmp_path / "merged", pretrained) == expected
    with pytest.raises(AgentPeftError, match="exists and is not an empty folder"):
        merge_run(pretrained.run_dir, tmp_path / "merged")


def test_an_adapter_of_a_model_from_scratch_is_evaluated_or_refused_but_never_ignored(finished, tmp_path):
    reports = train(finished)
    assert reports["after rloo"] != reports["base"]
    adapter = finished.run_dir / "checkpoints" / "step_000004"
    assert evaluate_target(adapter, finished) == reports["after rloo"]
    merge_run(finished.run_dir, tmp_path / "merged")
    assert evaluate_target(tmp_path / "merged", finished) == reports["after rloo"]


def test_a_model_needs_a_configuration(model):
    with pytest.raises(AgentPeftError, match=r"is not a run directory.*--config"):
        evaluate_target(model)


def test_a_run_without_an_adapter_is_trained_and_evaluated(configure, policy_config):
    config = configure(policy={**policy_config.model_dump(mode="json"), "lora": None})
    reports = train(config)
    assert evaluate_target(config.run_dir) == reports["after rloo"]
    assert train(config) == reports
