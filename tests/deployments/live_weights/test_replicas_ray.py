"""Two replicas in Ray Serve whose weights change together."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import httpx
import pytest

from tests.conftest import TinyCheckpoints
from tests.deployments.applications import deployed, num_running
from tests.deployments.conftest import Cluster
from tests.deployments.test_ray import replica_pid
from tests.engine.live.running import write_negated

pytestmark = pytest.mark.ray
NAME = "live-weights"
BODY = {
    "input_ids": list(range(3, 40)),
    "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True},
}


def answers(client: httpx.Client) -> set[tuple[str, tuple[int, ...]]]:
    """Return the labels and ids of several answers, so that each replica is asked."""
    found = set()
    for _ in range(8):
        answer = client.post("/generate", json=BODY).raise_for_status().json()
        found.add((answer["meta_info"]["weight_version"], tuple(answer["output_ids"])))
    return found


def until_both_run() -> None:
    deadline = time.monotonic() + 120
    while num_running(NAME, "LLMServer") != 2:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_replicas_change_together_and_a_new_one_follows(
    cluster: Cluster, tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    old = tiny_checkpoints("llama")
    new = write_negated(old, tmp_path / "new")
    args = {
        "model": {"path": str(old), "dtype": "float32", "weight_roots": [str(tmp_path)]},
        "engine": {"kv_tokens": 2048, "num_threads": 1, "sleep_mode": True},
        "parallel": {"num_replicas": 2, "cpus_per_rank": 0.1},
    }
    with (
        deployed(NAME, args),
        httpx.Client(base_url=cluster.url(NAME), timeout=httpx.Timeout(120)) as client,
    ):
        until_both_run()
        first = answers(client)
        assert len(first) == 1
        broken = client.post("/update_weights_from_disk", json={"model_path": str(tmp_path)})
        assert broken.status_code == 400
        assert answers(client) == first
        body = {"model_path": str(new), "weight_version": "two"}
        client.post("/update_weights_from_disk", json=body).raise_for_status()
        second = answers(client)
        assert {version for version, _ in second} == {"two"}
        assert len(second | first) == 2

        client.post("/release_memory_occupation").raise_for_status()
        assert {client.post("/generate", json=BODY).status_code for _ in range(6)} == {503}
        client.post("/resume_memory_occupation").raise_for_status()
        assert answers(client) == second

        os.kill(replica_pid(NAME), signal.SIGKILL)
        deadline = time.monotonic() + 120
        while num_running(NAME, "LLMServer") == 2 and time.monotonic() < deadline - 100:
            time.sleep(0.2)  # until Serve knows that it is gone
        until_both_run()
        assert answers(client) == second
