"""``agent-peft serve``, as a process: its line, its end, and training against it."""

import re
import signal
import time
from pathlib import Path

import httpx
import pytest

from agent_peft.cli import run
from agent_peft.environments import ENVIRONMENTS, load_environment
from agent_peft.policies.config import LoraSettings, ScratchConfig
from agent_peft.policies.engine import load_sampler
from agent_peft.policies.engine.base import EngineConfig
from agent_peft.policies.loading import load_policy
from agent_peft.training.stage import StageConfig
from agent_peft.training.trainer import Trainer

CONFIG = """\
run_dir: {folder}/run
policy:
  kind: scratch
  alphabet: "0123456789+*-= "
  architecture:
    {{model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 2}}
environment: {{kind: arithmetic, num_tasks: 10, digits: 1}}
evaluation: {{environment: {{kind: arithmetic, num_tasks: 3, digits: 1, split: heldout}}}}
steps: 2
algorithm: rloo
"""  # noqa: E501

ARCHITECTURE = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}
POLICY = ScratchConfig(
    architecture=ARCHITECTURE, alphabet="0123456789+*-= ", lora=LoraSettings(rank=4, alpha=8), device="cpu"
)
STAGE = {
    "algorithm": {"kind": "grpo"},
    "steps": 2,
    "tasks_per_step": 4,
    "group_size": 4,
    "sampling": {"max_new_tokens": 3},
    "rewards": {"invalid_action": -0.5},
    "optimizer": {"learning_rate": 1e-2},
}


@pytest.fixture
def served(tmp_path, warm_process):
    """The process, and the file of what it prints, which holds the first line."""
    (tmp_path / "c.yaml").write_text(CONFIG.format(folder=tmp_path))
    told = tmp_path / "told.txt"
    with told.open("w") as output:
        command = ["-m", "agent_peft", "serve", "c.yaml", "--port", "0"]
        process = warm_process.start(*command, folder=tmp_path, output=output)
    try:
        while not told.read_text().endswith("\n") and process.poll() is None:
            time.sleep(0.01)
        yield process, told
    finally:
        process.kill()


def train(settings):
    """Two steps: each step's groups and metrics, and the adapter after them."""
    policy, environment = load_policy(POLICY, 0), load_environment(settings)
    trainer = Trainer(
        policy, environment, StageConfig.model_validate(STAGE), load_sampler(policy, EngineConfig()), 0
    )
    steps = [(step.collection.groups, step.metrics) for step in trainer]
    environment.close()
    return steps, [parameter.tolist() for parameter in policy.trainable_parameters()]


@pytest.mark.slow
def test_a_process_that_serves(served, patient):
    process, told = served
    line = told.read_text()
    url, docs = re.findall(r"http://[\d.:]+[a-z/]*", line)
    assert line.startswith("serving train (10 tasks) and evaluation (3 tasks) on http://127.0.0.1:")
    assert httpx.get(docs, trust_env=False).status_code == 200
    assert httpx.get(f"{url}/examples", trust_env=False).status_code == 200

    here, there = (
        train({"kind": "arithmetic", "num_tasks": 10, "digits": 1}),
        train({"kind": "remote", "url": url}),
    )
    assert here == there
    (first, _), (second, _) = here[0]
    assert [group.task for group in first] != [group.task for group in second]
    assert any(
        trajectory.reward for group in first for trajectory in group.trajectories
    )  # something was learned from

    heldout = load_environment({"kind": "remote", "url": url, "environment": "evaluation"})
    assert len(heldout.tasks) == 3
    heldout.episode(heldout.tasks[0], 0).start()  # open at the end
    heldout.close()
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert told.read_text() == line


def test_mistakes_are_one_line(tmp_path, capsys, monkeypatch):
    (tmp_path / "c.yaml").write_text(CONFIG.format(folder=tmp_path))
    monkeypatch.delenv("NO_SUCH_TOKEN", raising=False)
    for more, told in (
        (
            ["--host", "0.0.0.0"],
            "so a token is needed: put one into an environment variable and name it with --token",
        ),
        (["--token", "NO_SUCH_TOKEN"], "'NO_SUCH_TOKEN' is not set"),
        (["--host", "192.0.2.1", "--token", "PATH"], "cannot listen on 192.0.2.1, port 8000"),
        (["--port", "70000"], "cannot listen on 127.0.0.1, port 70000"),
    ):
        assert run(["serve", str(tmp_path / "c.yaml"), *more]) == 2
        said = capsys.readouterr().err
        assert told in said
        assert said.count("\n") == 1


@pytest.mark.parametrize("kind", ["remote", "openenv"])
def test_the_page_has_every_key(kind):
    page = (Path(__file__).parents[3] / "docs" / "environment_server.md").read_text(encoding="utf-8")
    rows = page.split("## The client" if kind == "remote" else "## Training on an OpenEnv server")[1].split(
        "\n## "
    )[0]
    keys = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.+?) \|", rows, re.MULTILINE)))
    assert set(keys) == set(ENVIRONMENTS[kind].config_class.model_fields) - {"kind"}
