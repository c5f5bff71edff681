"""The application that `build` returns, without starting Ray."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
import ray
from ray.serve import Application
from ray.serve._private import build_app, constants

from remora.configs.errors import ConfigError
from remora.configs.schema import ServeConfig
from remora.deployments import app
from remora.deployments.app import build, deployment_options
from remora.deployments.cluster_token import check_token
from remora.deployments.routing.haproxy_hook import HOOK_SWITCH


def make_config(**sections: Any) -> ServeConfig:
    return ServeConfig.model_validate({"model": {"path": "x"}, **sections})


def test_the_engine_refuses_before_serve_does() -> None:
    config = make_config(engine={"max_running_requests": 800, "max_queued_requests": 1600})
    options = deployment_options(config)
    assert options["max_ongoing_requests"] > 1.3 * (800 + 1600)
    assert options["max_queued_requests"] > 1.3 * (800 + 1600)


@pytest.mark.observes("api.drain_timeout_s")
@pytest.mark.parametrize(
    ("api", "drain_s"),
    [
        ({}, 120),
        ({"drain_timeout_s": 90.0}, 90),
        ({"request_timeout_s": 7.0}, 7),
        ({"request_timeout_s": 7.0, "drain_timeout_s": 3.0}, 3),
    ],
)
def test_a_stopping_replica_gets_the_time_to_drain(api: dict[str, Any], drain_s: float) -> None:
    options = deployment_options(make_config(api=api))
    assert 0 < options["graceful_shutdown_timeout_s"] - drain_s < 10


def test_replicas_are_as_many_as_configured() -> None:
    options = deployment_options(
        make_config(parallel={"num_replicas": 3}, engine={"device": "cuda"})
    )
    assert options["num_replicas"] == 3
    assert options["ray_actor_options"]["num_gpus"] == 1


@pytest.mark.parametrize(
    ("routing", "names"),
    [
        ({"policy": "prefix"}, ["LLMServer", "RoutingService"]),
        ({"policy": "round_robin", "gateway": "off"}, ["LLMServer", "RoutingService"]),
        ({"policy": "lora"}, ["LLMServer", "RoutingService"]),
        ({"policy": "prefix", "gateway": "on"}, ["LLMServer", "Gateway"]),
        ({}, ["LLMServer"]),
    ],
)
def test_haproxy_queries_a_routing_service(
    monkeypatch: pytest.MonkeyPatch, routing: dict[str, Any], names: list[str]
) -> None:
    monkeypatch.setenv(HOOK_SWITCH, "1")
    for module in (constants, build_app):
        monkeypatch.setattr(module, "RAY_SERVE_ENABLE_HA_PROXY", True)

    assert deployments_of(build({"model": {"path": "x"}, "routing": routing})) == names


@pytest.mark.parametrize("without", ["the switch", "the hook"])
def test_without_the_hook_a_gateway_routes(monkeypatch: pytest.MonkeyPatch, without: str) -> None:
    for module in (constants, build_app):
        monkeypatch.setattr(module, "RAY_SERVE_ENABLE_HA_PROXY", True)
    if without == "the hook":
        monkeypatch.setenv(HOOK_SWITCH, "1")
        monkeypatch.delattr(Application, "_with_ingress_request_router")
    else:
        monkeypatch.delenv(HOOK_SWITCH, raising=False)
    application = build({"model": {"path": "x"}, "routing": {"policy": "prefix"}})

    assert deployments_of(application) == ["LLMServer", "Gateway"]
    with pytest.raises(ConfigError, match="HAProxy"):
        build({"model": {"path": "x"}, "routing": {"policy": "session", "gateway": "off"}})


def deployments_of(application: Application) -> list[str]:
    """Return the names of the deployments that Serve would start."""
    built = build_app.build_app(
        application, name="x", make_deployment_handle=lambda deployment, _: deployment.name
    )
    router = built.ingress_request_router_deployment
    return [d.name for d in built.deployments] + ([router.name] if router else [])


def test_invalid_args_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_running_request"):
        build({"model": {"path": "x"}, "engine": {"max_running_request": 3}})


def test_serve_does_not_validate_the_args() -> None:
    (parameter,) = inspect.signature(app.build).parameters.values()
    assert parameter.annotation == dict[str, Any]


@contextmanager
def gcs(code: grpc.StatusCode | None) -> Iterator[str]:
    """Serve every method with an empty answer, or an error; yield the address."""

    def answer(_request: bytes, context: grpc.ServicerContext) -> bytes:
        if code is not None:
            context.abort(code, "")
        return b""

    class All(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, _details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
            return grpc.unary_unary_rpc_method_handler(answer)

    server = grpc.server(ThreadPoolExecutor(1), handlers=[All()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray is not connected, whatever other tests of this process have started."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)


@pytest.mark.usefixtures("without_ray")
def test_a_cluster_that_requires_a_token_is_named_at_once() -> None:
    with gcs(grpc.StatusCode.UNAUTHENTICATED) as address:
        with pytest.raises(ConfigError, match=rf"{address}.*set RAY_AUTH_MODE=token"):
            check_token({"RAY_ADDRESS": address})
        check_token({"RAY_ADDRESS": address, "RAY_AUTH_MODE": "token"})
        check_token({"RAY_ADDRESS": "local"})
        check_token({"RAY_ADDRESS": f"ray://{address}"})
    check_token({"RAY_ADDRESS": address})  # nothing is there: Ray says so


@pytest.mark.usefixtures("without_ray")
@pytest.mark.parametrize("code", [None, grpc.StatusCode.UNIMPLEMENTED])
def test_other_clusters_are_joined(code: grpc.StatusCode | None) -> None:
    with gcs(code) as address:
        check_token({"RAY_ADDRESS": address})
