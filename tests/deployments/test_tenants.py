"""A heavy tenant and a light one on a real engine, over HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.conftest import TinyCheckpoints
from tests.deployments import pooling_replica

NUM_QUEUED = 100
ENGINE = {"kv_tokens": 4096, "max_running_requests": 4, "max_queued_requests": NUM_QUEUED}
TENANTS = [{"name": name, "api_key": f"env:{name.upper()}"} for name in ("heavy", "light")]


async def test_a_short_request_does_not_wait_for_another_tenants_queue(
    tiny_checkpoints: TinyCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tenant in TENANTS:
        monkeypatch.setenv(tenant["name"].upper(), f"sk-{tenant['name']}")
    async with pooling_replica.running(
        tiny_checkpoints("llama"),
        model={"dtype": "float32"},
        engine=ENGINE,
        limits={"tenants": TENANTS},
    ) as (client, server):
        calls = server._served.calls

        async def ask(name: str, number: int, max_tokens: int) -> httpx.Response:
            body: dict[str, Any] = {"prompt": [number + 3] * 20, "max_tokens": max_tokens}
            headers = {"authorization": f"Bearer sk-{name}"}
            return await client.post(
                "/v1/completions", json=body | {"ignore_eos": True}, headers=headers
            )

        heavy = [asyncio.create_task(ask("heavy", i, 400)) for i in range(4 + NUM_QUEUED)]
        while (stats := server._served.client.stats()).num_waiting < NUM_QUEUED:
            assert not any(task.done() for task in heavy)
            await asyncio.sleep(0.005)
        refused = await ask("heavy", 200, 400)
        before = server._served.client.stats().steps_total
        answers = [await ask("light", 300 + i, 2) for i in range(5)]
        stats = server._served.client.stats()
        metrics = (await client.get("/metrics")).text
        waiting = {tenant.name: tenant.num_waiting for tenant in stats.tenants}
        await server._served.client.abort(None)
        ended = [(await task).status_code for task in heavy]

    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    assert [answer.status_code for answer in answers] == [200] * 5
    assert waiting["heavy"] > NUM_QUEUED - 8
    # Two steps compute an answer; a step may be under way when the request arrives.
    assert stats.steps_total - before <= 5 * 8
    assert set(ended) == {200}
    assert calls.tenants.headers("light") == {}
    for name, count in (("max_queued_requests", 1), ("started", 5)):
        whose = "light" if name == "started" else "heavy"
        assert f'outcome="{name}",tenant="{whose}"}} {count}.0' in metrics
    assert 'remora_tenant_tokens_total{model_name="llama",tenant="light"}' in metrics
