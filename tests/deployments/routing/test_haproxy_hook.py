"""When HAProxy asks the routing service, and what Serve's handle is asked then."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from ray.serve import Application
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve.handle import DeploymentHandle

from remora.deployments.ray_private import choose_replica, missing_routing_hook
from remora.deployments.routing.haproxy_hook import HOOK_SWITCH, haproxy_asks
from remora.deployments.routing.key import RouteKey

REPLICA = ReplicaID("abc", deployment_id=DeploymentID(name="LLMServer", app_name="app"))


def test_it_takes_a_switch_and_a_ray_that_has_the_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HOOK_SWITCH, raising=False)
    assert not haproxy_asks()
    monkeypatch.setenv(HOOK_SWITCH, "1")
    assert haproxy_asks()

    monkeypatch.delattr(Application, "_with_ingress_request_router")
    assert missing_routing_hook() == "Application._with_ingress_request_router"
    monkeypatch.delattr(DeploymentHandle, "choose_replica")
    assert str(missing_routing_hook()).endswith("and DeploymentHandle.choose_replica")
    assert not haproxy_asks()


async def test_a_choice_reserves_no_room_and_returns_haproxys_name() -> None:
    calls: list[dict[str, Any]] = []

    class Handle:
        @asynccontextmanager
        async def choose_replica(self, **given: Any) -> AsyncGenerator[Any, None]:
            calls.append(given)
            yield type("Selection", (), {"_replica": type("Replica", (), {"replica_id": REPLICA})})

    name = await choose_replica(Handle(), RouteKey(num_tokens=7))

    assert calls == [{"route": RouteKey(num_tokens=7), "_reserve": False}]
    assert name == REPLICA.to_full_id_str()
