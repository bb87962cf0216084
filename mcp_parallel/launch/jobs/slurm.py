"""An sbatch file: one task a node, which runs the node's script; requeued until it is done."""

from __future__ import annotations

from mcp_parallel.launch.jobs.job import Job
from mcp_parallel.launch.jobs.torchrun import PORT, Meeting, node_script

_HEREDOC = "END_OF_NODE_SCRIPT"
# From the end of the first node's task to that of the last: their agents leave one by one.
_LAST_TASK_S = 120


def sbatch(job: Job) -> str:
    """The text for ``sbatch FILE``.

    Slurm sends SIGTERM ``grace_s`` before the time limit; the ranks save and end with 4, and the
    job puts itself back into the queue. Bad configs (2) and divergences (3) end it.
    """
    options = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": job.ranks_per_node if job.on_gpus else None,
        "cpus-per-task": job.cpus_per_node,
        "mem": job.memory.removesuffix("i") if job.memory else None,
        "time": job.time_limit,
        "partition": job.partition,
        "account": job.account,
        "signal": f"TERM@{job.grace_s}",
        "output": "%x-%j.log",
        "open-mode": "append",
    }
    head = [f"#SBATCH --{key}={value}" for key, value in options.items() if value is not None]
    head += ["#SBATCH --requeue", "#SBATCH --exclusive"]
    if job.nodes == 1:
        meeting, where = None, []
    else:
        # The port follows from the job's number, so that jobs on one node do not meet.
        where = [
            'MASTER="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"',
            f'MASTER="$MASTER:$(({PORT} + SLURM_JOB_ID % 10000))"',
            "export MASTER",
        ]
        meeting = Meeting("$MASTER", '[ "$SLURM_NODEID" = 0 ]')
    node = node_script(job, meeting).rstrip()
    end = _word_outside(node)
    lines = [
        "#!/usr/bin/env bash",
        *head,
        "set -u -o pipefail",
        *where,
        f"read -r -d '' node <<'{end}'",
        node,
        end,
        f'srun --ntasks-per-node=1 --kill-on-bad-exit=0 --wait={_LAST_TASK_S} bash -c "$node"',
        "status=$?",
        'case "$status" in',
        "  0) echo done; exit 0 ;;",
        '  2 | 3) echo "ended with $status: a restart would end the same way"; exit "$status" ;;',
        "esac",
        "# Stopped after saving, or a failure that torchrun could not mend.",
        f'if [ "$status" = 4 ] || [ "${{SLURM_RESTART_COUNT:-0}}" -lt {job.max_restarts} ]; then',
        '  scontrol requeue "$SLURM_JOB_ID" && exit 0',
        "fi",
        'exit "$status"',
    ]
    return "\n".join(lines) + "\n"


def _word_outside(text: str) -> str:
    """What ends a here-document of ``text``: a folder's name may hold any line."""
    word = _HEREDOC
    while word in text:
        word += "_"
    return word
