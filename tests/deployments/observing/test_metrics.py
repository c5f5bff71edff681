"""What /metrics shows, and what is pushed, as the operator wants it."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from remora.configs.dialects.shared_rules import two_sided_exponential
from remora.configs.errors import ConfigError
from remora.configs.load import parse_args
from remora.deployments.http.core import request_labels
from remora.deployments.http.core.metrics import RequestMetrics
from remora.deployments.http.core.request_labels import RequestLabels
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.observing.telemetry import Telemetry
from tests.deployments.fakes import FakeEngine, FakeServer, make_client, make_server_config

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hi"}]}
NAMES = {
    "first_token_buckets_s": "remora_time_to_first_token_seconds",
    "inter_token_buckets_s": "remora_inter_token_latency_seconds",
    "request_buckets_s": "remora_e2e_request_latency_seconds",
    "prompt_token_buckets": "remora_prompt_length_tokens",
    "output_token_buckets": "remora_output_length_tokens",
}
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


async def scrape(metrics: dict[str, Any], *headers: dict[str, str]) -> tuple[int, Samples]:
    """Send a request with each of the headers; return what /metrics says then."""
    server = FakeServer(FakeEngine(text="abcde"), config=make_server_config(metrics=metrics))
    async with make_client(server) as client:
        for some in headers or ({},):
            assert (await client.post(CHAT, json=BODY, headers=some)).status_code == 200
        answer = await client.get("/metrics")
    found = {
        (sample.name, frozenset((sample.labels.items()) - {("model_name", "tiny")})): sample.value
        for family in text_string_to_metric_families(answer.text if answer.is_success else "")
        for sample in family.samples
    }
    return answer.status_code, found


@pytest.mark.observes("metrics.enabled")
async def test_metrics_can_be_switched_off() -> None:
    assert [(await scrape({"enabled": on}))[0] for on in (True, False)] == [200, 404]


@pytest.mark.observes(
    "metrics.first_token_buckets_s",
    "metrics.inter_token_buckets_s",
    "metrics.request_buckets_s",
    "metrics.prompt_token_buckets",
    "metrics.output_token_buckets",
)
@pytest.mark.parametrize("key", NAMES)
async def test_a_histogram_has_exactly_the_edges_given(key: str) -> None:
    _, found = await scrape({key: [0.5, 2, 7.25]})

    edges = [dict(labels)["le"] for name, labels in found if name == NAMES[key] + "_bucket"]
    assert edges == ["0.5", "2.0", "7.25", "+Inf"]


async def test_lengths_are_counted_in_tokens() -> None:
    _, found = await scrape({"prompt_token_buckets": [21, 22, 23], "output_token_buckets": [4, 5]})

    none: frozenset[tuple[str, str]] = frozenset()
    assert found["remora_prompt_length_tokens_sum", none] == len("<|user|>Hi<|assistant|>") == 23
    assert found["remora_output_length_tokens_bucket", frozenset({("le", "4.0")})] == 0
    assert found["remora_output_length_tokens_bucket", frozenset({("le", "5.0")})] == 1


@pytest.mark.observes("metrics.token_histograms")
async def test_the_histograms_of_lengths_can_be_left_out() -> None:
    def names(found: Samples) -> set[str]:
        return {name for name, _ in found if "_length_tokens" in name}

    assert names((await scrape({"token_histograms": False}))[1]) == set()
    assert len(names((await scrape({"token_histograms": True}))[1])) == 6


def test_edges_by_the_two_sided_exponential_rule() -> None:
    assert two_sided_exponential(1000, 2, 8) == [984, 992, 996, 998, 1000, 1002, 1004, 1008, 1016]
    assert two_sided_exponential(10, 10, 4) == [0, 10, 20, 110]


@pytest.mark.observes("metrics.request_labels", "metrics.request_labels_header")
async def test_requests_are_counted_under_labels_of_their_own_that_are_allowed() -> None:
    keys = {"request_labels": ["team", "use"], "request_labels_header": "X-Labels"}
    _, found = await scrape(
        keys,
        {"x-labels": '{"team": "a", "secret": "x"}', "x-custom-labels": '{"use": "y"}'},
        {"x-labels": '{"team": "a"}'},
        {"x-labels": "nonsense"},
        {"x-labels": '["nonsense"]'},
    )

    counts = {
        tuple(sorted(labels)): value
        for (name, labels), value in found.items()
        if name == "remora_e2e_request_latency_seconds_count"
    }
    assert counts == {(("team", "a"), ("use", "")): 2, (("team", ""), ("use", "")): 2}
    reason = {("team", "a"), ("use", ""), ("reason", "stop")}
    assert found["remora_sequences_finished_total", frozenset(reason)] == 2


async def test_a_client_cannot_make_series_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_labels, "MAX_LABEL_SETS", 2)
    headers = [{"x-custom-labels": f'{{"team": "{name}"}}'} for name in "abcda"]
    _, found = await scrape({"request_labels": ["team"]}, *headers)

    name = "remora_e2e_request_latency_seconds_count"
    counts = {dict(labels)["team"]: value for (n, labels), value in found.items() if n == name}
    assert counts == {"": 0, "a": 2, "b": 1, "other": 2}


def test_one_key_cannot_use_up_the_label_sets_of_all() -> None:
    labels = RequestLabels("x-labels", ["team"])

    def read(owner: str, first: int, num: int) -> list[str]:
        teams = [b'{"team": "%d"}' % number for number in range(first, first + num)]
        return [labels.read([(b"x-labels", team)], owner)[0] for team in teams]

    most = request_labels.MAX_SETS_PER_KEY
    assert read("hostile", 0, most + 2) == [*map(str, range(most)), "other", "other"]
    assert read("honest", 0, 2) == ["0", "1"]  # sets that exist are shared
    assert read("honest", 5000, 1) == ["5000"]
    for number in range(1, 10):
        read(f"hostile {number}", number * 100, most)
    assert len(labels._seen) == request_labels.MAX_LABEL_SETS


class Gateway(ThreadingHTTPServer):
    """Takes pushes: (path, authorization, body)."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.taken: list[tuple[str, str | None, bytes]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Gateway

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.taken.append((self.path, self.headers["authorization"], body))
        self.send_response(202)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with Gateway() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


async def push(gateway: Gateway, num: int, **metrics: Any) -> None:
    """Run a replica's pushes until so many have come."""
    config = make_server_config(metrics={"push_url": gateway.url, **metrics})
    telemetry = Telemetry(ServerState.over(FakeServer(config=config)), "replica7")
    async with asyncio.timeout(10.0):
        while len(gateway.taken) < num:
            await asyncio.sleep(0.01)
    telemetry.close()
    await asyncio.sleep(0.01)


@pytest.mark.observes(
    "metrics.push_url", "metrics.push_period_s", "metrics.push_job", "metrics.push_labels"
)
async def test_metrics_are_pushed_under_job_and_labels(gateway: Gateway) -> None:
    labels = {"zone": "a/b", "rack": "3"}
    await push(gateway, 3, push_job="llm", push_period_s=0.1, push_labels=labels)

    paths, _, bodies = zip(*gateway.taken, strict=True)
    zone = base64.urlsafe_b64encode(b"a/b").decode()
    path = f"/metrics/job/llm/instance/replica7/zone@base64/{zone}/rack/3"
    assert set(paths) == {path}
    assert b'remora_num_pages{model_name="tiny"} 10.0' in bodies[0]


@pytest.mark.observes("metrics.push_auth")
@pytest.mark.parametrize(
    ("secret", "header"),
    [("me:sesame", "Basic bWU6c2VzYW1l"), ("a-token", "Bearer a-token"), (None, None)],
)
async def test_pushes_carry_credentials(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, secret: str | None, header: str | None
) -> None:
    monkeypatch.setenv("PUSH_SECRET", secret or "")
    await push(gateway, 1, push_auth=secret and "env:PUSH_SECRET")
    assert gateway.taken[0][1] == header


async def test_a_push_gateway_that_is_gone_is_complained_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = make_server_config(metrics={"push_url": "http://127.0.0.1:9", "push_period_s": 0.1})
    telemetry = Telemetry(ServerState.over(FakeServer(config=config)), "r")
    async with asyncio.timeout(10.0):
        while "metrics push: failed" not in caplog.text:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.4)
    telemetry.close()
    await asyncio.sleep(0.01)
    assert caplog.text.count("metrics push: failed") == 1


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({"push_job": "x"}, "push_job"),
        ({"first_token_buckets_s": [1.0, 1.0]}, "first_token_buckets_s"),
        ({"request_labels": ["le"]}, r"request_labels\[0\]"),
        ({"request_labels": ["a b"]}, "must be a Prometheus label"),
        ({"request_labels_header": "x"}, "request_labels"),
        ({"token_histograms": False, "prompt_token_buckets": [1.0]}, "token_histograms"),
    ],
)
def test_what_makes_no_sense_is_refused(metrics: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_args({"model": {"path": "x"}, "metrics": metrics})


def test_a_request_without_a_second_token_adds_no_series_of_times_between_tokens() -> None:
    config = make_server_config(metrics={"request_labels": ["team"]})
    metrics = ServerState.over(FakeServer(config=config)).metrics

    RequestMetrics(metrics, ("a",)).first_token(0.1, 0.0)

    lines = [
        line
        for line in generate_latest(metrics.registry).decode().splitlines()
        if 'team="a"' in line
    ]
    assert any("first_token" in line for line in lines)
    assert not any("inter_token" in line for line in lines)
