"""What the Kubernetes kinds that we write take: a small checker, and the parts that we use.

The API server drops fields that a kind does not have, without a word; here they are problems. The
schemas are written by hand in the form of a CRD's ``openAPIV3Schema``, so that ``validate`` also
checks a manifest against a whole CRD.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]

_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}


def validate(value: Any, schema: Schema, path: str = "") -> Iterator[str]:
    """Every way in which ``value`` does not fit ``schema``, a line each.

    Knows of an OpenAPI v3 schema: type, properties, required, additionalProperties, items, enum,
    pattern, minimum, maximum, maxLength, maxItems, nullable, x-kubernetes-int-or-string and
    x-kubernetes-preserve-unknown-fields. Rules in CEL are not run.
    """
    where = path or "the manifest"
    if value is None and schema.get("nullable"):
        return
    kinds = _TYPES.get(schema.get("type", ""), (object,))
    if schema.get("x-kubernetes-int-or-string"):
        kinds = (int, str)
    # To Python, true is an integer.
    if not isinstance(value, kinds) or (isinstance(value, bool) and int in kinds):
        yield f"{where} must be of type {schema.get('type')}, got {type(value).__name__}"
        return
    yield from _validate_scalar(value, schema, where)
    if isinstance(value, dict):
        yield from _validate_object(value, schema, path)
    elif isinstance(value, list):
        if len(value) > schema.get("maxItems", len(value)):
            yield f"{where} must have at most {schema['maxItems']} items, got {len(value)}"
        for index, item in enumerate(value):
            yield from validate(item, schema.get("items", {}), f"{path}[{index}]")


def _validate_scalar(value: Any, schema: Schema, where: str) -> Iterator[str]:
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where} must be one of {schema['enum']}, got {value!r}"
    if isinstance(value, str):
        if "pattern" in schema and not re.search(schema["pattern"], value):
            yield f"{where} must match {schema['pattern']}, got {value!r}"
        if len(value) > schema.get("maxLength", len(value)):
            yield f"{where} must have at most {schema['maxLength']} letters, got {len(value)}"
    if isinstance(value, (int, float)):
        if value < schema.get("minimum", value):
            yield f"{where} must be at least {schema['minimum']}, got {value}"
        if value > schema.get("maximum", value):
            yield f"{where} must be at most {schema['maximum']}, got {value}"


def _validate_object(value: dict[str, Any], schema: Schema, path: str) -> Iterator[str]:
    known, more = schema.get("properties", {}), schema.get("additionalProperties")
    is_open = schema.get("x-kubernetes-preserve-unknown-fields") or not (known or more)
    for key in schema.get("required", ()):
        if key not in value:
            yield f"{path or 'the manifest'} must have {key}, got none"
    for key, item in value.items():
        inner = f"{path}.{key}".lstrip(".")
        if key in known:
            yield from validate(item, known[key], inner)
        elif isinstance(more, Mapping):
            yield from validate(item, more, inner)
        elif not is_open and more is not True:
            yield f"{inner} must be a field of its kind, got an unknown one"


# --- the parts that we use -----------------------------------------------------------------------

_STRING = {"type": "string"}
_COUNT = {"type": "integer", "minimum": 0}
_QUANTITY = {
    "x-kubernetes-int-or-string": True,
    "pattern": r"^[0-9]+(\.[0-9]+)?([KMGTPE]i?|m|k)?$",
}
_NAME = {"type": "string", "maxLength": 63, "pattern": r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"}


def _object(required: tuple[str, ...] = (), **properties: Any) -> Schema:
    return {"type": "object", "required": list(required), "properties": properties}


def _array(items: Schema, most: int = 128) -> Schema:
    return {"type": "array", "items": items, "maxItems": most}


_METADATA = _object(
    ("name",),
    name=_NAME,
    namespace=_NAME,
    labels={"type": "object", "additionalProperties": _STRING},
)
_RESOURCES = _object(
    requests={"type": "object", "additionalProperties": _QUANTITY},
    limits={"type": "object", "additionalProperties": _QUANTITY},
)
# Not privileged, and of the capabilities only what registering memory for RDMA needs.
_SECURITY = _object(
    allowPrivilegeEscalation={"type": "boolean", "enum": [False]},
    capabilities=_object(
        drop=_array(_STRING), add=_array({"type": "string", "enum": ["IPC_LOCK"]})
    ),
    seccompProfile=_object(("type",), type={"type": "string", "enum": ["RuntimeDefault"]}),
)
_CONTAINER = _object(
    ("name", "image"),
    name=_NAME,
    image={"type": "string", "maxLength": 500},
    command=_array(_STRING),
    args=_array(_STRING),
    resources=_RESOURCES,
    securityContext=_SECURITY,
    volumeMounts=_array(_object(("name", "mountPath"), name=_NAME, mountPath=_STRING)),
)
_VOLUME = _object(
    ("name",),
    name=_NAME,
    emptyDir=_object(medium={"type": "string", "enum": ["", "Memory"]}, sizeLimit=_QUANTITY),
    persistentVolumeClaim=_object(("claimName",), claimName=_STRING),
)
_POD = _object(
    ("containers",),
    restartPolicy={"type": "string", "enum": ["Never", "OnFailure", "Always"]},
    terminationGracePeriodSeconds=_COUNT,
    containers=_array(_CONTAINER),
    volumes=_array(_VOLUME),
)
_POD_FAILURE_RULE = _object(
    ("action",),
    action={"type": "string", "enum": ["FailJob", "FailIndex", "Ignore", "Count"]},
    onExitCodes=_object(
        ("operator", "values"),
        containerName=_STRING,
        operator={"type": "string", "enum": ["In", "NotIn"]},
        values=_array({"type": "integer", "minimum": 1, "maximum": 255}, 255),
    ),
    onPodConditions=_array(
        _object(("type",), type=_STRING, status={"type": "string", "enum": ["True", "False"]}), 20
    ),
)
_JOB_TEMPLATE = _object(
    ("spec",),
    metadata=_object(labels={"type": "object", "additionalProperties": _STRING}),
    spec=_object(
        ("template",),
        backoffLimit=_COUNT,
        podFailurePolicy=_object(("rules",), rules=_array(_POD_FAILURE_RULE, 20)),
        template=_object(("spec",), spec=_POD),
    ),
)
_JOB_SET = _object(
    failurePolicy=_object(
        maxRestarts=_COUNT,
        rules=_array(
            _object(
                ("name", "action"),
                name={"type": "string", "pattern": "^[A-Za-z]([A-Za-z0-9_,:-]*[A-Za-z0-9_])?$"},
                action={
                    "type": "string",
                    "enum": ["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"],
                },
                onJobFailureReasons=_array(
                    {
                        "type": "string",
                        "enum": [
                            "BackoffLimitExceeded",
                            "DeadlineExceeded",
                            "FailedIndexes",
                            "MaxFailedIndexesExceeded",
                            "PodFailurePolicy",
                        ],
                    }
                ),
            ),
            20,
        ),
    ),
    replicatedJobs=_array(_object(("name", "template"), name=_NAME, template=_JOB_TEMPLATE)),
)


def _kind(api: str, kind: str, spec: Schema) -> Schema:
    return _object(
        ("apiVersion", "kind", "metadata", "spec"),
        apiVersion={"type": "string", "enum": [api]},
        kind={"type": "string", "enum": [kind]},
        metadata=_METADATA,
        spec=spec,
    )


_TRAINER = "trainer.kubeflow.org/v1alpha1"
_REPLICAS = _object(
    ("replicas", "template"),
    replicas=_COUNT,
    restartPolicy={"type": "string", "enum": ["Always", "OnFailure", "Never", "ExitCode"]},
    template=_object(("spec",), spec=_POD),
)
SCHEMAS: Mapping[str, Schema] = {
    "TrainJob": _kind(
        _TRAINER,
        "TrainJob",
        _object(
            ("runtimeRef",),
            runtimeRef=_object(
                ("name",),
                name={"type": "string", "maxLength": 253},
                kind={"type": "string", "enum": ["TrainingRuntime", "ClusterTrainingRuntime"]},
            ),
            trainer=_object(
                numNodes=_COUNT,
                numProcPerNode=_COUNT,
                command=_array(_STRING),
                args=_array({"type": "string", "maxLength": 1 << 20}),
            ),
        ),
    ),
    "TrainingRuntime": _kind(
        _TRAINER,
        "TrainingRuntime",
        _object(
            mlPolicy=_object(numNodes=_COUNT, torch={"type": "object"}),
            template=_object(spec=_JOB_SET),
        ),
    ),
    "PyTorchJob": _kind(
        "kubeflow.org/v1",
        "PyTorchJob",
        _object(
            ("pytorchReplicaSpecs",),
            nprocPerNode=_STRING,
            runPolicy=_object(
                backoffLimit=_COUNT,
                cleanPodPolicy={"type": "string", "enum": ["None", "Running", "All"]},
            ),
            pytorchReplicaSpecs=_object(("Master",), Master=_REPLICAS, Worker=_REPLICAS),
        ),
    ),
}
"""Kind -> the part of its schema that we use."""


def find_problems(manifest: Mapping[str, Any]) -> list[str]:
    """What is wrong with a manifest of one of ``SCHEMAS``."""
    kind = str(manifest.get("kind"))
    if kind not in SCHEMAS:
        return [f"kind must be one of {', '.join(SCHEMAS)}, got {kind!r}"]
    return list(validate(dict(manifest), SCHEMAS[kind]))
