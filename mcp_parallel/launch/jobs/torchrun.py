"""The script of one node: check the config, run torchrun, tell how it ended.

Slurm and Kubernetes run the same script on each node, with their own words for who is first.

Exit status: that of ``train`` (2 bad config, 3 diverged, 4 stopped after saving), which torchrun
alone turns into 1 after it has used up its restarts. Ranks that agree on one of these write it
into ``MCP_EXIT_FILE`` and end with 0, so that torchrun has nothing to start again.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from mcp_parallel.launch.jobs.job import Job

PORT = 29500
# Until the last node has come: images are pulled and queues drained at different speeds.
_JOIN_TIMEOUT_S = 900
# Nodes are a fixed number, so nothing is gained by waiting for more of them.
_LAST_CALL_TIMEOUT_S = 5
# Of the time to save in, what is left for torchrun and the script to end.
_SETTLE_S = 10
_KEEP_ALIVE = "keep_alive_interval=5,keep_alive_max_attempt=3"


@dataclass(frozen=True, slots=True)
class Meeting:
    """How the nodes find each other, as shell words."""

    endpoint: str
    """HOST:PORT of the node that serves the rendezvous."""
    is_first: str
    """A shell test that is true on that node; "" lets torchrun compare addresses."""


def torchrun(job: Job) -> str:
    """A bash script, to be run on every node (on the only one for a job of one node)."""
    if job.nodes == 1:
        return "#!/usr/bin/env bash\n" + node_script(job, None)
    master = job.master or ""
    if master and ":" not in master:
        master += f":{PORT}"
    head = (
        f"#!/usr/bin/env bash\n# Run this on each of the {job.nodes} nodes, the one that MASTER "
        "names among them.\n"
    )
    want = "${MASTER:?set MASTER to HOST:PORT of one of the nodes}"
    chosen = f'MASTER="${{MASTER:-{master}}}"\n' if master else f'MASTER="{want}"\n'
    return head + chosen + node_script(job, Meeting("$MASTER", ""))


def node_script(job: Job, meeting: Meeting | None, *, stopped_status: int = 4) -> str:
    """The script without its first line.

    Args:
        job: what to run.
        meeting: None for a job of one node.
        stopped_status: exit status of a run that was stopped after saving.
    """
    lines = [
        f"# {job.name}: {job.nodes} x {job.ranks_per_node} ranks.",
        "set -u -o pipefail",
    ]
    if job.env_file is not None:
        lines.append(f". {shlex.quote(job.env_file)} || exit 2")
    lines += [
        "# A restart meets on a store of its own (pytorch/pytorch#135712).",
        "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
        "# From the signal to SIGKILL: the step in flight, then a checkpoint.",
        f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={max(1, job.grace_s - _SETTLE_S)}",
        "# How long a rank waits for another before it gives up.",
        f"export MCP_TIMEOUT_S={job.timeout_s:g}",
        "# A rank without a device of its own fails rather than train on the CPU."
        if job.on_gpus
        else "# These ranks stay on the CPU whatever the node has.",
        f"export MCP_DEVICE={'cuda' if job.on_gpus else 'cpu'}",
        "# torchrun would give each rank one thread.",
        f"cores={job.cpus_per_node if job.cpus_per_node else '$(nproc)'}",
        f"share=$((cores / {job.ranks_per_node}))",
        'export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((share > 0 ? share : 1))}"',
        f'python="${{PYTHON:-{job.python}}}"',
        _array(job),
        "# A config that cannot run ends here, with 2, before anything is started.",
        f'"$python" -m mcp_parallel check "${{train[@]}}" --world-size {job.world_size} \\',
        f"  --ranks-per-host {job.ranks_per_node} >/dev/null || exit $?",
        'MCP_EXIT_FILE="$(mktemp)" || exit 1',
        "export MCP_EXIT_FILE",
    ]
    lines += _run_lines(job, meeting)
    lines += [
        "# Signals reach torchrun, which hands them to the ranks: they save and end.",
        "signals=0",
        "trap 'signals=$((signals + 1)); kill -TERM \"$torchrun\" 2>/dev/null' TERM INT HUP",
        "# A signal ends a wait before torchrun ends: wait once more.",
        'until seen=$signals; wait "$torchrun"; status=$?; [ "$signals" = "$seen" ]; do :; done',
        "# What the ranks agreed on: 2 bad config, 3 diverged, 4 stopped after saving.",
        'if [ -s "$MCP_EXIT_FILE" ]; then status="$(cat "$MCP_EXIT_FILE")"; fi',
        'rm -f "$MCP_EXIT_FILE"',
    ]
    if stopped_status != 4:
        lines.append(f'if [ "$status" = 4 ]; then status={stopped_status}; fi')
    return "\n".join([*lines, 'exit "$status"']) + "\n"


def _run_lines(job: Job, meeting: Meeting | None) -> list[str]:
    words = [f"--nproc-per-node {job.ranks_per_node}", f"--max-restarts {job.max_restarts}"]
    words.append(f"--monitor-interval {job.monitor_interval_s:g}")
    if job.numa and job.on_gpus:
        words.append("--numa-binding node")
    before = []
    if meeting is None:
        words.insert(0, "--standalone")
    else:
        conf = f"join_timeout={_JOIN_TIMEOUT_S},last_call_timeout={_LAST_CALL_TIMEOUT_S}"
        conf += f",{_KEEP_ALIVE}"
        if meeting.is_first:
            before = [f"if {meeting.is_first}; then is_host=1; else is_host=0; fi"]
            conf += ",is_host=$is_host"
        words = [
            f"--nnodes {job.nodes} --rdzv-backend c10d --rdzv-id {job.name}",
            f'--rdzv-endpoint "{meeting.endpoint}"',
            f'--rdzv-conf "{conf}"',
            *words,
        ]
    body = " \\\n  ".join(words)
    return [
        *before,
        f'"$python" -m torch.distributed.run \\\n  {body} \\',
        '  -m mcp_parallel.train "${train[@]}" &',
        "torchrun=$!",
    ]


def _array(job: Job) -> str:
    return "train=(\n  " + "\n  ".join(_lines_of_words(job.train_words())) + "\n)"


def _lines_of_words(words: list[str]) -> list[str]:
    """Each flag with its value on a line, quoted for the shell."""
    lines: list[str] = []
    for word in words:
        if word.startswith("--") or not lines or " " in lines[-1]:
            lines.append(shlex.quote(word))
        else:
            lines[-1] += f" {shlex.quote(word)}"
    return lines
