"""Kubeflow's Training Operator (v1): a PyTorchJob.

Source: the CRD of kubeflow/training-operator 1.9, PyTorchJob v1.
"""

from __future__ import annotations

from typing import Any

from mcp_parallel.launch.jobs.job import Job
from mcp_parallel.launch.jobs.kubernetes import STOPPED_STATUS, metadata, pod_spec, to_yaml
from mcp_parallel.launch.jobs.torchrun import Meeting, node_script

_CONTAINER = "pytorch"  # the name that the operator looks for


def pytorchjob(job: Job) -> str:
    """The manifest, for ``kubectl apply -f FILE``.

    Restart policy ``ExitCode``: pods that end by a signal (128 and above: evicted, stopped after
    saving, out of memory) are started again, those with 1 to 127 are not, a bad config (2) and a
    divergence (3) among them. Failures of single ranks are torchrun's to mend.
    """
    several = Meeting("$MASTER_ADDR:$MASTER_PORT", '[ "$PET_NODE_RANK" = 0 ]')
    script = node_script(job, several if job.nodes > 1 else None, stopped_status=STOPPED_STATUS)

    def replicas(count: int) -> dict[str, Any]:
        pod = pod_spec(job, _CONTAINER, command=["bash", "-c"], args=[script])
        return {"replicas": count, "restartPolicy": "ExitCode", "template": {"spec": pod}}

    specs = {"Master": replicas(1)}
    if job.nodes > 1:
        specs["Worker"] = replicas(job.nodes - 1)
    manifest = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": metadata(job),
        "spec": {
            "nprocPerNode": str(job.ranks_per_node),
            # Pods that still run when the job is over hold their GPUs.
            "runPolicy": {"backoffLimit": job.max_restarts, "cleanPodPolicy": "Running"},
            "pytorchReplicaSpecs": specs,
        },
    }
    return to_yaml(job, [manifest])
