"""Files for Slurm, Kubernetes and SkyPilot that run the parts of a cluster, each under one supervisor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Any

import yaml

from agent_peft.launch.cluster import ClusterConfig
from agent_peft.supervisor import Part
from agent_peft.types import AgentPeftError

SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=agent-peft
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --output=slurm-%j.out
{options}set -euo pipefail
{setup}mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# the trainer has the first node, and each server one of the others
hosts=$(IFS=,; echo "${{nodes[*]:{first}}}")
launch=(agent-peft launch {cluster} --hosts "$hosts")
step=(srun --nodes=1 --ntasks=1 --overlap)
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
place={first}
for part in {servers}; do
    "${{step[@]}}" --nodelist="${{nodes[place]}}" "${{launch[@]}}" --part "$part" &
    place=$((place + 1))
done
"${{step[@]}}" --nodelist="${{nodes[0]}}" "${{launch[@]}}" --part learner
"""
# the trainer's node creates a file at its end, at which the others end: SkyPilot waits for all of them
RUN = """\
set -euo pipefail
parts=({parts})
hosts=$(echo "$SKYPILOT_NODE_IPS" | tail -n +{first} | paste -sd, -)
ended={folder}/ended-$SKYPILOT_TASK_ID
agent-peft launch {cluster} --hosts "$hosts" --part "${{parts[$SKYPILOT_NODE_RANK]}}" &
part=$!
trap 'kill $part || true; wait $part || true; exit 143' TERM
if [ "$SKYPILOT_NODE_RANK" = 0 ]; then
    code=0
    wait $part || code=$?
    touch "$ended"
    exit $code
fi
while [ ! -e "$ended" ]; do
    kill -0 $part 2>/dev/null || wait $part
    sleep 2
done
kill $part || true
wait $part || true
"""


def batch_script(cluster: ClusterConfig, path: Path, servers: Sequence[Part]) -> str:
    """The script for the cluster file at ``path``: a node for the trainer, and one for each server."""
    return SCRIPT.format(
        nodes=1 + len(servers),
        options="".join(f"#SBATCH {line}\n" for line in cluster.slurm.options),
        setup="".join(f"{line}\n" for line in cluster.slurm.setup),
        first=min(1, len(servers)),
        servers=" ".join(part.name for part in servers),
        cluster=quote(str(path.absolute())),
    )


class _Quoted(yaml.SafeDumper):
    """Quotes every text, which YAML 1.1 and 1.2 then read alike."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else '"')


_Quoted.add_representer(str, _Quoted.represent_str)


def _dump(*documents: dict[str, Any]) -> str:
    return yaml.dump_all(documents, Dumper=_Quoted, sort_keys=False, width=120)


def kubernetes_manifest(cluster: ClusterConfig, path: Path, servers: Sequence[Part]) -> str:
    """A headless Service, and a Job whose pod 0 is the trainer and pods 1, 2, … are the servers. The Job has
    succeeded, and its servers are ended, when pod 0 has.
    """
    settings = cluster.kubernetes
    if settings is None:
        raise AgentPeftError("--on kubernetes: the cluster file lacks kubernetes: {image: …, claim: …}")
    for file in (cluster.folder, path):
        if file.is_absolute() and not file.is_relative_to(settings.mount):
            raise AgentPeftError(
                f"{file} is not on the volume, which is at {settings.mount} (kubernetes.mount); give a "
                "path below it, or one relative to it"
            )
    name, number = settings.name, len(servers)
    hosts = ",".join(f"{name}-{place}.{name}" for place in range(1, number + 1))
    words = f"agent-peft launch {quote(str(path))} " + (f"--hosts {hosts} " if hosts else "")
    lines = [
        "set -euo pipefail",
        *settings.setup,
        f"parts=(learner {' '.join(part.name for part in servers)})",
    ]
    lines.append(f'exec {words}--part "${{parts[$JOB_COMPLETION_INDEX]}}"\n')
    metadata, labels = {"name": name}, {"app": name}
    container = {
        "name": "part",
        "image": settings.image,
        "command": ["bash", "-c", "\n".join(lines)],
        "workingDir": str(settings.mount),
        "resources": {"limits": settings.resources},
        "volumeMounts": [{"name": "shared", "mountPath": str(settings.mount)}],
    }
    pod = {
        "subdomain": name,
        "restartPolicy": "Never",
        "containers": [container],
        "volumes": [{"name": "shared", "persistentVolumeClaim": {"claimName": settings.claim}}],
    }
    # a lost node does not count; what the supervisor has given up is final
    lost = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    final = {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [1, 2, 3]}}
    job = {
        "completionMode": "Indexed",
        "completions": 1 + number,
        "parallelism": 1 + number,
        "backoffLimit": cluster.restarts,
        "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
        "podFailurePolicy": {"rules": [lost, final]},
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": labels}
    return _dump(
        {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": service},
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": job},
    )


def skypilot_task(cluster: ClusterConfig, path: Path, servers: Sequence[Part]) -> str:
    """A task with a node for the trainer, and one for each server. The current folder is copied to all."""
    task = cluster.skypilot.task
    if own := {"num_nodes", "run", "workdir"} & set(task):
        raise AgentPeftError(f"skypilot.task: {min(own)} is set by launch; leave it out")
    if path.is_absolute() or not cluster.folder.is_absolute():
        raise AgentPeftError(
            "--on skypilot: give the cluster file as a path relative to the current folder, which all nodes "
            "get, and folder as an absolute path that they share (skypilot.task: {volumes: …})"
        )
    run = RUN.format(
        parts=" ".join(["learner", *(part.name for part in servers)]),
        first=min(2, 1 + len(servers)),
        folder=quote(str(cluster.folder)),
        cluster=quote(str(path)),
    )
    return _dump({"name": "agent-peft", **task, "num_nodes": 1 + len(servers), "workdir": ".", "run": run})
