"""Policies over two real replicas: in Serve's own proxy, and behind a gateway."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import pytest

from remora.deployments.app import build
from remora.deployments.routing.ledger import Ledger
from tests.conftest import TinyCheckpoints
from tests.deployments.applications import num_running
from tests.deployments.conftest import Cluster, wait_until_running
from tests.lora.adapters import make_adapter

pytestmark = pytest.mark.ray

SESSIONS, PREFIXES, ADAPTERS = "routed-by-session", "routed-by-prefix", "routed-by-adapter"
ROUTING = {
    SESSIONS: {"policy": "session", "gateway": "off", "stats_period_s": 60},
    PREFIXES: {"policy": "prefix", "stats_period_s": 0.1},
    # Answers come sooner here than reports of them: by load, others would seem less busy.
    ADAPTERS: {"policy": "lora", "max_imbalance": 100, "num_gateways": 2},
}
NAMES = [f"adapter-{n}" for n in range(8)]
WORDS = "the same words for everybody, again and again " * 4


@pytest.fixture(scope="module")
def routed(
    cluster: Cluster, tiny_checkpoints: TinyCheckpoints, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """An application of two replicas for each policy."""
    from ray import serve

    model = tiny_checkpoints("llama")
    adapters = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(NAMES):
        make_adapter(model, adapters / name, seed=seed, r=2, target_modules=["q_proj"])
    entries = [{"name": name, "path": str(adapters / name)} for name in NAMES]
    for name, routing in ROUTING.items():
        application = build(
            {
                "model": {"path": str(model), "served_name": "tiny"},
                "lora": {"adapters": entries if name == ADAPTERS else []},
                "engine": {"kv_tokens": 4096, "num_threads": 1, "page_size": 16},
                "parallel": {"num_replicas": 2, "cpus_per_rank": 0.1},
                "routing": routing,
            }
        )
        serve.run(application, name=name, route_prefix=f"/{name}", blocking=False)
    try:
        wait_until_running(*ROUTING)
        yield cluster
    finally:
        for name in ROUTING:
            serve.delete(name)


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """The different reports of each replica to the handles of this process."""
    found: dict[str, set[str]] = {}
    take_report = Ledger.take_report

    def note(ledger: Ledger, replica: str, stats: Mapping[str, Any]) -> None:
        found.setdefault(replica, set()).add(str(stats))
        take_report(ledger, replica, stats)

    monkeypatch.setattr(Ledger, "take_report", note)
    return found


def replicas_of(name: str) -> list[str]:
    """Return Serve's ids of an application's replicas."""
    from ray.serve.context import _get_global_client

    deployments = _get_global_client().get_serve_details()["applications"][name]["deployments"]
    return [replica["replica_id"] for replica in deployments["LLMServer"]["replicas"]]


def num_cached(url: str, prompt: str, model: str = "tiny", **headers: str) -> int:
    """Return how many tokens of a prompt were found in the cache of the replica that got it."""
    body = {"model": model, "prompt": prompt, "max_tokens": 1}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)
    usage = answer.raise_for_status().json()["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.observes("parallel.num_replicas")
def test_a_session_finds_its_own_pages_and_another_session_does_not_always(
    routed: Cluster,
) -> None:
    url = routed.url(SESSIONS)
    sessions = [{"x-session-id": f"session {n}"} for n in range(16)]

    first = [num_cached(url, WORDS, **session) for session in sessions]
    again = [num_cached(url, WORDS, **session) for session in sessions]

    assert first.count(0) == 2, "a replica computes the prompt once, and both are used"
    assert all(again)


@pytest.mark.observes("routing.policy")
def test_a_prompt_finds_its_own_pages_wherever_they_are(routed: Cluster) -> None:
    url = routed.url(PREFIXES)
    prompts = [f"{n}: {WORDS}" for n in range(12)]

    first = [num_cached(url, prompt) for prompt in prompts]
    again = [num_cached(url, prompt) for prompt in prompts]

    assert not any(first)
    assert all(again)


@pytest.mark.observes("lora.adapters")
def test_an_adapter_finds_its_own_pages_again(routed: Cluster) -> None:
    url = routed.url(ADAPTERS)

    first = [num_cached(url, WORDS, name) for name in NAMES]
    again = [num_cached(url, WORDS, f"tiny:{name}") for name in NAMES]

    assert not any(first), "each adapter has a cache of its own"
    assert all(again)


@pytest.mark.observes("routing.gateway", "routing.num_gateways")
def test_gateways_run_before_the_replicas_as_many_as_are_asked_for(routed: Cluster) -> None:
    from ray import serve

    applications = serve.status().applications

    assert "Gateway" not in applications[SESSIONS].deployments
    assert num_running(PREFIXES, "Gateway") == 1
    assert num_running(ADAPTERS, "Gateway") == 2


@pytest.mark.observes("routing.stats_period_s")
def test_busy_replicas_report_once_in_each_period(
    routed: Cluster, reports: dict[str, set[str]]
) -> None:
    from ray import serve

    seldom, often = replicas_of(SESSIONS), replicas_of(PREFIXES)
    handles = [serve.get_deployment_handle("LLMServer", name) for name in (SESSIONS, PREFIXES)]

    def most(replicas: list[str]) -> int:
        return max(len(reports.get(replica, ())) for replica in replicas)

    deadline = time.monotonic() + 60
    while most(often) < 6:
        assert time.monotonic() < deadline, reports
        for handle in handles:
            handle.completions.remote({"prompt": WORDS, "max_tokens": 1}).result(timeout_s=60)

    assert 1 <= most(seldom) <= 3  # the last one, and those of a period that ends now
