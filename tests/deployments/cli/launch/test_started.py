"""Launch commands of other servers' documentation start, and answer a request.

Tiny random models stand in for the models that they name. Each runs with the configuration that
`remora serve` would deploy, made small for the tests' machine: see `CPU`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub import constants

from remora.configs.errors import ConfigError
from remora.configs.serve_file import our_application
from remora.deployments import serve_context
from remora.deployments.cli.serve import serve_config
from remora.deployments.llm_server import LLMServer
from remora.engine.weights import resolve_model as resolver
from tests.configs.dialects.launch_commands import COMMANDS, FILES, FURTHER, Launch
from tests.deployments.cli.launch.stand_ins import (
    IDS,
    MODELS,
    architecture_of,
    put,
    tokens_of,
)
from tests.deployments.fakes import client_of

pytestmark = pytest.mark.slow
# What the machine of the tests lacks: GPUs and memory. One rank and one replica in this process.
CPU: dict[str, dict[str, Any]] = {
    "engine": {"kv_tokens": 140_000, "num_threads": 1},
    "parallel": {"tp_size": 1, "pp_size": 1},
}
ACCEPTED = [
    launch
    for launch in (*COMMANDS, *FURTHER)
    if not launch.refused and "ADAPTER" not in launch.text
]


def number(launch: Launch) -> str:
    return launch.source.rpartition("/")[2]


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(resolver, "_resolved", {})
    monkeypatch.setattr(serve_context, "log_through_serve", lambda: None)


@asynccontextmanager
async def started(args: dict[str, Any]) -> AsyncGenerator[httpx.AsyncClient, None]:
    """Start what `remora serve` would deploy, in this process and on its CPU."""
    for section, keys in CPU.items():
        args[section] = args.get(section, {}) | keys
    for size in ("kv_memory", "total_mem_fraction"):
        args["engine"].pop(size, None)
    server = LLMServer.__new__(LLMServer)
    await server.__init__(args)  # type: ignore[misc]
    try:
        async with client_of(server.__serve_build_asgi_app__()) as client:
            yield client
    finally:
        server.__del__()


@pytest.mark.parametrize("launch", [one for one in ACCEPTED if not one.stops], ids=number)
async def test_a_command_of_vllm_starts_and_answers(launch: Launch, tmp_path: Path) -> None:
    stand_in = MODELS[launch.model]
    put(launch.model, stand_in, tmp_path)

    async with started(args_of(launch, tmp_path)) as client:
        models = (await client.get("/v1/models")).json()["data"]
        body: dict[str, Any] = {"model": models[0]["id"], "max_tokens": 4, "temperature": 0}
        if stand_in.is_instruct:
            messages = [{"role": "user", "content": "What is the capital of France?"}]
            answer = await client.post("/v1/chat/completions", json=body | {"messages": messages})
        else:
            answer = await client.post("/v1/completions", json=body | {"prompt": "The capital"})

    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] >= 1


def args_of(launch: Launch, folder: Path) -> dict[str, Any]:
    """Return the configuration of a command."""
    raw = serve_config(tokens_of(launch, folder), dialect="vllm")
    args: dict[str, Any] = our_application(raw)["args"]
    return args


@pytest.mark.parametrize("launch", [one for one in ACCEPTED if one.stops], ids=number)
async def test_what_a_command_lacks_is_named(launch: Launch, tmp_path: Path) -> None:
    put(launch.model, MODELS[launch.model], tmp_path)

    with pytest.raises(ConfigError) as refused:
        async with started(args_of(launch, tmp_path)):
            pass

    assert launch.stops in str(refused.value)


async def test_what_a_file_lacks_is_named(tmp_path: Path) -> None:
    (launch,) = (launch for launch in FILES if launch.stops)
    (name,) = (name for name in IDS if name in launch.text)
    model = IDS[name].make(tmp_path / "model")
    (tmp_path / "serve.yaml").write_text(launch.text.replace("MODEL", str(model)))
    args = our_application(serve_config(["serve.yaml"]))["args"]

    with pytest.raises(ConfigError) as refused:
        async with started(args):
            pass

    assert launch.stops in str(refused.value)


def test_twelve_architectures_start(tmp_path: Path) -> None:
    names = {one.model for one in ACCEPTED if not one.stops} - {"./Qwen3-0.6B-Q4_K_M.gguf"}
    makers = [MODELS[name].make for name in names] + [IDS["qwen-0.5b"].make]
    found = {
        architecture_of(make(tmp_path / str(number))) for number, make in enumerate(makers)
    } | {"Qwen3ForCausalLM"}  # the GGUF file's
    assert len(found) >= 12
