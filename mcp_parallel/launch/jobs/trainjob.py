"""Kubeflow Trainer (v2): a TrainingRuntime of this job's own, and the TrainJob that uses it.

A runtime of its own, because the fields by which a TrainJob changes somebody else's differ between
releases, and shared memory, exit statuses and restarts are not among those that never changed.
Source: the CRDs of kubeflow/trainer, TrainJob and TrainingRuntime v1alpha1, JobSet v1alpha2.
"""

from __future__ import annotations

from mcp_parallel.errors import BAD_CONFIG, DIVERGED
from mcp_parallel.launch.jobs.job import Job
from mcp_parallel.launch.jobs.kubernetes import STOPPED_STATUS, metadata, pod_spec, to_yaml
from mcp_parallel.launch.jobs.torchrun import Meeting, node_script

_API = "trainer.kubeflow.org/v1alpha1"
# Names that the trainer's controller looks for.
_NODE = "node"
_TRAINER_LABEL = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}


def trainjob(job: Job) -> str:
    """The two manifests, for ``kubectl apply -f FILE``.

    A pod that fails ends the Job, and the JobSet starts all pods again, up to ``max_restarts``
    times; a bad config or a divergence ends the whole; an evicted pod counts as no failure.
    """
    several = Meeting("$PET_MASTER_ADDR:$PET_MASTER_PORT", '[ "$PET_NODE_RANK" = 0 ]')
    script = node_script(job, several if job.nodes > 1 else None, stopped_status=STOPPED_STATUS)
    command = {"command": ["bash", "-c"], "args": [script]}
    pod = {"restartPolicy": "Never", **pod_spec(job, _NODE)}
    node_job = {
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {
                        "containerName": _NODE,
                        "operator": "In",
                        "values": [BAD_CONFIG, DIVERGED],
                    },
                },
                {
                    "action": "Ignore",
                    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                },
            ]
        },
        "template": {"spec": pod},
    }
    job_set = {
        "failurePolicy": {
            "maxRestarts": job.max_restarts,
            "rules": [
                {
                    "name": "no-use",
                    "action": "FailJobSet",
                    "onJobFailureReasons": ["PodFailurePolicy"],
                }
            ],
        },
        "replicatedJobs": [
            {"name": _NODE, "template": {"metadata": {"labels": _TRAINER_LABEL}, "spec": node_job}}
        ],
    }
    runtime = {
        "apiVersion": _API,
        "kind": "TrainingRuntime",
        "metadata": metadata(job),
        "spec": {
            "mlPolicy": {"numNodes": job.nodes, "torch": {}},
            "template": {"spec": job_set},
        },
    }
    train = {
        "apiVersion": _API,
        "kind": "TrainJob",
        "metadata": metadata(job),
        "spec": {
            "runtimeRef": {"kind": "TrainingRuntime", "name": job.name},
            "trainer": {
                "numNodes": job.nodes,
                "numProcPerNode": job.ranks_per_node,
                **command,
            },
        },
    }
    return to_yaml(job, [runtime, train])
