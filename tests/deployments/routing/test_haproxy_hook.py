"""What must be there for HAProxy to ask, and what is told it."""

from __future__ import annotations

import re
import string
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

import pytest
from ray.serve import Application
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve.handle import DeploymentHandle

from remora.deployments.routing.haproxy_hook import SWITCH, answer, is_asked, missing, pick
from remora.deployments.routing.key import RouteKey

REPLICA = ReplicaID("abc", deployment_id=DeploymentID(name="LLMServer", app_name="app"))


def test_it_takes_a_switch_and_a_ray_that_has_the_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    assert missing() is None
    assert not is_asked()
    monkeypatch.setenv(SWITCH, "1")
    assert is_asked()

    monkeypatch.delattr(Application, "_with_ingress_request_router")
    assert missing() == "Application._with_ingress_request_router"
    monkeypatch.delattr(DeploymentHandle, "choose_replica")
    assert str(missing()).endswith("and DeploymentHandle.choose_replica")
    assert not is_asked()


async def test_a_replica_is_named_as_haproxys_script_reads_it() -> None:
    asked: list[dict[str, Any]] = []

    class Handle:
        @asynccontextmanager
        async def choose_replica(self, **given: Any) -> AsyncGenerator[Any, None]:
            asked.append(given)
            yield type("Selection", (), {"_replica": type("Replica", (), {"replica_id": REPLICA})})

    name = await pick(Handle(), RouteKey(num_tokens=7))

    assert asked == [{"route": RouteKey(num_tokens=7), "_reserve": False}]
    lua = files("ray.serve._private").joinpath("ingress_request_router.lua.tmpl").read_text()
    (pattern,) = re.findall(r"json_body:match\('(\"replica_id\".*)'\)", lua)
    found = re.search(pattern.replace("%s", r"\s"), answer(name).decode())
    assert found is not None
    assert found[1] == REPLICA.to_full_id_str()


def test_a_question_goes_where_a_chooser_listens() -> None:
    lua = files("ray.serve._private").joinpath("ingress_request_router.lua.tmpl").read_text()

    assert "POST /internal/route " in string.Template(lua).template
