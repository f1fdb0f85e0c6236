"""A batch script for Slurm that runs the parts of a cluster, each under the same supervisor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from agent_peft.launch.cluster import ClusterConfig
from agent_peft.supervisor import Part

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
