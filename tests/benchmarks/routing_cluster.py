"""A Ray of its own with replicas of a small random model, for the routing benchmarks."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from remora.deployments.free_ports import free_port

os.environ["RAY_AUTH_MODE"] = "token"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

START_TIMEOUT_S = 240.0
TIMEOUT = httpx.Timeout(300)
NAME = "routed"


@dataclass(frozen=True, slots=True)
class Answered:
    """What a client sees of one streamed completion."""

    text: str
    first_token_s: float
    num_prompt: int
    num_cached: int


@contextmanager
def ray_serve(num_cpus: int = 4) -> Iterator[int]:
    """Start Ray Serve at a free port; yields the port."""
    import ray
    from ray import serve

    port = free_port()
    ray.init(
        address="local",
        namespace="serve",
        num_cpus=num_cpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield port
    finally:
        serve.shutdown()
        ray.shutdown()


@contextmanager
def replicas(
    checkpoint: Path, count: int, *, kv_tokens: int = 32_768, **routing: Any
) -> Iterator[None]:
    """Serve `count` replicas under a policy while the block runs."""
    from ray import serve

    from remora.deployments.app import build

    application = build(
        {
            "model": {"path": str(checkpoint), "served_name": "tiny", "dtype": "float32"},
            "engine": {"kv_tokens": kv_tokens, "num_threads": 1},
            "parallel": {"num_replicas": count, "cpus_per_rank": 0.1},
            "routing": routing,
        }
    )
    serve.run(application, name=NAME, route_prefix="/", blocking=False)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while serve.status().applications[NAME].status != "RUNNING":
            if time.monotonic() > deadline:
                raise SystemExit(f"not running after {START_TIMEOUT_S} s: {serve.status()}")
            time.sleep(0.2)
        yield
    finally:
        serve.delete(NAME)


@contextmanager
def checkpoint(**overrides: Any) -> Iterator[Path]:
    """Write a random model that is slow enough for queues to form."""
    from tests.tiny_models import make_tiny_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        sizes = {
            "hidden_size": 256,
            "intermediate_size": 768,
            "num_hidden_layers": 6,
            "head_dim": 32,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "max_position_embeddings": 8192,
        }
        yield make_tiny_checkpoint(Path(folder) / "model", "llama", **sizes | overrides)


async def complete(
    client: httpx.AsyncClient, prompt: str, num_output: int, **fields: Any
) -> Answered:
    """Stream one completion."""
    body = {
        "prompt": prompt,
        "max_tokens": num_output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }
    started = time.perf_counter()
    first_token_s, text = 0.0, ""
    usage: dict[str, Any] = {}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if chunk["choices"]:
                first_token_s = first_token_s or time.perf_counter() - started
                text += chunk["choices"][0]["text"]
            usage = chunk.get("usage") or usage
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Answered(text, first_token_s, usage["prompt_tokens"], cached)


def quantile(values: list[float], share: float) -> float:
    """Return the value that `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
