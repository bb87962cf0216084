"""What both kinds of Kubernetes jobs have in common: pods, volumes, limits, and YAML."""

from __future__ import annotations

from typing import Any

import yaml

from mcp_parallel.launch.jobs.job import Job
from mcp_parallel.launch.jobs.schema import find_problems

# Stopped by SIGTERM, as Kubernetes counts it: to be started again, unlike 1 to 127.
STOPPED_STATUS = 143


def pod_spec(job: Job, container: str, **container_fields: Any) -> dict[str, Any]:
    """A pod of one node: shared memory as large as NCCL and our ranks need, no privilege.

    Args:
        job: the job.
        container: name of its container, which the operator looks for.
        container_fields: more of the container (command, args).
    """
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    volumes: list[dict[str, Any]] = [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": job.shm_size}}
    ]
    if job.claim is not None:
        mounts.append({"name": "runs", "mountPath": job.mount})
        volumes.append({"name": "runs", "persistentVolumeClaim": {"claimName": job.claim}})
    return {
        # Time to save; Kubernetes kills what is left after it.
        "terminationGracePeriodSeconds": job.grace_s,
        "containers": [
            {
                "name": container,
                "image": job.image,
                **container_fields,
                "resources": resources(job),
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    # RDMA registers memory, which must not be swapped.
                    "capabilities": {"drop": ["ALL"]} | ({"add": ["IPC_LOCK"]} if job.rdma else {}),
                    "seccompProfile": {"type": "RuntimeDefault"},
                },
                "volumeMounts": mounts,
            }
        ],
        "volumes": volumes,
    }


def resources(job: Job) -> dict[str, Any]:
    """Of a node: requests and limits alike, so that no other pod takes from the ranks."""
    wanted: dict[str, Any] = {}
    if job.cpus_per_node is not None:
        wanted["cpu"] = str(job.cpus_per_node)
    if job.memory is not None:
        wanted["memory"] = job.memory
    if job.on_gpus:
        wanted[job.gpu_resource] = str(job.ranks_per_node)
    if job.rdma is not None:
        wanted[job.rdma] = "1"
    return {"requests": wanted, "limits": dict(wanted)} if wanted else {}


def metadata(job: Job) -> dict[str, Any]:
    """Name and namespace."""
    return {"name": job.name} | ({"namespace": job.namespace} if job.namespace else {})


def to_yaml(job: Job, manifests: list[dict[str, Any]]) -> str:
    """The manifests as one file, each checked against what its kind takes.

    Raises an AssertionError when one does not fit its schema: a fault of this package.
    """
    for manifest in manifests:
        problems = find_problems(manifest)
        assert not problems, "; ".join(problems)
    head = f"# {job.name}: {job.nodes} x {job.ranks_per_node} ranks. kubectl apply -f FILE\n"
    if job.claim is None:
        head += "# Without --claim the run folder, checkpoints included, is gone with the pods.\n"
    return head + yaml.dump_all(manifests, Dumper=_Dumper, sort_keys=False, width=100)


class _Dumper(yaml.SafeDumper):
    """Scripts as blocks, shared parts written out each time."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _as_block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _as_block)
