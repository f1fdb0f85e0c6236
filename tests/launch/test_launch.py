"""A whole launch: two servers of a policy, two of an environment, a trainer, and kills."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agent_peft.configuration import yaml12

pytestmark = pytest.mark.slow


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def pid_of(*words: str) -> int:
    """The process whose command line holds all words."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if all(word in command for word in words):
            return int(folder.name)
    raise AssertionError(f"no process has {words}")


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize("place", ["local", "ray"])
def test_a_run_survives_the_death_of_each_part(
    tiny_llama, char_tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    if place == "ray":
        pytest.importorskip("ray", reason="Ray is not installed")
    tiny_llama.bfloat16().save_pretrained(tmp_path / "model")  # as models are stored
    char_tokenizer.save_pretrained(tmp_path / "model")
    train, cluster, run = (tmp_path / name for name in ("train.yaml", "cluster.yaml", "run"))
    sums = {"kind": "arithmetic", "operation": "addition", "digits": 1}
    policy = {"kind": "pretrained", "model": str(tmp_path / "model"), "lora": {"rank": 2}, "dtype": "float32"}
    keys = {"run_dir": str(run), "threads": 1, "policy": policy, "environment": sums, "evaluation": None}
    learning = {"kind": "reinforce", "baseline_momentum": None}  # from replies of which none is right, too
    stage = {"algorithm": learning, "steps": 20, "tasks_per_step": 4, "group_size": 4}
    sampling = {"max_new_tokens": 4, "max_tokens": 64}
    train.write_text(yaml12.dump({**keys, **stage, "sampling": sampling, "checkpoint": {"every": 1}}))
    samplers = {"number": 2, "port": free_port()}
    environments = {"number": 2, "port": free_port()}
    parts = {"train": str(train), "folder": str(tmp_path / "parts"), "samplers": samplers}
    learner = {"ranks": 2, "threads": 1}
    reserved = {"learner": learner, "ray": {"learner": {"CPU": 0.2}, "server": {"CPU": 0.2}}}
    cluster.write_text(yaml12.dump({**parts, "environments": environments, **reserved}))
    command = [sys.executable, "-m", "agent_peft", "launch", str(cluster), "--on", place]
    output = tmp_path / "output"
    with open(output, "w") as file:
        launch = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        victims = [
            ("serve-policy", str(samplers["port"])),
            ("serve", str(environments["port"] + 1)),
            ("train", str(train)),
        ]
        deadline = time.monotonic() + 500
        while launch.poll() is None and time.monotonic() < deadline:
            metrics = run / "metrics.jsonl"
            done = len(metrics.read_text().splitlines()) if metrics.exists() else 0
            if victims and done >= 2 * (4 - len(victims)):
                pid = pid_of(*victims.pop(0))
                os.kill(parent_of(pid) if place == "ray" else pid, signal.SIGKILL)  # Ray's actor
            time.sleep(0.1)
        text = output.read_text()
        assert launch.poll() == 0, text
    finally:
        launch.terminate()
        launch.wait()
    assert not victims
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(20))
    event = "its actor was lost" if place == "ray" else "ended with signal 9"
    for part in ("sampler-0", "environment-1", "learner"):
        assert f"{part}: {event}" in text, text
    with pytest.raises(AssertionError):  # nothing is left
        pid_of(str(train))
    # the bytes are those of an undisturbed run that is given these episodes
    program, token = [sys.executable, "-m", "agent_peft"], "AGENT_PEFT_CLUSTER_TOKEN"
    monkeypatch.setenv(token, (tmp_path / "parts/token").read_text())
    ports = [str(environments["port"] + number) for number in range(2)]
    serving = [
        subprocess.Popen([*program, "serve", str(train), "--port", port, "--token", token]) for port in ports
    ]
    try:
        ranks = [sys.executable, "-m", "agent_peft.launch.torchrun", "--standalone", "--nproc-per-node", "2"]
        again = [*ranks, *program[1:], "train", str(run / "config.yaml"), f"run_dir={tmp_path / 'again'}"]
        subprocess.run([*again, "engine={kind: local}", "--from-journal", str(run)], check=True)
    finally:
        for server in serving:
            server.terminate()
            server.wait()
    first, *weights = [
        next((tmp_path / name).glob(f"checkpoints/*{step}/**/adapter_model.safetensors")).read_bytes()
        for name, step in (("run", 19), ("run", 20), ("again", 20))
    ]
    assert weights[0] == weights[1] != first
