"""The keys of a configuration are described by the classes that check them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agent_peft.cli import run
from agent_peft.configuration.explain import effective_values
from agent_peft.configuration.keys import all_keys, description_of, markdown, sections, type_in_words
from agent_peft.configuration.load import load_config
from agent_peft.types import AgentPeftError

DOCS = Path(__file__).parent.parent.parent / "docs"


def test_every_key_is_described():
    assert [
        f"{section.name}.{key.name}" for section in sections() for key in section.keys if not key.description
    ] == []


def test_every_section_is_described_in_a_docstring_of_its_own():
    page = markdown()
    for section in sections():
        assert section.model.__doc__, section.model
    assert "\n## algorithm (kind: grpo)\n" in page and "\n## environment.generate (kind: db_bench)\n" in page


def test_the_page_of_keys_is_up_to_date():
    assert (DOCS / "configuration.md").read_text(encoding="utf-8") == markdown(), (
        "docs/configuration.md is stale: run `make docs`"
    )


@pytest.mark.parametrize(
    ("prefixes", "paths"),
    [
        (["ranks"], ["ranks.timeout", "ranks.allow_other_number"]),
        (["optimizer.learning_rate"], ["optimizer.learning_rate"]),
        (["stages.until.above", "seed"], ["seed", "until.above"]),
        (["format"], ["rewards.terms.kind", "rewards.terms.weight", "rewards.terms.when"]),
    ],
)
def test_keys_below_prefixes(prefixes, paths):
    assert [key.path for key in all_keys(*prefixes)] == paths


def test_keys_of_a_kind():
    algorithm = {key.name: key for key in all_keys("ppo")}
    assert algorithm["gae_lambda"].path == "algorithm.gae_lambda"
    assert (algorithm["gae_lambda"].type, algorithm["gae_lambda"].default) == ("number >= 0 <= 1", "0.95")
    assert {key.path for key in all_keys("db_bench")} >= {
        "environment.generate.num_tasks",
        "environment.max_turns",
    }
    assert all(key.kind == "db_bench" for key in all_keys("db_bench"))


def test_a_prefix_that_no_key_has():
    with pytest.raises(AgentPeftError, match="no key begins with 'optimiser'; did you mean 'optimizer'"):
        all_keys("optimiser")


def test_defaults_are_those_of_the_section_they_stand_in():
    defaults = {
        key.path: key.default for key in all_keys("sampling", "evaluation.sampling", "run_dir", "group_size")
    }
    assert defaults["sampling.temperature"] == "1.0" and defaults["evaluation.sampling.temperature"] == "0.0"
    assert defaults["run_dir"] == "required" and defaults["group_size"] == "depends"


def test_types_in_words():
    assert type_in_words(int | None) == "whole number or null"
    assert type_in_words(tuple[float, float]) == "list of number, number"
    assert type_in_words(dict[str, int]) == "mapping"


def test_every_value_that_explain_shows_is_described():
    config = load_config("quickstart")
    assert [path for path, _ in effective_values(config) if not description_of(config, path)] == []


def test_explain_lists_keys(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)  # a worker of pytest has one
    assert run(["explain", "--keys", "ranks", "--json"]) == 0
    keys = json.loads(capsys.readouterr().out)["keys"]
    assert [key["path"] for key in keys] == ["ranks.timeout", "ranks.allow_other_number"]
    assert set(keys[0]) == {"path", "kind", "type", "default", "description"}
    assert run(["explain", "--keys", "optimizer", "rloo"]) == 0
    out = capsys.readouterr().out
    assert "optimizer.learning_rate" in out and "algorithm.kl_coef" in out and "run_dir" not in out


def test_a_pipe_gets_whole_lines(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert run(["explain", "--keys"]) == 0
    lines = [
        line for line in capsys.readouterr().out.splitlines() if "policy.activation_checkpointing" in line
    ]
    assert len(lines) == 2 and all(line.endswith("│") for line in lines)  # of both kinds of a policy
