"""Warm-up requests of a replica."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from remora.configs.errors import ConfigError
from remora.configs.load import parse_args
from remora.configs.schema import ServeConfig
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.warm_up import warm_up
from remora.engine.types import Request
from tests.deployments.fakes import FakeServer
from tests.deployments.pooling_replica import replica
from tests.tiny_encoders import make_tiny_encoder


def config(**warmup: Any) -> ServeConfig:
    return parse_args({"model": {"path": "tiny"}, "warmup": warmup})


async def requests_of(**warmup: Any) -> list[Request]:
    server = FakeServer(config=config(**warmup))
    first_token_s = await warm_up(ServerState.over(server), server.config.warmup)
    assert (first_token_s is None) == (not server.client.requests)
    return server.client.requests


@pytest.mark.observes("warmup.enabled")
async def test_a_disabled_warm_up_runs_nothing() -> None:
    assert await requests_of(enabled=False) == []
    assert await requests_of() != []


@pytest.mark.parametrize(
    ("api", "num"),
    [({}, 1), ({"api_key": "env:K"}, 0), ({"api_key": "env:K", "share_prefix_cache": True}, 1)],
)
async def test_task_prompts_are_computed_where_all_keys_find_them(
    api: dict[str, Any], num: int
) -> None:
    args = {"model": {"path": "tiny"}, "api": {"task_prompts": {"sum": "Sum up: "}, **api}}
    server = FakeServer(config=parse_args({**args, "warmup": {"enabled": False}}))
    await warm_up(ServerState.over(server), server.config.warmup)

    assert len(server.client.requests) == num


@pytest.mark.observes("warmup.iterations")
@pytest.mark.parametrize("iterations", [1, 5])
async def test_the_number_of_iterations(iterations: int) -> None:
    assert len(await requests_of(iterations=iterations)) == iterations


@pytest.mark.observes("warmup.inputs")
async def test_the_operators_prompts_are_run() -> None:
    found = await requests_of(inputs=["ab", [99, 100]], iterations=1)

    assert [list(request.prompt_ids) for request in found] == [[97, 98], [99, 100]]


@pytest.mark.observes("warmup.routines")
async def test_each_routine_is_run_once_in_a_pass() -> None:
    routines = ["chat", "grammar", "logprobs", "sample", "generate"]
    found = await requests_of(routines=routines, inputs=["ab"], iterations=1)

    chat, grammar, logprobs, sample, generate = found
    assert "".join(map(chr, chat.prompt_ids)) == "<|user|>ab<|assistant|>"
    assert grammar.grammar is not None
    assert (logprobs.sampling.logprobs, logprobs.sampling.prompt_logprobs) == (5, 5)
    assert sample.sampling.temperature > 0
    assert (generate.sampling.temperature, generate.sampling.logprobs) == (0, None)


async def test_an_unknown_routine_or_token_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"warmup\.routines"):
        config(routines=["compile_deep_gemm"])
    with pytest.raises(ConfigError, match=r"warmup.*99999"):
        await requests_of(inputs=[[99999]])


async def test_pooling_models_compute_the_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny_encoder(tmp_path, "bert")
    warmup: dict[str, Any] = {"inputs": ["fox", [5, 6, 7]], "iterations": 3}
    for given, num_rows in ((warmup, 6), ({}, 2), ({"enabled": False}, 0)):
        async with replica(tmp_path, monkeypatch, warmup=given) as (_, server):
            assert server._served.client.stats().finished_total == num_rows
    for given, message in (({"routines": ["chat"]}, "routines"), ({"inputs": [[99999]]}, "99999")):
        with pytest.raises(ConfigError, match=f"warmup.*{message}"):
            async with replica(tmp_path, monkeypatch, warmup=given):
                pass
