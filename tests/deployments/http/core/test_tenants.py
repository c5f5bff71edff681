"""Tenants at the edge: whose request it is, and what it may ask for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from remora.configs.errors import ConfigError
from remora.configs.load import parse_args
from remora.configs.schema import ServeConfig
from remora.deployments.http.core.auth import Access
from remora.deployments.http.generation.server_state import ServerState
from remora.engine.tenants import EVERYONE, Tenant
from tests.deployments.fakes import FakeEngine, FakeServer, client_of, make_server_config
from tests.deployments.http.batches.jobs import make_line, make_runner, opened, start
from tests.deployments.http.core.test_auth import GENERATIONS
from tests.deployments.http.refusals import refusals_of
from tests.deployments.http.shared_app import share_http_app

COMPLETIONS = "/v1/completions"
ACME = {"authorization": "Bearer sk-acme"}
OTHER = {"authorization": "Bearer sk-other"}


@pytest.fixture
def tenanted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ServeConfig]:
    """Return a maker of configurations with the tenant acme and the key of other callers."""
    monkeypatch.setenv("ACME", "sk-acme")
    monkeypatch.setenv("OTHER", "sk-other")

    def make(
        default: Mapping[str, Any] | None = None,
        *,
        sections: Mapping[str, Any] | None = None,
        **acme: Any,
    ) -> ServeConfig:
        tenants = [{"name": "acme", "api_key": "env:ACME", **acme}]
        if default is not None:
            tenants.append({"name": "default", **default})
        given = dict(sections or {})
        given["api"] = {"api_key": "env:OTHER", **given.get("api", {})}
        return make_server_config(limits={"tenants": tenants}, **given)

    return make


def app_of(server: FakeServer) -> tuple[httpx.AsyncClient, ServerState]:
    state, access = ServerState.over(server), Access.of(server.config, is_local=True)
    return client_of(share_http_app(state, access=lambda: access)), state


async def ask(
    client: httpx.AsyncClient, headers: Mapping[str, str] = ACME, **body: Any
) -> httpx.Response:
    body = {"prompt": "abcd", "max_tokens": 2} | body
    return await client.post(COMPLETIONS, json=body, headers=dict(headers))


@pytest.mark.observes("limits.tenants")
@pytest.mark.parametrize(("path", "body"), GENERATIONS.items())
async def test_every_api_names_the_tenant_of_the_key(
    path: str, body: dict[str, Any], tenanted: Callable[..., ServeConfig]
) -> None:
    limits = {"weight": 2.5, "max_kv_fraction": 0.5, "max_open_requests": 7}
    server = FakeServer(config=tenanted(**limits))
    client, _ = app_of(server)
    async with client:
        answers = [await client.post(path, json=body, headers=h) for h in (ACME, OTHER)]
        health = await client.get("/health_generate")

    assert [a.status_code for a in (*answers, health)] == [200, 200, 200]
    *named, own = [request.tenant for request in server.client.requests]
    acme = Tenant(name="acme", weight=2.5, kv_fraction=0.5, max_open=7)
    half = len(named) // 2
    assert half > 0
    assert named == [acme] * half + [Tenant(name="default")] * half
    assert own == EVERYONE


async def test_a_batch_is_of_the_tenant_that_created_it(
    tmp_path: Path, tenanted: Callable[..., ServeConfig]
) -> None:
    server = FakeServer(config=tenanted(sections={"api": {"batch_dir": str(tmp_path)}}))
    access = Access.of(server.config, is_local=True)
    async with opened(server, access, key="sk-acme") as client:
        made = await start(client, make_line("one"))
        await make_runner(server)[0].run_next()
        assert (await client.batches.retrieve(made.id)).status == "completed"
    assert [request.tenant.name for request in server.client.requests] == ["acme"]


async def test_without_tenants_requests_are_of_everyone_and_report_no_limits() -> None:
    server = FakeServer()
    client, _ = app_of(server)
    async with client:
        answer = await ask(client, {}, priority=9)
        metrics = (await client.get("/metrics")).text
    assert [request.tenant for request in server.client.requests] == [EVERYONE]
    assert not [name for name in answer.headers if name.startswith("x-ratelimit")]
    assert "remora_tenant_requests_total{" not in metrics


async def test_tenants_without_keys_are_all_callers() -> None:
    limits = {"tenants": [{"name": "default", "requests_per_minute": 1}]}
    server = FakeServer(config=make_server_config(limits=limits))
    client, _ = app_of(server)
    async with client:
        assert [(await ask(client, {})).status_code for _ in range(2)] == [200, 429]
    assert [request.tenant.name for request in server.client.requests] == ["default"]


async def test_where_a_tenant_has_a_key_every_caller_needs_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ACME", "sk-acme")
    config = make_server_config(limits={"tenants": [{"name": "acme", "api_key": "env:ACME"}]})
    client, _ = app_of(FakeServer(config=config))
    async with client:
        assert [(await ask(client, h)).status_code for h in ({}, OTHER, ACME)] == [401, 401, 200]
        info = await client.get("/server_info", headers=ACME)
    assert "env:ACME" not in info.text


@pytest.mark.parametrize(
    ("tenants", "reason"),
    [
        ([{"name": "a"}], "'a' needs api_key"),
        ([{"name": "default", "api_key": "env:A"}], "'default' takes the keys of api.api_key"),
        ([{"name": "a", "api_key": "env:A"}] * 2, "two have the name 'a'"),
        ([{"name": "a b", "api_key": "env:A"}], "name"),
        ([{"name": "a", "api_key": "env:A", "weight": 0}], "weight"),
    ],
)
def test_wrong_tenants_are_config_errors(tenants: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=r"limits\.tenants") as caught:
        parse_args({"model": {"path": "x"}, "limits": {"tenants": tenants}})
    assert reason in str(caught.value)


@pytest.mark.parametrize("first", ["api", "tenant"])
def test_a_key_has_one_owner(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONE", "sk-1\nsk-same")
    monkeypatch.setenv("TWO", "sk-same\nsk-2")
    tenants = [{"name": "two", "api_key": "env:TWO"}]
    api = {"api_key": "env:ONE"} if first == "api" else {}
    if first == "tenant":
        tenants.append({"name": "one", "api_key": "env:ONE"})
    config = make_server_config(api=api, limits={"tenants": tenants})
    with pytest.raises(ConfigError, match="a key that another tenant") as caught:
        Access.of(config, is_local=True)
    assert "sk-" not in str(caught.value)


# -- limits ------------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("limit", "num", "message"),
    [
        ("requests_per_minute", 2, "limit is 2 requests per minute: 0 are left"),
        ("tokens_per_minute", 12, "limit is 12 tokens per minute: 0 are left"),
    ],
)
async def test_a_call_over_a_limit_per_minute_is_refused(
    limit: str, num: int, message: str, streams: bool, tenanted: Callable[..., ServeConfig]
) -> None:
    client, _ = app_of(FakeServer(config=tenanted(**{limit: num})))
    async with client:
        taken = [await ask(client, stream=streams) for _ in range(2)]  # 4 + 2 tokens each
        refused = await ask(client, stream=streams)
        other = await ask(client, OTHER)
        counted = await refusals_of(client)
        metrics = (await client.get("/metrics")).text

    assert [answer.status_code for answer in (*taken, refused, other)] == [200, 200, 429, 200]
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert message in error["message"]
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    assert refused.headers["x-should-retry"] == "true"
    what = limit.removesuffix("_per_minute")
    assert [a.headers[f"x-ratelimit-limit-{what}"] for a in (*taken, refused)] == [str(num)] * 3
    assert refused.headers[f"x-ratelimit-remaining-{what}"] == "0"
    assert refused.headers[f"x-ratelimit-reset-{what}"].endswith("s")
    assert not [name for name in other.headers if name.startswith("x-ratelimit")]
    assert counted == [limit]
    for outcome, count in (("started", 2), (limit, 1)):
        assert f'outcome="{outcome}",tenant="acme"}} {count}.0' in metrics
    assert 'remora_tenant_time_to_first_token_seconds_count{model_name="tiny",tenant="' in metrics


async def test_limits_change_while_calls_run(tenanted: Callable[..., ServeConfig]) -> None:
    client, state = app_of(FakeServer(config=tenanted(requests_per_minute=1)))
    async with client:
        statuses = [(await ask(client)).status_code for _ in range(2)]
        state.adopt(tenanted(requests_per_minute=1, weight=2.0))  # what is used remains used
        statuses.append((await ask(client)).status_code)
        state.adopt(tenanted(requests_per_minute=2))
        statuses.append((await ask(client)).status_code)
        state.adopt(make_server_config())
        statuses += [(await ask(client)).status_code for _ in range(3)]
    assert statuses == [200, 429, 429, 200, 200, 200, 200]


@pytest.mark.parametrize(
    ("low_first", "statuses", "bound"),
    [(False, [200, 200, 400], "highest of your key is 3"), (True, [400, 200, 200], "is -3")],
)
async def test_a_priority_above_the_tenants_is_refused(
    low_first: bool,
    statuses: list[int],
    bound: str,
    tenanted: Callable[..., ServeConfig],
) -> None:
    config = tenanted(max_priority=3)
    server = FakeServer(config=config)
    server.plan = replace(server.plan, low_priority_first=low_first)
    client, _ = app_of(server)
    async with client:
        answers = [await ask(client, priority=priority) for priority in (-4, 3, 4)]
        other = await ask(client, OTHER, priority=4)
    assert [a.status_code for a in answers] == statuses
    assert other.status_code == 200
    (error,) = (a.json()["error"] for a in answers if a.status_code == 400)
    assert (error["param"], error["code"]) == ("priority", "priority_too_high")
    assert bound in error["message"]


async def test_a_tenant_that_takes_all_places_leaves_the_others_theirs(
    tenanted: Callable[..., ServeConfig],
) -> None:
    gate = asyncio.Event()
    config = tenanted(sections={"api": {"max_concurrent_requests": 2}})
    client, _ = app_of(FakeServer(FakeEngine(gate=gate), config=config))
    async with client:
        calls = [asyncio.create_task(ask(client)) for _ in range(3)]
        await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        other = asyncio.create_task(ask(client, OTHER))
        await asyncio.sleep(0.01)
        gate.set()
        statuses = sorted([(await call).status_code for call in calls])
        assert (await other).status_code == 200
    assert statuses == [200, 200, 429]


async def test_anthropics_api_reports_limits_by_its_own_names(
    tenanted: Callable[..., ServeConfig],
) -> None:
    client, _ = app_of(FakeServer(config=tenanted(requests_per_minute=5)))
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    async with client:
        answer = await client.post("/v1/messages", json=body, headers=ACME)

    limits = {name: value for name, value in answer.headers.items() if "ratelimit" in name}
    assert limits.pop("anthropic-ratelimit-requests-reset").endswith("Z")
    assert limits == {
        "anthropic-ratelimit-requests-limit": "5",
        "anthropic-ratelimit-requests-remaining": "4",
    }
