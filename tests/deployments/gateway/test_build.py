"""When a gateway is needed, and its options for Serve."""

from __future__ import annotations

from typing import Any

import pytest

from remora.deployments.app import deployment_options
from remora.deployments.gateway.build import gateway_options, needs_gateway, uses_routing_service
from tests.deployments.fakes import make_server_config

TO_ZERO = {"max_replicas": 3, "min_replicas": 0}


@pytest.mark.parametrize(
    ("sections", "needed", "needed_under_haproxy", "has_routing_service_if_asked"),
    [
        ({}, False, False, False),
        ({"routing": {"policy": "round_robin"}}, False, True, True),
        ({"routing": {"policy": "shortest_queue"}}, False, True, True),
        ({"routing": {"policy": "prefix"}}, True, True, True),
        ({"routing": {"policy": "session"}}, True, True, True),
        ({"routing": {"policy": "lora"}}, True, True, True),
        ({"routing": {"policy": "session", "gateway": "off"}}, False, False, True),
        ({"routing": {"resume_on_failure": True}}, True, True, False),
        ({"routing": {"policy": "prefix", "resume_on_failure": True}}, True, True, False),
        ({"routing": {"gateway": "on"}}, True, True, False),
        ({"routing": {"policy": "prefix", "gateway": "on"}}, True, True, False),
        ({"autoscaling": TO_ZERO}, True, True, False),
        ({"autoscaling": {"max_replicas": 3}}, False, False, False),
        ({"routing": {"policy": "prefix"}, "autoscaling": TO_ZERO}, True, True, False),
    ],
)
def test_one_model_needs_a_gateway_only_for_what_a_gateway_does(
    sections: dict[str, Any],
    needed: bool,
    needed_under_haproxy: bool,
    has_routing_service_if_asked: bool,
) -> None:
    config = make_server_config(**sections)

    assert needs_gateway([config], has_haproxy=False) is needed
    assert needs_gateway([config], has_haproxy=True) is needed_under_haproxy
    assert uses_routing_service([config], haproxy_asks=True) is has_routing_service_if_asked
    assert not uses_routing_service([config], haproxy_asks=False)
    asked = needs_gateway([config], has_haproxy=True, haproxy_asks=True)
    assert asked is (needed_under_haproxy and not has_routing_service_if_asked)


def test_several_models_need_one() -> None:
    configs = [make_server_config(routing={"policy": "prefix"})] * 2

    assert needs_gateway(configs, has_haproxy=False)
    assert needs_gateway(configs, has_haproxy=True, haproxy_asks=True)
    assert not uses_routing_service(configs, haproxy_asks=True)


def test_a_gateway_takes_what_all_replicas_take_and_what_is_held() -> None:
    config = make_server_config(
        routing={"num_gateways": 3, "max_held_requests": 10}, parallel={"num_replicas": 2}
    )
    model = deployment_options(config, behind_gateway=True)

    options = gateway_options({"x": model}, {"x": config})

    assert options["num_replicas"] == 3
    assert options["max_ongoing_requests"] == 2 * model["max_ongoing_requests"] + 10
    assert options["graceful_shutdown_timeout_s"] == model["graceful_shutdown_timeout_s"]


def test_a_gateway_stays_for_as_long_as_the_most_patient_model() -> None:
    configs = {
        name: make_server_config(api={"drain_timeout_s": s}) for name, s in (("x", 5), ("y", 50))
    }
    models = {name: deployment_options(c, behind_gateway=True) for name, c in configs.items()}

    options = gateway_options(models, configs)

    expected = models["y"]["graceful_shutdown_timeout_s"]
    assert options["graceful_shutdown_timeout_s"] == expected
