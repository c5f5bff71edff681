"""Policies over two real replicas: in Serve's own proxy, and behind a gateway."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from remora.deployments.app import build
from tests.conftest import TinyCheckpoints
from tests.deployments.conftest import Cluster, wait_until_running
from tests.lora.adapters import make_adapter

pytestmark = pytest.mark.ray

SESSIONS, PREFIXES, ADAPTERS = "routed-by-session", "routed-by-prefix", "routed-by-adapter"
ROUTING = {
    SESSIONS: {"policy": "session", "gateway": "off"},
    PREFIXES: {"policy": "prefix"},
    # Answers come sooner here than reports of them: by load, others would seem less busy.
    ADAPTERS: {"policy": "lora", "max_imbalance": 100},
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
