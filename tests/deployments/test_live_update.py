"""Changes of `user_config` of a running replica."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from remora.configs.errors import ConfigError
from remora.configs.load import parse_args
from remora.deployments.http.core.auth import Access
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.live_update import LiveSettings
from tests.deployments.fakes import CharTokenizer, FakeServer, client_of
from tests.deployments.http.shared_app import share_http_app

ARGS: dict[str, Any] = {"model": {"path": "tiny"}, "limits": {"max_n": 4}}
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


class Tokenizer(CharTokenizer):
    def limit_rendering(self, *, max_seconds: float, max_chars: int) -> None:
        self.rendering = (max_seconds, max_chars)


@dataclass
class Replica:
    """A replica of fakes, its live settings, and its client."""

    server: FakeServer
    settings: LiveSettings
    client: httpx.AsyncClient

    def apply(self, user_config: dict[str, Any] | None) -> None:
        self.settings.apply(user_config)


@pytest.fixture
async def replica() -> AsyncGenerator[Replica, None]:
    level = logging.getLogger("remora").level
    server = FakeServer(
        config=parse_args(ARGS), tokenizer=Tokenizer(), generation_defaults={"top_k": 40}
    )
    state = ServerState.over(server)
    settings = LiveSettings(ARGS, state, Access(is_local=True))
    async with client_of(share_http_app(state, access=lambda: settings.access)) as client:
        yield Replica(server, settings, client)
    logging.getLogger("remora").setLevel(level)


async def statuses(replica: Replica, *bodies: dict[str, Any]) -> list[int]:
    path = "/v1/chat/completions"
    return [(await replica.client.post(path, json=CHAT | body)).status_code for body in bodies]


@pytest.mark.observes("api.unknown_fields", "limits.max_n")
async def test_limits_and_strictness_change_between_two_requests(replica: Replica) -> None:
    bodies = ({"n": 3}, {"unheard_of": 1})

    assert await statuses(replica, *bodies) == [200, 200]
    replica.apply({"limits": {"max_n": 2}, "api": {"unknown_fields": "reject"}})
    assert await statuses(replica, *bodies) == [400, 400]
    replica.apply(None)
    assert await statuses(replica, *bodies) == [200, 200]


@pytest.mark.observes("sampling.temperature", "sampling.max_tokens")
async def test_sampling_defaults_change_and_yield_to_the_requests_own(replica: Replica) -> None:
    replica.apply({"sampling": {"temperature": 0.25, "max_tokens": 3}})
    await statuses(replica, {}, {"temperature": 0.75, "max_tokens": 2})

    first, second = (request.sampling for request in replica.server.client.requests)
    assert (first.temperature, first.top_k, first.max_tokens) == (0.25, 40, 3)
    assert (second.temperature, second.top_k, second.max_tokens) == (0.75, 40, 2)


@pytest.mark.observes("sampling.top_k", "sampling.top_p", "sampling.min_p")
@pytest.mark.observes("sampling.repetition_penalty", "sampling.presence_penalty")
@pytest.mark.observes("sampling.frequency_penalty")
async def test_every_sampling_default_holds(replica: Replica) -> None:
    given = {"top_k": 7, "top_p": 0.5, "min_p": 0.125, "repetition_penalty": 1.5}
    given |= {"presence_penalty": 0.25, "frequency_penalty": 0.75}

    replica.apply({"sampling": given})
    await statuses(replica, {})

    (request,) = replica.server.client.requests
    assert {name: getattr(request.sampling, name) for name in given} == given


async def test_preferred_sampling_parameters_are_reported(replica: Replica) -> None:
    async def preferred() -> Any:
        return (await replica.client.get("/get_model_info")).json()["preferred_sampling_params"]

    assert await preferred() is None
    replica.apply({"sampling": {"temperature": 0.25, "max_tokens": 3}})
    assert await preferred() == {"temperature": 0.25, "max_new_tokens": 3}


@pytest.mark.observes("metrics.log_level")
@pytest.mark.observes("limits.template_timeout_s", "limits.max_template_chars")
async def test_the_queue_the_template_and_the_log_follow(replica: Replica) -> None:
    replica.apply(
        {
            "engine": {"max_queued_requests": 9, "queue_timeout_s": 3.0},
            "limits": {"template_timeout_s": 0.25, "max_template_chars": 2048},
            "metrics": {"log_level": "ERROR"},
        }
    )

    assert replica.server.client.plan is not None
    assert replica.server.client.plan.max_queued_requests == 9
    assert replica.server.tokenizer.rendering == (0.25, 2048)
    assert logging.getLogger("remora").level == logging.ERROR
    assert (await replica.client.get("/server_info")).json()["max_queued_requests"] == 9
    assert replica.settings._server.calls.limits.queue_timeout_s == 3.0


@pytest.mark.observes("api.api_key", "api.admin_api_key")
@pytest.mark.parametrize(
    ("key", "path"), [("api_key", "/v1/models"), ("admin_api_key", "/flush_cache")]
)
async def test_keys_change(
    replica: Replica, monkeypatch: pytest.MonkeyPatch, key: str, path: str
) -> None:
    monkeypatch.setenv("THE_KEY", "sesame")

    assert (await replica.client.get(path)).status_code == 200
    replica.apply({"api": {key: "env:THE_KEY"}})

    assert (await replica.client.get(path)).status_code == 401
    headers = {"authorization": "Bearer sesame"}
    assert (await replica.client.get(path, headers=headers)).status_code == 200


@pytest.mark.parametrize(
    ("user_config", "reason"),
    [
        ({"limits": {"max_n": 2, "max_tools": -1}}, "limits.max_tools = -1: "),
        ({"limits": {"max_n": 2}, "engine": {"page_size": 8}}, "engine.page_size = 8: "),
        ({"limits": {"max_n": 2}, "api": {"api_key": "env:NO_SUCH_KEY"}}, "NO_SUCH_KEY"),
    ],
)
async def test_an_invalid_update_changes_nothing_and_is_reported(
    replica: Replica, caplog: pytest.LogCaptureFixture, user_config: dict[str, Any], reason: str
) -> None:
    replica.apply({"limits": {"max_n": 3}})

    replica.apply(user_config)

    assert await statuses(replica, {"n": 3}, {"n": 4}) == [200, 400]
    assert reason in caplog.text
    assert reason in (await replica.client.get("/server_info")).json()["user_config_refused"]
    replica.apply({"limits": {"max_n": 3}})
    assert (await replica.client.get("/server_info")).json()["user_config_refused"] is None


async def test_a_replica_does_not_start_with_an_invalid_user_config(replica: Replica) -> None:
    with pytest.raises(ConfigError, match=r"engine\.page_size = 8: "):
        replica.apply({"engine": {"page_size": 8}})
