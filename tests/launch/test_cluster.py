"""Cluster files: what they start, what is refused, and the batch script."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from agent_peft.configuration.load import read_config
from agent_peft.launch.cluster import TOKEN, ClusterConfig, parts_of, read_cluster, token_of
from agent_peft.launch.manifests import batch_script, kubernetes_manifest, skypilot_task
from agent_peft.types import AgentPeftError

TRAIN = """
run_dir: run
policy: {kind: pretrained, model: smollm2-135m, dtype: float32, lora: {rank: 4}}
environment: {kind: arithmetic, operation: addition, digits: 1}
evaluation: {environment: {kind: arithmetic, operation: addition, digits: 1, split: heldout}}
algorithm: rloo
steps: 2
sampling: {max_tokens: 6000}
"""
BOTH = {"samplers": {"number": 2}, "environments": {"number": 2}}


@pytest.fixture
def train(tmp_path: Path) -> Path:
    path = tmp_path / "train.yaml"
    path.write_text(TRAIN)
    return path


def cluster_of(train: Path, **keys: object) -> ClusterConfig:
    keys = {"overrides": ["seed=3"], "folder": train.parent / "parts", **keys}
    return ClusterConfig.model_validate({"train": str(train), **keys})


def with_programs(folder: Path, **bodies: str) -> dict[str, str]:
    """The environment with shell programs of these bodies, which write to ``$ASKED``."""
    programs = folder / "bin"
    programs.mkdir()
    for name, body in bodies.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)
    path = f"{programs}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "ASKED": str(folder / "asked")}


def test_the_commands_of_the_parts(train: Path) -> None:
    cluster = cluster_of(train, **BOTH, overrides=["seed=3", "environment.digits=2", "engine.rows=8"])
    servers, learner = parts_of(cluster, read_config(train)[0], ["a", "b", "c", "d"])
    assert [part.name for part in servers] == ["sampler-0", "sampler-1", "environment-0", "environment-1"]
    assert [part.health for part in servers] == [
        f"http://{address}/health" for address in ("a:8101", "b:8102", "c:8201", "d:8202")
    ]
    words = servers[1].command[3:]
    assert words[:6] == ("serve-policy", "smollm2-135m", "--host", "0.0.0.0", "--port", "8102")
    assert words[words.index("--max-tokens") + 1] == "6001" and words[-1] == "float32"
    assert servers[3].command[3:6] == ("serve", str(train), "environment.digits=2"), "and not the seed"
    # what the trainer is told is a configuration that it can read
    config = read_config(train, learner.command[5:])[0]
    assert config.engine.kind == "server" and config.engine.urls == ("http://a:8101", "http://b:8102")
    assert (config.engine.token, config.engine.rows, config.seed) == (TOKEN, 8, 3)
    assert config.environment.model_dump()["url"] == ("http://c:8201", "http://d:8202")
    assert config.evaluation is not None
    assert config.evaluation.environment.model_dump()["environment"] == "evaluation"


def test_servers_of_ones_own_and_ranks(train: Path) -> None:
    run = read_config(train)[0]
    vllm = ["/opt/vllm/bin/vllm", "serve", "M", "--host", "{host}", "--port", "{port}"]
    servers, _ = parts_of(cluster_of(train, samplers={"number": 1, "port": 9000, "command": vllm}), run)
    assert servers[0].command == ("/opt/vllm/bin/vllm", "serve", "M", "--host", "127.0.0.1", "--port", "9000")
    servers, learner = parts_of(cluster_of(train, learner={"ranks": 2, "threads": 1}), run)
    assert not servers and learner.variables == {"OMP_NUM_THREADS": "1"}
    start = ("-m", "agent_peft.launch.torchrun", "--standalone", "--nproc-per-node", "2", "-m", "agent_peft")
    assert learner.command[1:9] == (*start, "train")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("samplers: {number: 0}", "samplers.number: must be greater than or equal to 1"),
        ("sampler: {number: 1}", "sampler: unknown key; did you mean 'samplers'?"),
        ("samplers: {number: 9, port: 65530}", "samplers: port: 65530 leaves no room for 9 servers"),
        ("samplers: {number: 2}\nenvironments: {number: 1, port: 8102}", "two servers have one port"),
        ("overrides: [stepz=3]", "stepz: unknown key"),
    ],
)
def test_what_is_refused(train: Path, keys: str, message: str) -> None:
    path = train.with_name("cluster.yaml")
    path.write_text(f"train: {train}\nfolder: {train.parent / 'parts'}\n{keys}\n")
    with pytest.raises(AgentPeftError) as refusal:
        read_cluster(path)
    assert message in str(refusal.value)


def test_a_model_from_scratch_has_no_servers(train: Path) -> None:
    scratch = ["policy={kind: scratch, alphabet: '0123456789+= ^$'}"]
    with pytest.raises(AgentPeftError, match="leave samplers out"):
        parts_of(cluster_of(train, samplers={"number": 1}), read_config("adder_fast", scratch)[0])


def test_the_token_is_made_once_and_read_by_its_owner_alone(train: Path) -> None:
    cluster = cluster_of(train)
    first = token_of(cluster)
    assert len(first) == 32 and token_of(cluster) == first
    assert (cluster.folder / "token").stat().st_mode & 0o077 == 0


def test_slurm_starts_each_part_on_its_node(train: Path, tmp_path: Path) -> None:
    """The script itself runs, with programs in place of Slurm's that write down what they are asked."""
    stubs = {"scontrol": "printf '%s\\n' n0 n1 n2 n3 n4", "srun": 'echo "$*" >> "$ASKED"'}
    environment = with_programs(tmp_path, **stubs)
    options = {"options": ["--partition=gpu", "--time=01:00:00"], "setup": ["export READY=1"]}
    cluster = cluster_of(train, **BOTH, slurm=options)
    servers, _ = parts_of(cluster, read_config(train)[0])
    script = batch_script(cluster, tmp_path / "my cluster.yaml", servers)
    assert "#SBATCH --partition=gpu\n#SBATCH --time=01:00:00\n" in script and "#SBATCH --nodes=5\n" in script
    environment["SLURM_JOB_NODELIST"] = "n[0-4]"
    subprocess.run(["bash", "-c", f"{script}\nwait"], env=environment, check=True, timeout=60)
    asked = (tmp_path / "asked").read_text().splitlines()
    steps = {line.rpartition("--part ")[2]: line for line in asked}
    assert list(sorted(steps)) == ["environment-0", "environment-1", "learner", "sampler-0", "sampler-1"]
    nodes = ("learner", "sampler-0", "sampler-1", "environment-0", "environment-1")
    for node, name in enumerate(nodes):
        assert f"--nodelist=n{node} agent-peft launch {tmp_path}/my cluster.yaml" in steps[name]
        assert "--hosts n1,n2,n3,n4" in steps[name]


NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")  # RFC 1123, and no digit first, for a Service


def test_kubernetes_runs_each_part_in_its_pod(train: Path, tmp_path: Path) -> None:
    """The manifest is what Kubernetes asks for, and each pod's command starts the part of its index."""
    settings = {"image": "me/agent-peft:1", "claim": "shared", "resources": {"nvidia.com/gpu": 1}}
    settings |= {"setup": ["export READY=1"]}
    cluster = cluster_of(train, **BOTH, kubernetes=settings, folder="runs/parts")
    servers, _ = parts_of(cluster, read_config(train)[0])
    service, job = yaml.safe_load_all(kubernetes_manifest(cluster, Path("my cluster.yaml"), servers))
    assert (service["apiVersion"], service["kind"]) == ("v1", "Service")
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    spec, template = job["spec"], job["spec"]["template"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"] == 5
    assert spec["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}
    assert spec["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"] == [1, 2, 3]
    pod, name = template["spec"], service["metadata"]["name"]
    assert pod["restartPolicy"] == "Never", "podFailurePolicy asks for it"
    assert NAME.fullmatch(name) and pod["subdomain"] == name == job["metadata"]["name"]
    (container,) = pod["containers"]
    assert container["image"] == "me/agent-peft:1" and container["workingDir"] == "/shared"
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 1}}
    assert [one["name"] for one in container["volumeMounts"]] == [one["name"] for one in pod["volumes"]]
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "shared"}
    environment = with_programs(tmp_path, **{"agent-peft": 'printf "%s\\n" "$READY" "$@" > "$ASKED"'})
    hosts = ",".join(f"{name}-{place}.{name}" for place in range(1, 5))
    for place, part in enumerate(("learner", "sampler-0", "sampler-1", "environment-0", "environment-1")):
        environment["JOB_COMPLETION_INDEX"] = str(place)
        subprocess.run(container["command"], env=environment, check=True, timeout=60)
        asked = (tmp_path / "asked").read_text().splitlines()
        assert asked == ["1", "launch", "my cluster.yaml", "--hosts", hosts, "--part", part]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "lacks kubernetes"),
        (
            {"kubernetes": {"image": "i", "claim": "c"}, "folder": "/elsewhere"},
            "/elsewhere is not on the volume",
        ),
    ],
)
def test_what_kubernetes_lacks(train: Path, keys: dict[str, object], message: str) -> None:
    with pytest.raises(AgentPeftError, match=message):
        kubernetes_manifest(cluster_of(train, **keys), Path("cluster.yaml"), [])


def test_skypilot_runs_each_part_on_its_node_and_ends_the_servers(train: Path, tmp_path: Path) -> None:
    cluster = cluster_of(
        train, samplers={"number": 2}, skypilot={"task": {"resources": {"accelerators": "L4:1"}}}
    )
    cluster.folder.mkdir()
    servers, _ = parts_of(cluster, read_config(train)[0])
    task = yaml.safe_load(skypilot_task(cluster, Path("cluster.yaml"), servers))
    assert (task["num_nodes"], task["workdir"], task["resources"]) == (3, ".", {"accelerators": "L4:1"})
    body = """
echo "$*" >> "$ASKED"
case "$*" in *learner) until [ "$(wc -l < "$ASKED")" -ge 3 ]; do sleep 0.05; done; exit $CODE;; esac
trap 'exit 130' TERM
while true; do sleep 0.05; done"""
    environment = with_programs(tmp_path, **{"agent-peft": body, "sleep": 'exec /bin/sleep "${1/#2/0.1}"'})
    environment |= {"SKYPILOT_NODE_IPS": "n0\nn1\nn2", "SKYPILOT_TASK_ID": "7", "CODE": "0"}
    command = ["bash", "-c", task["run"]]
    nodes = [
        subprocess.Popen(command, env={**environment, "SKYPILOT_NODE_RANK": str(rank)}) for rank in range(3)
    ]
    assert [node.wait(60) for node in nodes] == [0, 0, 0]
    asked = sorted((tmp_path / "asked").read_text().splitlines())
    parts = ("learner", "sampler-0", "sampler-1")
    assert asked == [f"launch cluster.yaml --hosts n1,n2 --part {part}" for part in parts]
    # a trainer that fails ends the others, too; one whose node is taken away starts again, and does not
    trainer, ended = {**environment, "SKYPILOT_NODE_RANK": "0", "CODE": "3"}, cluster.folder / "ended-7"
    ended.unlink()
    assert subprocess.run(command, env=trainer, timeout=60).returncode == 3 and ended.exists()
    ended.unlink()
    waiting = subprocess.Popen(command, env={**trainer, "ASKED": "/dev/null"}, start_new_session=True)
    time.sleep(0.5)
    os.killpg(waiting.pid, signal.SIGTERM)
    assert waiting.wait(60) == 143 and not ended.exists()


def test_skypilot_needs_a_shared_folder(train: Path) -> None:
    with pytest.raises(AgentPeftError, match="folder as an absolute path"):
        skypilot_task(cluster_of(train, folder="parts"), Path("cluster.yaml"), [])
    with pytest.raises(AgentPeftError, match=r"skypilot.task: run is set by launch"):
        skypilot_task(cluster_of(train, skypilot={"task": {"run": "x"}}), Path("cluster.yaml"), [])
