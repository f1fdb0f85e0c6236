"""The tool: trainings one after another, in the background, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import agent_peft as ap
from agent_peft import RLTrainingTool
from agent_peft.agents.datasets import create_rl_dataset
from agent_peft.agents.keys import TAKES, Parameters
from agent_peft.agents.tool import _measured
from agent_peft.agents.training import config_from, report_facts
from agent_peft.algorithms import ALGORITHMS

MODEL = "Qwen/Qwen3-0.6B"


def ask(**parameters):
    return json.loads(RLTrainingTool().run(parameters))


def refused(**parameters):
    told = ask(**parameters)
    assert told["status"] == "error" and "\n" not in told["message"], told
    return told["message"]


# -- trainings -----------------------------------------------------------------------------------------------


def test_grpo_goes_on_from_the_folder_of_sft_and_every_number_is_the_runs(place, check_numbers):
    sft = ask(algorithm="sft", model_name=MODEL, num_epochs=2, max_samples=3, output_dir="./output/sft")
    check_numbers(sft)
    assert sft["steps"] == 2 and sft["measured_on"] == "held-out tasks"
    assert sft["evaluations"]["base"]["tasks"] == 3
    grpo = ask(
        algorithm="grpo",
        model_name="./output/sft",
        num_generations=2,
        batch_size=2,
        output_dir="./output/grpo",
        reward="length_penalty",
        max_length=8,
    )
    check_numbers(grpo)
    assert grpo["steps"] == 2 and grpo["accuracy_before"] == sft["accuracy"]
    start = Path("output/grpo/start/adapter_model.safetensors").read_bytes()
    assert start == (Path(sft["checkpoint"]) / "adapter_model.safetensors").read_bytes()
    config = (place / "output/grpo/config.yaml").read_text()
    assert "target_tokens: 8" in config and "kind: grpo" in config
    measured = ask(action="evaluate", model_name="./output/grpo")
    assert measured["accuracy"] == grpo["accuracy"] and measured["tasks"] == 3


def test_the_same_training_goes_on_and_another_one_never_overwrites_it(place):
    keys = {"model_name": MODEL, "max_samples": 2, "eval_samples": 0, "batch_size": 2, "output_dir": "out"}
    first = ask(**keys)
    assert "accuracy" not in first and first["measured_on"].startswith("nothing")
    again = ask(**keys)
    assert "earlier_training_moved_to" not in again and again["metrics"] == first["metrics"]
    longer = ask(**keys, num_epochs=2)
    assert longer["step"] == 2 and "earlier_training_moved_to" not in longer
    other = ask(**keys, learning_rate=1e-3)
    assert other["earlier_training_moved_to"] == "out-1" and other["step"] == 1
    assert ask(action="status", output_dir="out-1")["step"] == 2
    assert "is where the model comes from" in refused(**keys | {"model_name": "out"}, learning_rate=1e-2)


def test_all_parameters_are_trained_and_ppo_works(place, check_numbers):
    told = ask(
        algorithm="ppo", model_name=MODEL, use_lora=False, num_generations=2, max_samples=2, output_dir="ppo"
    )
    check_numbers(told)
    assert "value_loss" in told["metrics"]
    assert (Path(told["checkpoint"]) / "model.safetensors").is_file()


def test_preferences_are_learnt_and_not_measured(place):
    row = {"prompt": "1 + 1?", "chosen": "2", "rejected": "3"}
    (place / "pairs.jsonl").write_text(json.dumps(row) + "\n")
    told = ask(algorithm="dpo", model_name=MODEL, dataset="pairs.jsonl", output_dir="dpo")
    assert told["status"] == "success" and told["step"] == 1 and "accuracy" not in told
    assert "learns from graded attempts" in refused(algorithm="grpo", model_name=MODEL, dataset="pairs.jsonl")


def test_recorded_replies_have_their_own_measures(place):
    """Those of ``preferences`` and ``chat``, in ``evaluate`` and in the report of any run."""
    pair = {"prompt": "1 + 1?", "chosen": "2", "rejected": "3"}
    (place / "pairs.jsonl").write_text(json.dumps(pair) + "\n")
    ask(algorithm="dpo", model_name=MODEL, dataset="pairs.jsonl", output_dir="dpo")
    measured = ask(action="evaluate", model_name="dpo", dataset="pairs.jsonl")
    assert (measured["status"], measured["accuracy"], measured["tasks"]) == ("success", 1.0, 1), measured
    assert measured["margin"] > 0 and "low" not in measured
    told = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    (place / "chat.jsonl").write_text(json.dumps({"messages": told}) + "\n")
    environment = {"kind": "chat", "tasks": "chat.jsonl"}
    keys = {"environment": environment, "evaluation": {"environment": environment}, "steps": 1}
    policy = {"kind": "pretrained", "model": MODEL}
    ap.train(ap.load_config(keys | {"run_dir": "chat", "policy": policy, "algorithm": "sft"}))
    report = ask(action="report", output_dir="chat")
    assert report["evaluations"]["after_sft"].keys() == {"loss", "token_accuracy", "tasks"}, report
    assert "accuracy" not in report


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_has_the_keys_that_it_needs(place, algorithm):
    pair = {"prompt": "1 + 1?", "chosen": "2", "rejected": "3"}
    tasks = create_rl_dataset([pair] if report_facts(algorithm).preferences else "arithmetic")
    keys = Parameters(model_name=MODEL, max_new_tokens=7, eval_samples=0)
    config = config_from(keys, algorithm, tasks).stages[0].algorithm
    assert config.kind == algorithm and getattr(config, "constant_length", None) in (7, None)


def test_rows_to_look_at(place):
    sft = ask(action="load_dataset", format="sft", max_samples=2)
    assert sft["dataset_size"] == 2 and sft["sample_keys"] == ["id", "prompt", "completion", "text"]
    assert sft["samples"][0]["completion"] == "1 + 1 = 2\n#### 2"
    rl = ask(action="load_dataset", format="rl", split="test", model_name=MODEL)
    assert rl["dataset_size"] == 3 and rl["samples"][0]["ground_truth"] == "10"
    assert rl["samples"][0]["prompt"].startswith("<bos>")  # as the model's template writes it


# -- in the background ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_training_in_the_background_is_told_of_stopped_and_goes_on(place):
    endless = {"model_name": MODEL, "num_epochs": 9000, "eval_samples": 0, "output_dir": "long"}
    begun = ask(**endless, background=True)
    assert begun["status"] == "success" and begun["state"] == "running", begun
    assert begun["pid"] != os.getpid()
    told = ask(action="status", output_dir="long")
    assert told["state"] == "running" and told["steps"] == 9000
    assert "another process is training there" in refused(**endless)
    stopped = ask(action="stop", output_dir="long")
    assert stopped["state"] == "interrupted" and stopped["cause"] == "SIGTERM"
    assert "is not running (it is interrupted)" in refused(action="stop", output_dir="long")
    report = ask(action="report", output_dir="long")
    assert report["configuration"]["stages"][0]["steps"] == 9000 and report["step"] == stopped["step"]


@pytest.mark.slow
def test_a_training_in_the_background_that_fails_is_told_with_its_cause(place):
    (place / "broken").mkdir()
    (place / "broken/config.json").write_text("{}")
    told = ask(model_name="broken", output_dir="out", background=True, eval_samples=0)
    while told.get("state") == "running":
        told = ask(action="status", output_dir="out")
    assert told["status"] == "error" or (told["state"] == "failed" and "broken" in told["cause"]), told


def test_a_process_that_does_not_hold_the_lock_is_never_stopped(place):
    stranger = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        run = place / "run"
        run.mkdir()
        (run / "config.yaml").write_text("stages: []\n")
        from agent_peft.child_processes import start_of
        from agent_peft.runs.history import _process

        process = _process() | {"pid": stranger.pid, "birth": start_of(stranger.pid)}
        (run / "run.json").write_text(json.dumps({"state": "running", "process": process}))
        (run / ".lock").touch()
        assert "left alone" in refused(action="stop", output_dir="run")
        assert stranger.poll() is None
    finally:
        stranger.communicate(b"\n")


HOLDS = """
import fcntl, sys
file = open(sys.argv[1], "r+")
if sys.argv[2] == "lock":
    fcntl.flock(file, fcntl.LOCK_EX)
print(flush=True)
input()
"""


@pytest.mark.parametrize("how", ["a link", "a hard link", "open", "locked"])
def test_a_process_that_has_the_file_of_the_lock_open_is_not_the_run(place, how):
    """Whoever prepares a folder can make its lock a file that any program has open."""
    from agent_peft.child_processes import start_of
    from agent_peft.runs.history import _process

    (run := place / "run").mkdir()
    (run / "config.yaml").write_text("stages: []\n")
    (place / "file").touch()
    if how == "a link":
        (run / ".lock").symlink_to(place / "file")
    elif how == "a hard link":
        os.link(place / "file", run / ".lock")
    else:
        (run / ".lock").touch()
    words = ["open" if how == "open" else "lock", *(["agent_peft", "train"] if how != "locked" else [])]
    command = [sys.executable, "-c", HOLDS, str(run / ".lock"), *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as stranger:
        assert stranger.stdout.readline() == b"\n"
        process = _process() | {"pid": stranger.pid, "birth": start_of(stranger.pid)}
        for missing in ("birth", "host", "pid", None):
            known = {key: value for key, value in process.items() if key != missing}
            (run / "run.json").write_text(json.dumps({"state": "running", "process": known}))
            said = refused(action="stop", output_dir="run")
        assert "left alone" in said
        assert stranger.poll() is None
        stranger.communicate(b"\n")


@pytest.mark.parametrize("name", ["run.training.yaml", "run.output.txt"])
@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe", "folder", "hard link"])
def test_a_training_in_the_background_writes_through_no_link(place, tmp_path, monkeypatch, name, kind):
    from agent_peft.agents import background

    (outside := tmp_path / "outside").mkdir()
    victim = outside / "victim"
    victim.write_text("precious")
    path = place / name
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "hard link":
        os.link(victim, path)
    else:
        path.symlink_to(victim if kind == "link" else victim.with_name("nowhere"))

    real = subprocess.Popen

    def popen(command, **more):
        if command[0] != sys.executable:
            return real(command, **more)
        os.write(more["stdout"].fileno(), b"agent-peft: it was started")
        return real(["false"])

    monkeypatch.setattr(background.subprocess, "Popen", popen)
    keys = {"model_name": MODEL, "max_samples": 2, "eval_samples": 0, "output_dir": "run", "background": True}
    said = refused(**keys)
    assert ("it was started" if kind == "hard link" else name) in said
    assert [one.name for one in victim.parent.iterdir()] == ["victim"] and victim.read_text() == "precious"


def test_a_training_never_takes_a_folder_of_other_files(place):
    (place / "mine").mkdir()
    (place / "mine/notes.md").write_text("mine")
    keys = {"model_name": MODEL, "max_samples": 2, "eval_samples": 0, "output_dir": "mine"}
    for background in (False, True):
        assert "is not a run directory" in refused(**keys, background=background)
    assert [path.name for path in (place / "mine").iterdir()] == ["notes.md"]
    assert not list(place.glob("mine.*"))


def test_equal_keys_are_refused(place):
    told = json.loads(RLTrainingTool().run('{"action": "create_reward", "action": "status"}'))
    assert told["status"] == "error" and "has the key 'action' twice" in told["message"]


# -- refusals ------------------------------------------------------------------------------------------------

REFUSED = [
    ({"output_dir": "../elsewhere", "model_name": MODEL}, "output_dir: '../elsewhere' is outside of"),
    ({"output_dir": "/etc/cron.d", "model_name": MODEL}, "is outside of"),
    ({"output_dir": "~/runs", "model_name": MODEL}, "is outside of"),
    ({"output_dir": "link/run", "model_name": MODEL}, "is outside of"),
    ({"output_dir": "out\0", "model_name": MODEL}, "is not a path"),
    ({"output_dir": ".", "model_name": MODEL}, "name a new folder in it"),
    ({"model_name": "/etc"}, "model_name: '/etc' is outside of"),
    ({"model_name": "../model"}, "is outside of"),
    ({"model_name": "link/model"}, "model_name: 'link/model' is outside of"),
    ({"model_name": "borrowed"}, "is outside of"),
    ({"model_name": "no/such/model"}, "there is no folder"),
    ({"model_name": "os:system"}, "there is no folder 'os:system'"),
    ({}, "model_name: is missing"),
    ({"dataset": "/etc/passwd", "model_name": MODEL}, "dataset: '/etc/passwd' is outside of"),
    ({"dataset": "../rows.jsonl", "model_name": MODEL}, "is outside of"),
    ({"dataset": "os:system", "model_name": MODEL}, "dataset: there is no 'os:system'"),
    ({"dataset": "gsm8", "model_name": MODEL}, "did you mean 'gsm8k'?"),
    ({"dataset": "huge.jsonl", "model_name": MODEL}, "is larger than 64 MB, which is the most that is read"),
    (
        {"dataset": "poor.jsonl", "model_name": MODEL},
        "has no text or number as answer (its columns are question)",
    ),
    ({"dataset": ".", "model_name": MODEL}, "dataset: "),
    ({"model_name": "."}, "model_name: "),
    ({"model_name": "linked"}, "model_name: "),
    ({"dataset": "gsm8k", "split": "train[:10", "model_name": MODEL}, "is not a split"),
    ({"algorithm": "dpo", "model_name": MODEL}, "learns from rows with prompt, chosen and rejected"),
    ({"algorithm": "alphago", "model_name": MODEL}, "algorithm: there is no 'alphago'; give one of"),
    ({"algorithm": "GRPO", "model_name": MODEL}, "did you mean 'grpo'?"),
    ({"algorithm": "os:system", "model_name": MODEL}, "there is no 'os:system'"),
    ({"num_epochs": -3, "model_name": MODEL}, "num_epochs: must be greater than 0, got -3"),
    ({"num_epochs": "many", "model_name": MODEL}, "num_epochs: must be a number"),
    ({"num_epochs": float("nan"), "model_name": MODEL}, "num_epochs: must be"),
    ({"max_samples": 10**10, "model_name": MODEL}, "max_samples: must be less than or equal to 1000000"),
    ({"max_samples": 0, "model_name": MODEL}, "max_samples: must be greater than or equal to 1"),
    ({"batch_size": 0, "model_name": MODEL}, "batch_size: must be"),
    ({"learning_rate": -1, "model_name": MODEL}, "learning_rate: must be"),
    ({"num_epoch": 3, "model_name": MODEL}, "num_epoch: unknown key; did you mean 'num_epochs'?"),
    ({"num_generations": 2, "model_name": MODEL}, "num_generations: has no effect with algorithm sft"),
    ({"use_lora": False, "lora_r": 4, "model_name": MODEL}, "no effect with use_lora: false"),
    ({"algorithm": "grpo", "reward": "os:system", "model_name": MODEL}, "never code"),
    ({"algorithm": "grpo", "reward": "__import__('os').system('true')", "model_name": MODEL}, "never code"),
    ({"algorithm": "grpo", "reward": "acuracy", "model_name": MODEL}, "did you mean 'accuracy'?"),
    (
        {"algorithm": "grpo", "reward": "step", "max_length": 9, "model_name": MODEL},
        "no effect with reward step",
    ),
    ({"action": "create_reward", "reward": "agent_peft.testing:anything"}, "never code"),
    ({"action": "delete", "output_dir": "output/sft"}, "there is no 'delete'; give one of train"),
    ({"action": "rm -rf output"}, "this tool removes nothing"),
    ({"action": ["train"]}, "action: there is no"),
    ({"action": "status", "output_dir": "nothing"}, "is not a folder; give the run_dir of a run"),
    ({"action": "stop", "output_dir": "../other"}, "is outside of"),
    ({"action": "status", "num_epochs": 2}, "num_epochs: has no effect with action status"),
    ({"action": "evaluate"}, "model_name: is missing"),
    ({"output_dir": "x" * 100_000, "model_name": MODEL}, "output_dir: must"),
]


@pytest.mark.parametrize(("parameters", "says"), REFUSED)
def test_hostile_parameters_are_refused_and_nothing_is_written(place, parameters, says):
    elsewhere = place.parent / "elsewhere"
    (place / "link").symlink_to(place.parent)
    (place / "poor.jsonl").write_text('{"question": "1 + 1?"}\n')
    with open(place / "huge.jsonl", "wb") as file:
        file.truncate(10 << 30)  # ten gigabytes that take no room
    (place / "borrowed").mkdir()
    (place / "linked").mkdir()
    (place / "linked/config.json").symlink_to("/etc/hostname")
    (place / "borrowed/adapter_config.json").write_text('{"base_model_name_or_path": "/etc"}')
    before = {path for path in place.rglob("*") if "link" not in path.parts}
    assert says in refused(**parameters)
    assert {path for path in place.rglob("*") if "link" not in path.parts} == before
    assert not elsewhere.exists()


@pytest.mark.parametrize("climbs", [False, True])
def test_a_split_names_no_file(place, climbs):
    secret = place.parent / "secret.jsonl"
    secret.write_text('{"question": "the password?", "answer": "#### 1234"}\n')
    (place / "data/gsm8k").mkdir(parents=True, exist_ok=True)
    split = "../../../secret" if climbs else str(secret.with_suffix(""))
    assert "1234" not in refused(action="load_dataset", dataset="gsm8k", split=split)


def test_rows_are_not_written_through_a_link(place):
    outside = place.parent / "outside"
    outside.mkdir()
    (place / "datasets").symlink_to(outside)
    (place / "own.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    assert "is outside of" in refused(action="load_dataset", dataset="own.jsonl")
    assert not list(outside.iterdir())


@pytest.mark.parametrize(
    "call", ["", "[]", "{", "null", "7", '{"action": "delete"}', "[" * 100_000, None, 7, [], "train"]
)
def test_what_is_not_a_request_is_an_error(place, call):
    result = json.loads(RLTrainingTool().run(call))
    assert result["status"] == "error" and result["message"]


def test_another_root_takes_its_paths_only(place):
    (place / "mine").mkdir()
    told = json.loads(RLTrainingTool("mine").run({"model_name": MODEL, "output_dir": "mine/run"}))
    assert "model_name" in told["message"] and f"is outside of {place / 'mine'}" in told["message"]


def test_the_text_of_a_dataset_cannot_reach_the_terminal(place):
    row = {"question": "a\x1b[31m\x9b31m\u202eb", "answer": "1"}
    (place / "rows.jsonl").write_text(json.dumps(row))
    text = RLTrainingTool().run({"action": "load_dataset", "dataset": "rows.jsonl"})
    assert not {"\x1b", "\x9b", "\u202e"} & set(text)
    assert json.loads(text)["samples"][0]["prompt"] == row["question"]


# -- the schema ----------------------------------------------------------------------------------------------


def test_the_schema_describes_every_parameter_and_no_other():
    schema = RLTrainingTool().schema
    assert schema["properties"].keys() == Parameters.model_fields.keys()
    assert all(one["description"] for one in schema["properties"].values())
    assert tuple(schema["properties"]["action"]["enum"]) == tuple(TAKES)
    json.dumps(schema)


def test_a_client_that_sends_every_default_is_understood(place):
    defaults = {name: field.default for name, field in Parameters.model_fields.items()}
    told = ask(**defaults | {"action": "create_reward", "reward": "step", "step_bonus": 0.5})
    assert told["rewards"]["terms"] == [{"kind": "reasoning_steps", "weight": 0.5, "max_steps": 5}]


def test_tasks_are_held_out_by_what_they_ask():
    sums = {"kind": "arithmetic", "digits": 1, "num_tasks": 8}
    for heldout, expected in (
        ({**sums, "split": "heldout"}, "held-out tasks"),
        (sums, "the tasks of training"),
        ({**sums, "num_tasks": 12}, "8 of 12 are tasks of training"),
        (None, "the tasks of training"),
    ):
        assert _measured(SimpleNamespace(environment=sums, heldout=heldout), None) == expected
