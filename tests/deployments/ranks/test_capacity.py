"""What a cluster can never hold is said with numbers; what it can hold some day is not."""

from __future__ import annotations

from typing import Any

import pytest

from remora.configs.errors import ConfigError
from remora.configs.load import parse_args
from remora.deployments.ranks.capacity import Node, shortage
from remora.deployments.ranks.cluster import check_room
from tests.deployments.ranks.test_placement import make_config


def make_node(cpus: float, gpus: float = 0, **labels: str) -> Node:
    return Node(resources={"CPU": cpus, "GPU": gpus, "memory": 8e9}, labels=labels)


@pytest.mark.parametrize(
    ("parallel", "cpus", "fits"),
    [
        ({}, [1], True),
        ({"tp_size": 3, "cpus_per_rank": 0.5}, [2], True),
        ({"tp_size": 3, "cpus_per_rank": 0.1}, [0.3], True),
        ({"tp_size": 4}, [2, 2], True),
        ({"tp_size": 2, "placement": "STRICT_PACK"}, [1, 2], True),
        ({"tp_size": 4, "num_nodes": 2}, [2, 1, 2], True),
        ({"tp_size": 2, "num_nodes": 2, "num_replicas": 2}, [2, 2], True),
        ({"tp_size": 2, "num_replicas": 2}, [3, 1], True),
        ({"tp_size": 3}, [2], False),
        ({"tp_size": 2, "placement": "STRICT_PACK"}, [1, 1], False),
        ({"tp_size": 4, "num_nodes": 2}, [8], False),
        ({"tp_size": 4, "num_nodes": 2}, [3, 1], False),
        ({"tp_size": 2, "num_replicas": 3}, [4], False),
        ({"tp_size": 2, "num_nodes": 2, "num_replicas": 2}, [8, 1], False),
        ({"memory_per_rank": "9GB"}, [2], False),
    ],
)
def test_only_what_never_fits_is_refused(
    parallel: dict[str, Any], cpus: list[float], fits: bool
) -> None:
    nodes = [make_node(each) for each in cpus]

    assert (shortage(make_config(**parallel), nodes) is None) is fits


def test_the_refusal_has_numbers_and_advice() -> None:
    text = shortage(make_config(tp_size=3), [make_node(2)])

    assert text is not None
    assert text.startswith("1 replica of 3 ranks needs 3 bundles of 1 CPU (PACK), and Ray's 1 node")
    assert "has room for 2: 2 CPU." in text
    assert "parallel.cpus_per_rank (now 1)" in text


def test_gpus_are_asked_for_by_device() -> None:
    text = shortage(make_config("cuda", tp_size=2), [make_node(8, gpus=1)])

    assert text is not None
    assert "8 CPU, 1 GPU" in text
    assert "engine.device is cuda" in text


@pytest.mark.parametrize(
    ("condition", "fits"),
    [("a", True), ("b", False), ("!b", True), ("in(a, b)", True), ("!in(a, b)", False)],
)
def test_nodes_need_the_labels(condition: str, fits: bool) -> None:
    config = make_config(label_selector={"zone": condition})

    assert (shortage(config, [make_node(4, zone="a")]) is None) is fits


def test_with_autoscaling_one_replica_must_fit() -> None:
    config = parse_args(
        {"model": {"path": "m"}, "autoscaling": {"max_replicas": 9}, "parallel": {"tp_size": 2}}
    )

    assert config.autoscaling.is_on
    assert shortage(config, [make_node(2)]) is None


def test_nodes_that_are_gone_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [
        {"Alive": True, "Resources": {"CPU": 1.0}, "Labels": {}},
        {"Alive": False, "Resources": {"CPU": 8.0}},
    ]
    monkeypatch.setattr("ray.nodes", lambda: nodes)

    check_room(make_config())
    with pytest.raises(ConfigError, match=r"of 1 CPU \(PACK\), and Ray's 1 node has room"):
        check_room(make_config(tp_size=2))
