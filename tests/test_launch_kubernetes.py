"""Kubernetes manifests: what a training pod needs is in them, and their kinds take them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import yaml
from test_launch_jobs import job_of

from mcp_parallel.errors import BAD_CONFIG, DIVERGED
from mcp_parallel.launch.jobs import RENDERERS
from mcp_parallel.launch.jobs.schema import SCHEMAS, find_problems, validate

KUBERNETES = [kind for kind in RENDERERS if kind.startswith("kubernetes")]


def manifests_of(text):
    return list(yaml.safe_load_all(text))


def walk(value):
    yield value
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in inner:
        yield from walk(item)


def arguments_of(text):
    return [
        arg
        for value in walk(manifests_of(text))
        if isinstance(value, dict)
        for arg in value.get("args", ())
    ]


FULL = {
    "cpus_per_node": 96,
    "memory": "900Gi",
    "claim": "runs",
    "namespace": "ml",
    "rdma": "rdma/ib",
}


@pytest.mark.parametrize("kind", KUBERNETES)
@pytest.mark.parametrize("changes", [{}, {"nodes": 1}, {"on_gpus": False}, FULL])
def test_manifests_hold_what_a_training_pod_needs(kind, changes):
    job = job_of(**changes)
    text = RENDERERS[kind](job)
    for manifest in manifests_of(text):
        assert find_problems(manifest) == []
    pods = [v for v in walk(manifests_of(text)) if isinstance(v, dict) and "containers" in v]
    assert len(pods) == (2 if kind == "kubernetes-pytorchjob" and job.nodes > 1 else 1)
    for pod in pods:
        (container,) = pod["containers"]
        shm = next(volume for volume in pod["volumes"] if volume["name"] == "shm")
        assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"}
        assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        limits = container["resources"].get("limits", {})
        assert limits.get("nvidia.com/gpu") == ("8" if job.on_gpus else None)
        assert limits == container["resources"].get("requests", {})
        assert pod["terminationGracePeriodSeconds"] == 300
    keys = {key for value in walk(manifests_of(text)) if isinstance(value, dict) for key in value}
    assert not keys & {"privileged", "hostNetwork", "hostPID", "hostIPC", "hostPath"}
    for script in arguments_of(text):
        assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
        assert script.rstrip().endswith('if [ "$status" = 4 ]; then status=143; fi\nexit "$status"')
    assert text.count("Without --claim") == ("claim" not in changes)


def test_a_trainjob_is_started_again_unless_that_is_of_no_use():
    runtime, train = manifests_of(RENDERERS["kubernetes-trainer"](job_of(max_restarts=7)))
    assert train["spec"]["runtimeRef"] == {"kind": "TrainingRuntime", "name": "a-job"}
    assert runtime["metadata"]["name"] == "a-job"
    assert train["spec"]["trainer"]["numNodes"] == runtime["spec"]["mlPolicy"]["numNodes"] == 2
    job_set = runtime["spec"]["template"]["spec"]
    assert job_set["failurePolicy"]["maxRestarts"] == 7
    node = job_set["replicatedJobs"][0]["template"]["spec"]
    exits = node["podFailurePolicy"]["rules"][0]["onExitCodes"]
    assert exits["values"] == [BAD_CONFIG, DIVERGED]
    assert node["template"]["spec"]["restartPolicy"] == "Never"  # or the policy is refused


def test_a_pytorchjob_has_a_master_and_workers():
    (manifest,) = manifests_of(RENDERERS["kubernetes-pytorchjob"](job_of(nodes=4)))
    specs = manifest["spec"]["pytorchReplicaSpecs"]
    assert (specs["Master"]["replicas"], specs["Worker"]["replicas"]) == (1, 3)
    assert manifest["spec"]["nprocPerNode"] == "8"
    for spec in specs.values():
        assert spec["restartPolicy"] == "ExitCode"
        assert spec["template"]["spec"]["containers"][0]["name"] == "pytorch"
    (alone,) = manifests_of(RENDERERS["kubernetes-pytorchjob"](job_of(nodes=1)))
    assert list(alone["spec"]["pytorchReplicaSpecs"]) == ["Master"]


def broken(change):
    (manifest,) = manifests_of(RENDERERS["kubernetes-pytorchjob"](job_of()))
    change(manifest["spec"])
    return find_problems(manifest)


def test_the_checker_finds_what_the_api_server_drops_or_refuses():
    master = "spec.pytorchReplicaSpecs.Master"

    def pod(spec):
        return spec["pytorchReplicaSpecs"]["Master"]["template"]["spec"]

    def security(spec):
        return pod(spec)["containers"][0]["securityContext"]

    assert broken(lambda spec: spec.update(nProcPerNode="8")) == [
        "spec.nProcPerNode must be a field of its kind, got an unknown one"
    ]
    assert broken(lambda spec: spec.update(nprocPerNode=8)) == [
        "spec.nprocPerNode must be of type string, got int"
    ]
    assert broken(lambda spec: spec.pop("pytorchReplicaSpecs")) == [
        "spec must have pytorchReplicaSpecs, got none"
    ]
    (problem,) = broken(lambda spec: spec["pytorchReplicaSpecs"]["Master"].update(replicas=True))
    assert problem == f"{master}.replicas must be of type integer, got bool"
    (problem,) = broken(lambda spec: security(spec).update(privileged=True))
    assert "securityContext.privileged must be a field of its kind" in problem
    (problem,) = broken(lambda spec: pod(spec)["volumes"][0]["emptyDir"].update(sizeLimit="16 GB"))
    assert "sizeLimit must match" in problem
    (problem,) = broken(lambda spec: spec["runPolicy"].update(backoffLimit=-1))
    assert problem == "spec.runPolicy.backoffLimit must be at least 0, got -1"
    assert find_problems({"kind": "Pod"}) == [
        f"kind must be one of {', '.join(SCHEMAS)}, got 'Pod'"
    ]


@pytest.mark.parametrize("kind", KUBERNETES)
def test_manifests_fit_the_whole_schemas_of_a_cluster(kind):
    """With MCP_CRD_DIR: a folder of CRDs, as ``kubectl get crd NAME -o yaml`` prints them."""
    folder = os.environ.get("MCP_CRD_DIR")
    if not folder:
        pytest.skip("MCP_CRD_DIR names no folder of CRDs")
    schemas = {}
    for file in Path(folder).glob("*.yaml"):
        crd = yaml.load(file.read_text(), yaml.CSafeLoader)
        version = next(v for v in crd["spec"]["versions"] if v["served"])
        schemas[crd["spec"]["names"]["kind"]] = version["schema"]["openAPIV3Schema"]
    for changes in ({}, {"nodes": 1}, FULL):
        for manifest in manifests_of(RENDERERS[kind](job_of(**changes))):
            schema = {**schemas[manifest["kind"]]}
            schema["properties"] = {**schema["properties"], "metadata": {}}
            assert list(validate(manifest, schema)) == []
