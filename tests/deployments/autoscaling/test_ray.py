"""Replicas that come and go with load, in Ray Serve."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from remora.deployments.autoscaling.explain import explain
from tests.conftest import TinyCheckpoints
from tests.deployments.applications import deployed
from tests.deployments.conftest import Cluster

pytestmark = pytest.mark.ray

DEADLINE_S = 90.0


class Scaled:
    """An application of one or two tiny replicas."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.statuses: list[int] = []
        self._is_loaded = threading.Event()

    def explain(self) -> dict[str, Any]:
        response = httpx.get(f"{self.url}/autoscaling/explain", timeout=30)
        found: dict[str, Any] = response.json()
        return found if response.status_code == 200 else {"replicas": {}}

    def wait_for(self, **replicas: int) -> dict[str, Any]:
        """Wait until there are so many replicas; return what is said of them then."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            record = self.explain()
            if replicas.items() <= record["replicas"].items():
                return record
            time.sleep(0.2)
        pytest.fail(f"no {replicas} after {DEADLINE_S} s: {record}")

    def ask(self, max_tokens: int = 300) -> None:
        body = {"prompt": "hello", "max_tokens": max_tokens, "ignore_eos": True}
        response = httpx.post(f"{self.url}/v1/completions", json=body, timeout=DEADLINE_S)
        self.statuses.append(response.status_code)

    def load(self) -> list[threading.Thread]:
        """Keep six requests running until `rest`."""
        self._is_loaded.set()
        threads = [threading.Thread(target=self._keep_asking) for _ in range(6)]
        for thread in threads:
            thread.start()
        return threads

    def _keep_asking(self) -> None:
        while self._is_loaded.is_set():
            self.ask()

    def rest(self, threads: list[threading.Thread]) -> None:
        self._is_loaded.clear()
        for thread in threads:
            thread.join()


@contextmanager
def scaled_app(
    cluster: Cluster, path: Path, *, name: str, autoscaling: dict[str, Any]
) -> Iterator[Scaled]:
    """Run an application of tiny replicas."""
    args = {
        "model": {"path": str(path), "served_name": "tiny"},
        "engine": {"kv_tokens": 8192, "num_threads": 1, "max_running_requests": 4},
        "parallel": {"cpus_per_rank": 0.1},
        "autoscaling": {"target_requests": 2, "look_back_s": 2, **autoscaling},
    }
    with deployed(name, args):
        yield Scaled(cluster.url(name))


@pytest.mark.observes("autoscaling.max_replicas")
def test_load_brings_a_second_replica_and_rest_takes_it_away(
    cluster: Cluster, tiny_checkpoints: TinyCheckpoints
) -> None:
    path, section = tiny_checkpoints("llama"), {"max_replicas": 2}
    delays = {"upscale_delay_s": 0.5, "downscale_delay_s": 2}
    with scaled_app(cluster, path, name="scaled", autoscaling=section | delays) as scaled:
        scaled.wait_for(target=1, ready=1)
        threads = scaled.load()
        try:
            loaded = scaled.wait_for(target=2, ready=2)
        finally:
            scaled.rest(threads)
        rested = scaled.wait_for(target=1, ready=1)

    assert loaded["history"][-1]["reason"] == "more were wanted long enough (requests)"
    assert set(loaded["reports"]) >= set(rested["reports"])
    assert [(change["from"], change["to"]) for change in rested["history"]] == [(1, 2), (2, 1)]
    assert set(scaled.statuses) == {200}
    assert explain("scaled", "LLMServer") is None


@pytest.mark.observes("autoscaling.min_replicas", "autoscaling.initial_replicas")
def test_the_first_request_brings_a_replica_and_silence_takes_it_away(
    cluster: Cluster, tiny_checkpoints: TinyCheckpoints
) -> None:
    section = {"min_replicas": 0, "initial_replicas": 1, "max_replicas": 1, "to_zero_delay_s": 2}
    with scaled_app(cluster, tiny_checkpoints("llama"), name="zero", autoscaling=section) as scaled:
        scaled.wait_for(target=0, ready=0)  # the initial replica may rest before it is seen
        scaled.ask(max_tokens=8)
        scaled.wait_for(target=1, ready=1)
        rested = scaled.wait_for(target=0, ready=0)

    assert scaled.statuses == [200]
    assert [(change["from"], change["to"]) for change in rested["history"]] == [
        (1, 0),
        (0, 1),
        (1, 0),
    ]
