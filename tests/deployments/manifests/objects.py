"""Kubernetes objects: their schemas, and the questions that tests ask of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import yaml
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from tests.programs import SCHEMAS

Object = Mapping[str, Any]
_BASE = "https://kubernetes.io/api/"


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"{_BASE}_definitions.json#/$defs/io.k8s.{name}"}


def _record(required: str, **properties: Any) -> dict[str, Any]:
    """Return the schema of an object without other fields; `required` are names."""
    fields = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**fields, "required": required.split()}


_TEXT, _FLAG, _WHOLE = {"type": "string"}, {"type": "boolean"}, {"type": "integer", "minimum": 0}
_TEXTS = {"type": "object", "additionalProperties": _TEXT}
_POD = _ref("api.core.v1.PodTemplateSpec")


def _list(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _custom(group: str, kind: str, spec: Any) -> dict[str, Any]:
    metadata = _ref("apimachinery.pkg.apis.meta.v1.ObjectMeta")
    head = {"apiVersion": {"const": group}, "kind": {"const": kind}, "metadata": metadata}
    return _record("apiVersion kind metadata spec", **head, spec=spec)


_CLUSTER = _record(
    "headGroupSpec",
    rayVersion=_TEXT,
    authOptions=_record("", mode={"enum": ["disabled", "token"]}, secretName=_TEXT),
    enableInTreeAutoscaling=_FLAG,
    autoscalerOptions=_record(
        "",
        idleTimeoutSeconds=_WHOLE,
        upscalingMode={"enum": ["Default", "Aggressive", "Conservative"]},
        resources=_ref("api.core.v1.ResourceRequirements"),
    ),
    headGroupSpec=_record(
        "template rayStartParams",
        rayStartParams=_TEXTS,
        serviceType=_TEXT,
        template=_POD,
    ),
    workerGroupSpecs=_list(
        _record(
            "groupName minReplicas maxReplicas template rayStartParams",
            groupName=_TEXT,
            replicas=_WHOLE,
            minReplicas=_WHOLE,
            maxReplicas=_WHOLE,
            numOfHosts=_WHOLE,
            idleTimeoutSeconds=_WHOLE,
            rayStartParams=_TEXTS,
            template=_POD,
        )
    ),
)
_RELABEL = _record(
    "",
    sourceLabels=_list(_TEXT),
    regex=_TEXT,
    targetLabel=_TEXT,
    replacement=_TEXT,
    action={"enum": ["replace", "keep", "drop", "labelmap", "labeldrop", "labelkeep"]},
)
_RULE = {
    **_record("alert expr", alert=_TEXT, expr=_TEXT, labels=_TEXTS, annotations=_TEXTS),
}
_RULE["properties"]["for"] = _TEXT
# Of the operators' resources, the fields that are worth using.
CUSTOM = {
    "RayService": _custom(
        "ray.io/v1",
        "RayService",
        _record(
            "rayClusterConfig",
            serveConfigV2=_TEXT,
            excludeHeadPodFromServeSvc=_FLAG,
            rayClusterConfig=_CLUSTER,
        ),
    ),
    "PodMonitor": _custom(
        "monitoring.coreos.com/v1",
        "PodMonitor",
        _record(
            "selector podMetricsEndpoints",
            selector=_ref("apimachinery.pkg.apis.meta.v1.LabelSelector"),
            podMetricsEndpoints=_list(
                _record("", port=_TEXT, interval=_TEXT, metricRelabelings=_list(_RELABEL))
            ),
        ),
    ),
    "PrometheusRule": _custom(
        "monitoring.coreos.com/v1",
        "PrometheusRule",
        _record("groups", groups=_list(_record("name rules", name=_TEXT, rules=_list(_RULE)))),
    ),
}
_GROUPS = {
    "NetworkPolicy": "networkpolicy-networking-v1",
    "PodDisruptionBudget": "poddisruptionbudget-policy-v1",
    "ConfigMap": "configmap-v1",
}


@cache
def _registry() -> Registry[Any]:
    definitions = json.loads((SCHEMAS / "_definitions.json").read_text(encoding="utf-8"))
    described = Resource.from_contents(definitions)
    registry: Registry[Any] = Registry().with_resource(definitions["$id"], described)
    return registry


def faults_of(resource: Object) -> list[str]:
    """Return what is wrong with an object, by its schema. Needs the schemas of Kubernetes."""
    kind = resource["kind"]
    schema = CUSTOM.get(kind)
    if schema is None:
        schema = json.loads((SCHEMAS / f"{_GROUPS[kind]}.json").read_text(encoding="utf-8"))
    errors = Draft202012Validator(schema, registry=_registry()).iter_errors(resource)
    return [f"{kind} {'.'.join(map(str, error.path))}: {error.message}" for error in errors]


def objects_in(text: str) -> list[Object]:
    """Return the objects of a YAML file."""
    return [found for found in yaml.safe_load_all(text) if found]


def pods_of(service: Object) -> Iterator[Object]:
    """Yield the pod templates of a RayService, the head's first."""
    cluster = service["spec"]["rayClusterConfig"]
    yield cluster["headGroupSpec"]["template"]
    for group in cluster["workerGroupSpecs"]:
        yield group["template"]


def serve_config_of(service: Object) -> dict[str, Any]:
    """Return the Serve configuration of a RayService."""
    found: dict[str, Any] = yaml.safe_load(service["spec"]["serveConfigV2"])
    return found


def selects(labels: Mapping[str, str], of: Object) -> bool:
    """Return whether a selector's `matchLabels` select the pods of a template."""
    return bool(labels.items() <= of["metadata"]["labels"].items())
