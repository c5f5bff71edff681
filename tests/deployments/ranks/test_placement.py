"""What a replica reserves with Ray: bundles that Serve and Ray accept; ranks in the right ones."""

from __future__ import annotations

from typing import Any

import pytest
from ray import serve

from remora.configs.load import parse_args
from remora.configs.schema import ServeConfig
from remora.deployments.app import deployment_options
from remora.deployments.llm_server import LLMServer
from remora.deployments.ranks.placement import bundle_index, placement_options

GIB = 2**30


def make_config(device: str = "cpu", **parallel: Any) -> ServeConfig:
    return parse_args({"model": {"path": "m"}, "engine": {"device": device}, "parallel": parallel})


def test_one_rank_is_an_ordinary_actor() -> None:
    assert placement_options(make_config()) == {"ray_actor_options": {"num_cpus": 1.0}}


def test_wishes_of_one_rank_are_the_actors() -> None:
    options = placement_options(
        make_config("cuda", accelerator_type="H100", label_selector={"zone": "a"})
    )

    assert options == {
        "ray_actor_options": {
            "num_cpus": 1.0,
            "num_gpus": 1,
            "resources": {"accelerator_type:H100": 0.001},
            "label_selector": {"zone": "a"},
        }
    }


def test_each_rank_has_a_bundle_of_its_own() -> None:
    options = placement_options(make_config(tp_size=3, cpus_per_rank=0.5, memory_per_rank="2GiB"))

    assert options == {
        "ray_actor_options": {"num_cpus": 0.5, "memory": 2 * GIB},
        "placement_group_bundles": [{"CPU": 0.5, "memory": 2 * GIB}] * 3,
        "placement_group_strategy": "PACK",
    }


def test_ranks_of_a_node_share_a_bundle_when_nodes_are_counted() -> None:
    config = make_config("cuda", tp_size=2, pp_size=2, num_nodes=2)
    options = placement_options(config)

    assert options["placement_group_bundles"] == [{"CPU": 2.0, "GPU": 2}] * 2
    assert options["placement_group_strategy"] == "STRICT_SPREAD"
    assert [bundle_index(config.parallel, rank) for rank in range(4)] == [0, 0, 1, 1]


def test_without_counted_nodes_a_rank_is_in_its_own_bundle() -> None:
    parallel = make_config(tp_size=2, pp_size=2).parallel

    assert [bundle_index(parallel, rank) for rank in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize("placement", ["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"])
def test_ranks_are_placed_as_is_written(placement: str) -> None:
    options = placement_options(make_config(tp_size=2, placement=placement))

    assert options["placement_group_strategy"] == placement


def test_labels_hold_for_every_bundle() -> None:
    options = placement_options(make_config(tp_size=2, label_selector={"zone": "a"}))

    assert options["placement_group_bundle_label_selector"] == [{"zone": "a"}] * 2


@pytest.mark.parametrize(
    "parallel",
    [
        {},
        {"tp_size": 2, "placement": "STRICT_PACK"},
        {"tp_size": 2, "cpus_per_rank": 0},
        {"tp_size": 2, "pp_size": 2, "num_nodes": 2, "cpus_per_rank": 0.25},
        {"tp_size": 2, "accelerator_type": "H100", "memory_per_rank": "1GiB"},
        {"tp_size": 2, "label_selector": {"zone": "in(a, b)"}},
    ],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_serve_takes_the_options(device: str, parallel: dict[str, Any]) -> None:
    config = make_config(device, **parallel)

    serve.deployment(serve.ingress()(LLMServer)).options(**deployment_options(config))
