"""GET /autoscaling/explain, without Ray."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from ray.experimental import internal_kv
from starlette.exceptions import HTTPException

from remora.deployments.autoscaling.explain import OLD_NOTE, explain, publish, retract
from remora.deployments.autoscaling.routes import explanations
from remora.deployments.gateway.frontend import build_front
from remora.deployments.gateway.metrics import GatewayMetrics
from remora.deployments.gateway.shutdown import GatewayShutdown
from remora.deployments.http.core.auth import Access
from tests.deployments.fakes import make_client, make_server_config


async def test_a_fixed_number_of_replicas_has_no_explanation() -> None:
    async with make_client() as client:
        response = await client.get("/autoscaling/explain")

    assert response.status_code == 404
    assert "autoscaling.max_replicas" in response.json()["error"]["message"]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dict[bytes, bytes]:
    """Stand in for Ray's store."""
    values: dict[bytes, bytes] = {}

    def put(key: bytes, value: str, *, namespace: bytes) -> None:
        values[namespace + key] = value.encode()

    def get(key: bytes, *, namespace: bytes) -> bytes | None:
        return values.get(namespace + key)

    def delete(key: bytes, *, namespace: bytes) -> None:
        del values[namespace + key]

    for name, function in (("put", put), ("get", get), ("del", delete)):
        monkeypatch.setattr(internal_kv, f"_internal_kv_{name}", function)
    return values


def test_a_record_is_found_by_its_names_until_it_is_taken_back(store: dict[bytes, bytes]) -> None:
    publish("app", "LLMServer", {"time": time.time(), "reason": "so"})

    found = explain("app", "LLMServer")
    assert found is not None
    assert found["reason"] == "so"
    assert "note" not in found
    assert explain("app/LLMServer", "") is None
    retract("app", "LLMServer")
    assert explain("app", "LLMServer") is None


def test_a_record_that_nobody_renews_says_so(store: dict[bytes, bytes]) -> None:
    publish("app", "LLMServer", {"time": time.time() - 60})

    found = explain("app", "LLMServer")

    assert found is not None
    assert found["age_s"] >= 60
    assert found["note"] == OLD_NOTE


async def test_a_gateway_says_of_each_model_what_was_decided(store: dict[bytes, bytes]) -> None:
    publish("app", "A", {"time": time.time(), "winner": "backlog"})

    a, b = (SimpleNamespace(app_name="app", deployment_name=name) for name in "AB")
    alone = await explanations({"a": a})
    both = await explanations({"a": a, "b": b})

    assert alone["winner"] == both["a"]["winner"] == "backlog"
    assert both["b"] is None


@pytest.mark.parametrize(
    ("are_autoscaled", "status"),
    [([True], 503), ([False, True], 503), ([False], 404), ([False, False], 404)],
)
async def test_a_gateway_tells_not_yet_from_never(
    store: dict[bytes, bytes], are_autoscaled: list[bool], status: int
) -> None:
    handle = SimpleNamespace(app_name="app", deployment_name="A")
    deciding = {str(n): handle if is_on else None for n, is_on in enumerate(are_autoscaled)}

    with pytest.raises(HTTPException) as caught:
        await explanations(deciding)

    assert caught.value.status_code == status


@pytest.mark.parametrize(("is_local", "status"), [(True, 200), (False, 403)])
async def test_a_gateway_explains_to_its_operator(
    store: dict[bytes, bytes], is_local: bool, status: int
) -> None:
    publish("app", "LLMServer", {"time": time.time(), "winner": "backlog"})
    handle = SimpleNamespace(app_name="app", deployment_name="LLMServer")
    models: Any = {"a": SimpleNamespace(handle=handle, is_autoscaled=True)}
    access, ending = Access(is_local=is_local), GatewayShutdown(None, 0.0)
    front = build_front(models, make_server_config, lambda: access, GatewayMetrics(), ending)

    transport = httpx.ASGITransport(app=front)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        response = await client.get("/autoscaling/explain")

    assert response.status_code == status
    assert ("winner" in response.text) is is_local
