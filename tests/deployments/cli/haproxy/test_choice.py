"""`remora serve` with HAProxy and a prefix policy: the routing service picks replicas."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import orjson
import pytest

from remora.deployments.routing.haproxy_hook import MAX_BODY_BYTES
from tests.conftest import TinyCheckpoints
from tests.deployments.cli.haproxy.needs import HAPROXY
from tests.deployments.lifecycle.server import (
    REPLICA,
    ROUTING_SERVICE,
    Server,
    kill,
    make_serve_config,
    running,
)

pytestmark = [
    pytest.mark.ray,
    HAPROXY,
]
WORDS = "the same words for everybody, again and again " * 4
LONG = {"prompt": "a", "max_tokens": 3000, "ignore_eos": True, "temperature": 0, "stream": True}
BODY_TIMEOUT_S = 3
# So many do not go where they should by chance. An odd number: HAProxy by itself takes turns, which
# an even one would find to be the same again.
MANY = range(25)


@pytest.fixture(scope="module")
def server(
    tiny_checkpoints: TinyCheckpoints, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    config = make_serve_config(
        tiny_checkpoints("llama", max_position_embeddings=8192),
        parallel={"num_replicas": 2},
        engine={"page_size": 16},
        # Answers come sooner here than reports of them: by load, others would seem less busy.
        routing={"policy": "prefix", "max_imbalance": 100},
        limits={"body_timeout_s": BODY_TIMEOUT_S},
    )
    with running(config, tmp_path_factory.mktemp("server"), proxy="haproxy") as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def num_cached(client: httpx.Client, prompt: str, **more: Any) -> int:
    """Return how many tokens of a prompt were in the cache of the replica that answered."""
    body = {"prompt": prompt, "max_tokens": 1, **more}
    usage = client.post("/v1/completions", json=body).raise_for_status().json()["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def until_chosen(server: Server, client: httpx.Client, tag: str) -> None:
    """Wait until prompts find their own pages: HAProxy and the routing service know both replicas.

    tag:  short: prompts have to differ within their first page
    """
    rounds = iter(range(10_000))

    def all_find_theirs() -> bool:
        number = next(rounds)
        prompts = [f"{tag} {number} {n}: {WORDS}" for n in MANY]
        first = [num_cached(client, prompt) for prompt in prompts]
        again = [num_cached(client, prompt) for prompt in prompts]
        return not any(first) and all(again)

    server.until(all_find_theirs)


def test_a_prompt_goes_where_its_pages_are_and_no_gateway_stands_before_it(
    server: Server, client: httpx.Client
) -> None:
    until_chosen(server, client, "start")

    assert set(server.application["deployments"]) == {"LLMServer", "RoutingService"}
    chat = {"messages": [{"role": "user", "content": WORDS}], "max_tokens": 1}
    for body in (chat, chat | {"stream": True, "stream_options": {"include_usage": True}}):
        answer = client.post("/v1/chat/completions", json=body).raise_for_status()
    usages = [orjson.loads(line[6:]) for line in answer.text.splitlines() if '"usage":{' in line]
    assert usages[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.parametrize(
    ("path", "content", "status", "code"),
    [
        ("/v1/completions", b'{"prompt": "a", "top_p": 7}', 400, None),
        ("/v1/completions", b"no JSON", 400, "invalid_json"),
        ("/v1/completions", b"", 400, "invalid_json"),
        ("/nowhere", b"{}", 404, "not_found"),
        ("/v1/completions", b'{"prompt": "%s"}' % (b"a " * MAX_BODY_BYTES), 400, None),
        ("/v1/completions", b"x" * (17 * 2**20), 413, "body_too_large"),
    ],
    ids=["value", "no JSON", "empty", "path", "cut", "too large"],
)
def test_what_is_wrong_is_said_by_the_replica(
    client: httpx.Client, path: str, content: bytes, status: int, code: str | None
) -> None:
    headers = {"content-type": "application/json"}

    answer = client.post(path, content=content, headers=headers)

    assert answer.status_code == status, answer.text
    assert code in (None, answer.json()["error"]["code"])
    assert answer.headers["x-should-retry"] == "false"


def test_a_body_in_chunks_is_read_and_chosen_by(server: Server, client: httpx.Client) -> None:
    def num_cached_in_chunks(number: int) -> int:
        body = {"prompt": f"in chunks {number}: {WORDS}", "max_tokens": 1}
        content = orjson.dumps(body)
        pieces = (content[start : start + 50] for start in range(0, len(content), 50))
        headers = {"content-type": "application/json"}
        answer = client.post("/v1/completions", content=pieces, headers=headers)
        usage = answer.raise_for_status().json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    until_chosen(server, client, "calm")  # long bodies before count as load for a while
    first = [num_cached_in_chunks(number) for number in MANY]
    again = [num_cached_in_chunks(number) for number in MANY]

    assert not any(first)
    # Where everything is slow a preference may be lost; no more than that.
    assert sum(found > 0 for found in again) > 0.75 * len(MANY)


def test_a_body_that_does_not_come_is_refused_in_our_shape(server: Server) -> None:
    address = urlsplit(server.url)
    with socket.create_connection((str(address.hostname), int(address.port or 0)), 30) as peer:
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"
        peer.sendall(head.encode())
        answer = b""
        while received := peer.recv(65536):
            answer += received

    head, body = answer.decode().split("\r\n\r\n")
    assert head.startswith("HTTP/1.1 408 ")
    assert orjson.loads(body)["error"]["type"] == "timeout_error"


def test_without_the_routing_service_requests_are_answered_and_it_comes_back(
    server: Server, client: httpx.Client
) -> None:
    (service,) = server.pids(ROUTING_SERVICE)
    kill(service, signal.SIGKILL)

    def is_replaced() -> bool:
        num_cached(client, "whoever answers")
        return server.pids(ROUTING_SERVICE) not in ([], [service]) and server.is_settled()

    server.until(is_replaced)
    until_chosen(server, client, "back")


def test_a_routing_service_that_hangs_costs_time_and_no_answer(
    server: Server, client: httpx.Client
) -> None:
    (service,) = server.pids(ROUTING_SERVICE)
    kill(service, signal.SIGSTOP)
    try:
        answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
    finally:
        kill(service, signal.SIGCONT)

    assert answer.status_code == 200


def test_a_death_amid_a_stream_is_no_end_and_what_comes_later_is_answered(
    server: Server, client: httpx.Client
) -> None:
    replicas = server.pids(REPLICA)
    with client.stream("POST", "/v1/completions", json=LONG) as stream:
        pieces = stream.iter_bytes()
        next(pieces)
        for replica in replicas:
            kill(replica, signal.SIGKILL)
        with pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked read"):
            list(pieces)

    refusals: list[httpx.Response] = []

    def is_answered() -> bool:
        answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
        refusals.extend([answer] if answer.is_error else [])
        return answer.is_success

    server.until(is_answered)
    server.until(server.is_settled)
    for refusal in refusals:
        assert refusal.status_code == 503
        assert refusal.json()["error"]["type"] == "overloaded_error"
        assert refusal.headers["x-should-retry"] == "true"
        assert int(refusal.headers["retry-after"]) > 0
    assert not set(replicas) & set(server.pids(REPLICA))
    until_chosen(server, client, "after death")


def test_a_session_is_named_by_the_body_or_a_header_of_ones_own(
    server: Server, client: httpx.Client
) -> None:
    (application,) = server.config["applications"]
    routing = {"policy": "session", "session_header": "x-chat", "max_imbalance": 100}
    args = {**application["args"], "routing": routing}
    before = set(server.pids(REPLICA))
    server.deploy({**server.config, "applications": [{**application, "args": args}]})
    server.until(lambda: server.is_settled() and not before & set(server.pids(REPLICA)))

    def are_kept(tag: str) -> bool:
        first = [num_cached(client, f"{tag} {n} {WORDS}", user=f"user {n}") for n in MANY]
        again = [num_cached(client, f"{tag} {n} {WORDS}", user=f"user {n}") for n in MANY]
        return not any(first) and all(again)

    rounds = iter(range(10_000))
    server.until(lambda: are_kept(f"round {next(rounds)}"))
    for n in MANY:
        for num_before in (0, 1):
            client.headers["x-chat"] = f"chat {n}"
            assert (num_cached(client, f"by header {n} {WORDS}") > 0) == num_before
