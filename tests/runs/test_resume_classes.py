"""What may change when a run continues: every key has an answer, which depends on how far the run is."""

from __future__ import annotations

import pytest

from agent_peft.configuration.keys import resume_class
from agent_peft.runs.changes import changed_keys, differing_keys


@pytest.mark.parametrize(
    ("key", "rule"),
    [
        ("engine.rows", "free"),
        ("threads", "free"),
        ("microbatch_tokens", "free"),
        ("policy.device", "free"),
        ("policy.activation_checkpointing", "free"),
        ("evaluation.environment.num_tasks", "free"),
        ("checkpoint.every", "free"),
        ("nonfinite", "free"),
        ("optimizer.learning_rate", "asked"),
        ("environment.num_tasks", "asked"),
        ("rewards.terms.0.weight", "asked"),
        ("environment.a_users_own_key", "asked"),
        ("environment.kind", "asked"),
        ("algorithm.kind", "fixed"),
        ("algorithm.kl_coef", "asked"),
        ("policy.kind", "fixed"),
        ("policy.architecture.n_layer", "fixed"),
        ("policy.model", "asked"),
        ("policy.lora.dropout", "asked"),
        ("policy.lora.rank", "fixed"),
    ],
)
def test_the_resume_class_of_some_keys(key, rule):
    assert resume_class(key) == rule


def run(*steps: int, **changes) -> dict:
    stages = [
        {"algorithm": {"kind": kind}, "name": kind, "steps": count, "microbatch_tokens": 768, "group_size": 8}
        for kind, count in zip(("sft", "grpo", "ppo"), steps, strict=False)
    ]
    return {"seed": 0, "policy": {"kind": "pretrained"}, "stages": stages, **changes}


def rules(old: dict, new: dict, done: int) -> dict[str, str]:
    return {change.key: change.rule for change in changed_keys(old, new, done)}


@pytest.mark.parametrize(
    ("old", "new", "done", "expected"),
    [
        (run(5, 10), run(5, 20), 7, "free"),
        (run(5, 10), run(5, 20), 15, "free"),  # also of a run that has ended
        (run(5, 10), run(5, 8), 7, "asked"),
        (run(5, 10), run(5, 2), 7, "asked"),
        (run(5, 10), run(5, 1), 7, "fixed"),  # two are made
        (run(5, 10), run(6, 10), 3, "asked"),
        (run(5, 10), run(6, 10), 5, "fixed"),  # the stage is done
    ],
)
def test_steps(old, new, done, expected):
    assert set(rules(old, new, done).values()) == {expected}


def test_stages_may_be_added_and_those_that_have_not_begun_removed():
    assert rules(run(5), run(5, 3), 5) == {"stages.1": "free"}
    assert rules(run(5, 3), run(5), 5) == {"stages.1": "asked"}
    assert rules(run(5, 3), run(5), 6) == {"stages.1": "fixed"}


def test_keys_of_a_stage_depend_on_how_far_the_run_is():
    old, new = run(5, 10), run(5, 10)
    new["stages"][0] |= {"group_size": 4, "microbatch_tokens": 9}
    for done, rule in ((0, "asked"), (4, "asked"), (5, "late")):
        assert rules(old, new, done) == {"stages.0.group_size": rule, "stages.0.microbatch_tokens": "free"}
    new = run(5, 10)
    new["stages"][1]["algorithm"] = {"kind": "ppo"}
    assert rules(old, new, 5) == {"stages.1.algorithm.kind": "asked"}
    assert rules(old, new, 6) == {"stages.1.algorithm.kind": "fixed"}
    new = run(5, 20)  # the last stage continues, so its other keys have an effect again
    new["stages"][1]["group_size"] = 4
    assert rules(old, new, 15) == {"stages.1.steps": "free", "stages.1.group_size": "asked"}


def test_the_seed_of_a_model_from_scratch_is_fixed():
    assert rules(run(5), run(5, seed=1), 1) == {"seed": "asked"}
    scratch = {"kind": "scratch"}
    assert rules(run(5, policy=scratch), run(5, policy=scratch, seed=1), 1) == {"seed": "fixed"}


def test_two_names_of_one_file_do_not_differ(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.json", "b.json"):
        (tmp_path / name).touch()
    old = run(5, environment={"tasks": str(tmp_path / "a.json")})
    assert rules(old, run(5, environment={"tasks": "a.json"}), 1) == {}
    assert rules(old, run(5, environment={"tasks": "b.json"}), 1) == {"environment.tasks": "asked"}


def test_a_key_that_is_newer_than_the_run_has_its_default_there():
    old, new = {"a": 1, "stages": [{"steps": 1}]}, {"a": 1, "b": 3, "stages": [{"steps": 1, "c": 5}]}
    defaults = {"a": 0, "b": 2, "stages": [{"steps": 1, "c": 5}]}
    assert list(differing_keys(old, new, defaults)) == [("b", 2, 3)]
