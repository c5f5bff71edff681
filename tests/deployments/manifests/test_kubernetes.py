"""The Helm chart and the RayService manifests: schemas, references, and remora's own checks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jsonschema
import pytest
import yaml

from remora.configs.load import parse_args
from tests.deployments.manifests.objects import (
    Object,
    faults_of,
    objects_in,
    pods_of,
    selects,
    serve_config_of,
)
from tests.deployments.manifests.tools import CHART, MANIFESTS, render, served_paths
from tests.programs import needs

PLAIN = sorted((MANIFESTS / "kuberay").glob("*.yaml"))
TEMPLATES = sorted((CHART / "templates").iterdir())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
EVERYTHING = {
    "image": {"repository": "registry/remora", "tag": "cuda", "pullSecrets": ["pull"]},
    "model": {"path": "/models/llama", "name": "llama"},
    "config": {"model": {"context_length": 8192}, "metrics": {"compat": "vllm"}},
    "gpus": {"perReplica": 2},
    "replicas": {"min": 1, "max": 3, "ttftSeconds": 1.5},
    "secrets": {"apiKeys": "keys", "huggingFace": "hub"},
    "cache": {"claim": "cache"},
    "monitoring": {
        "podMonitor": True,
        "alerts": True,
        "dashboards": True,
        "labels": {"release": "prometheus"},
    },
    "serviceAccountName": "models",
    "nodeSelector": {"pool": "gpu"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "extraEnv": [{"name": "HF_HUB_OFFLINE", "value": "1"}],
    "extraVolumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}],
    "extraVolumeMounts": [{"name": "models", "mountPath": "/models"}],
}
ACCEPTED: dict[str, Object] = {
    "defaults": {},
    "everything": EVERYTHING,
    "nothing optional": {
        "podDisruptionBudget": {"enabled": False},
        "networkPolicy": {"enabled": False},
    },
    "from zero": {"replicas": {"min": 0, "max": 4}},
}
REFUSED: dict[str, tuple[Object, str]] = {
    "an unknown key": ({"replicas": {"most": 2}}, "most"),
    "half a CPU": ({"resources": {"worker": {"cpu": 0.5}}}, "cpu"),
    "no replica": ({"replicas": {"min": 0, "max": 0}}, "max"),
    "a negative number of GPUs": ({"gpus": {"perReplica": -1}}, "perReplica"),
}


def leaves(values: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Yield the dotted names of values; a map without keys is one."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{path}{key}.")
        else:
            yield path + key


def test_every_value_is_used_and_every_used_value_exists() -> None:
    texts = "\n".join(path.read_text(encoding="utf-8") for path in TEMPLATES)
    used = set(re.findall(r"\.Values\.([A-Za-z.]+)", texts))
    declared = set(leaves(VALUES))
    every = {name for leaf in declared for name in (leaf, leaf.rpartition(".")[0])}

    assert used - every == set()
    assert declared - used == set()


def test_the_schema_accepts_the_defaults_and_names_every_value() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft7Validator.check_schema(schema)
    jsonschema.validate(VALUES, schema)

    def names(part: Mapping[str, Any], path: str = "") -> Iterator[str]:
        for key, value in part["properties"].items():
            if "properties" in value:
                yield from names(value, f"{path}{key}.")
            else:
                yield path + key

    assert set(names(schema)) - {"global"} == set(leaves(VALUES))


@pytest.fixture(scope="module")
def rendered() -> dict[str, list[Object]]:
    """Return the objects of the chart, by the set of values."""
    results, lint = render(list(ACCEPTED.values()))
    assert [found for found in lint if found["severity"] > 1] == []
    objects = {}
    for name, files in zip(ACCEPTED, results, strict=True):
        assert isinstance(files, dict), f"{name}: {files}"
        texts = (text for file, text in files.items() if file.endswith(".yaml"))
        objects[name] = [found for text in texts for found in objects_in(text)]
    return objects


def kinds(objects: list[Object]) -> dict[str, Object]:
    return {found["kind"]: found for found in objects}


@needs("helm")
@needs("schemas of Kubernetes")
@pytest.mark.parametrize("name", ACCEPTED)
def test_the_chart_makes_valid_objects(rendered: dict[str, list[Object]], name: str) -> None:
    assert [fault for found in rendered[name] for fault in faults_of(found)] == []


@needs("helm")
def test_what_is_switched_off_is_not_there(rendered: dict[str, list[Object]]) -> None:
    policies = {"PodDisruptionBudget", "NetworkPolicy"}
    assert set(kinds(rendered["nothing optional"])) == {"RayService"}
    assert set(kinds(rendered["defaults"])) == {"RayService"} | policies
    assert set(kinds(rendered["everything"])) == {
        "RayService",
        "PodMonitor",
        "PrometheusRule",
        "ConfigMap",
        *policies,
    }


@needs("helm")
def test_the_chart_refuses_wrong_values() -> None:
    results, _ = render([values for values, _ in REFUSED.values()])

    for (_, said), found in zip(REFUSED.values(), results, strict=True):
        assert isinstance(found, str)
        assert said in found


@needs("helm")
@pytest.mark.parametrize("name", ACCEPTED)
def test_selectors_select_the_pods_and_ports_are_there(
    rendered: dict[str, list[Object]], name: str
) -> None:
    found = kinds(rendered[name])
    head, worker = pods_of(found["RayService"])
    ports = {port["name"] for pod in (head, worker) for port in ports_of(pod)}
    if "PodDisruptionBudget" in found:
        labels = found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"]
        assert selects(labels, worker)
        assert not selects(labels, head)
    if "PodMonitor" in found:
        spec = found["PodMonitor"]["spec"]
        assert selects(spec["selector"]["matchLabels"], head)
        assert selects(spec["selector"]["matchLabels"], worker)
        assert {end["port"] for end in spec["podMetricsEndpoints"]} <= ports
    if "NetworkPolicy" in found:
        spec = found["NetworkPolicy"]["spec"]
        own = spec["ingress"][0]["from"][0]["podSelector"]["matchLabels"]
        for labels in (own, spec["podSelector"]["matchLabels"]):
            assert selects(labels, head)
            assert selects(labels, worker)
        assert {p["port"] for rule in spec["ingress"] for p in rule.get("ports", [])} <= ports


def ports_of(pod: Object) -> list[Any]:
    found: list[Any] = pod["spec"]["containers"][0]["ports"]
    return found


@needs("helm")
def test_everything_that_is_wanted_arrives(rendered: dict[str, list[Object]]) -> None:
    service = kinds(rendered["everything"])["RayService"]
    args = parse_args(serve_config_of(service)["applications"][0]["args"])
    assert (args.model.path, args.model.served_name) == ("/models/llama", "llama")
    assert (args.engine.device, args.model.context_length) == ("cuda", 8192)
    assert (args.parallel.tp_size, args.parallel.cpus_per_rank) == (2, 2.0)
    assert (args.autoscaling.min_replicas, args.autoscaling.max_replicas) == (1, 3)
    assert args.autoscaling.target_ttft_s == 1.5
    assert args.api.api_key == "file:/etc/remora/keys/api-key"
    assert args.metrics.compat == "vllm"

    head, worker = pods_of(service)
    for pod in (head, worker):
        (container,) = pod["spec"]["containers"]
        assert container["image"] == "registry/remora:cuda"
        names = [variable["name"] for variable in container["env"]]
        assert names == ["HF_TOKEN", "HF_HUB_OFFLINE"]
        assert pod["spec"]["serviceAccountName"] == "models"
    assert worker["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 2
    # Ray's autoscaler in the head pod speaks to Kubernetes; models do not.
    assert head["spec"]["automountServiceAccountToken"]
    assert not worker["spec"]["automountServiceAccountToken"]


def services() -> dict[str, Object]:
    found = {path.name: objects_in(path.read_text(encoding="utf-8"))[0] for path in PLAIN}
    assert set(found) == {"rayservice-cpu.yaml", "rayservice-gpu.yaml"}
    return found


@needs("schemas of Kubernetes")
@pytest.mark.parametrize("name", services())
def test_plain_manifests_are_valid(name: str) -> None:
    assert faults_of(services()[name]) == []


def check_service(service: Object) -> None:
    """Check what no schema says: names, numbers and paths that must agree with each other."""
    config = serve_config_of(service)
    (application,) = config["applications"]
    args = parse_args(application["args"])
    cluster = service["spec"]["rayClusterConfig"]
    (group,) = cluster["workerGroupSpecs"]
    worker = group["template"]["spec"]["containers"][0]

    # A worker has room for the ranks of one replica, and there are as many as replicas.
    params = group["rayStartParams"]
    assert args.parallel.cpus_per_rank * args.parallel.num_ranks == int(params["num-cpus"])
    assert str(worker["resources"]["requests"]["cpu"]) == params["num-cpus"]
    gpus = int(worker["resources"]["limits"].get("nvidia.com/gpu", 0))
    assert gpus == int(params.get("num-gpus", 0))
    assert gpus == (args.parallel.num_ranks if args.engine.device == "cuda" else 0)
    most = args.autoscaling.max_replicas or args.parallel.num_replicas
    assert group["maxReplicas"] == most
    assert group["minReplicas"] == group["replicas"] <= most
    scales = cluster.get("enableInTreeAutoscaling", False)
    assert scales is (group["minReplicas"] < most)
    assert config["http_options"]["port"] in [port["containerPort"] for port in worker["ports"]]
    assert config["proxy_location"] == "EveryNode"

    routes = served_paths()
    ray = {"/api/local_raylet_healthz": "agent", "/api/gcs_healthz": "dashboard"}
    for pod in pods_of(service):
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["runAsUser"] == 1000
        (container,) = spec["containers"]
        names = {port["name"] for port in container["ports"]}
        for probe in ("readinessProbe", "livenessProbe"):
            if probe in container:
                get = container[probe]["httpGet"]
                assert get["path"] in routes | set(ray)
                assert get["port"] == ray.get(get["path"], "serve")
                assert get["port"] in names
        volumes = {volume["name"] for volume in spec.get("volumes", [])}
        mounts = {mount["name"] for mount in container.get("volumeMounts", [])}
        assert mounts == volumes


@pytest.mark.parametrize("name", services())
def test_plain_manifests_agree_with_themselves(name: str) -> None:
    check_service(services()[name])


@needs("helm")
@pytest.mark.parametrize("name", ACCEPTED)
def test_the_charts_service_agrees_with_itself(
    rendered: dict[str, list[Object]], name: str
) -> None:
    check_service(kinds(rendered[name])["RayService"])
