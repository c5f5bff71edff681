"""Launch commands and files that need Ray start, and answer: adapters, several models, ranks."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from remora.configs.serve_file import our_application
from remora.deployments.cli.serve import serve_config
from remora.deployments.free_ports import free_port
from tests.configs.dialects.launch_commands import COMMANDS, FILES, Launch
from tests.deployments.applications import deployed
from tests.deployments.cli.launch.stand_ins import (
    IDS,
    MODELS,
    architecture_of,
    put,
    tokens_of,
)
from tests.deployments.cli.test_serve_process import until_ready
from tests.deployments.conftest import Cluster
from tests.lora.adapters import ATTENTION, make_adapter

pytestmark = [pytest.mark.slow, pytest.mark.ray]
SMALL = ("engine.kv_tokens=16384", "engine.num_threads=1", "parallel.cpus_per_rank=0.1")
PLAIN, DETAILED = (launch for launch in COMMANDS if "ADAPTER" in launch.text)
CODER = COMMANDS[0]


def ask(url: str, model: str) -> str:
    """Return the model that answers a prompt."""
    body = {"model": model, "prompt": "The capital", "max_tokens": 4, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] >= 1
    return str(answer.json()["model"])


@contextmanager
def served(arguments: list[str], folder: Path) -> Iterator[str]:
    """Run `remora serve`; yields its address."""
    port = free_port()
    environment = {**os.environ, "HF_HUB_CACHE": str(folder / "hub"), "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        [
            str(Path(sys.executable).with_name("remora")),
            "serve",
            *("--port", str(port)),
            *arguments,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=environment,
        cwd=folder,
    )
    try:
        until_ready(process, f"http://127.0.0.1:{port}", 240)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=90)


def options(*more: str) -> list[str]:
    return [token for setting in (*SMALL, *more) for token in ("--set", setting)]


def test_a_command_with_an_adapter_is_served(tmp_path: Path) -> None:
    put(DETAILED.model, MODELS[DETAILED.model], tmp_path)
    tokens = tokens_of(DETAILED, tmp_path)
    with served([*options(), "--dialect", "vllm", "--", *tokens], tmp_path) as url:
        assert ask(url, "sql-lora") == "sql-lora"
        assert ask(url, DETAILED.model) == DETAILED.model


def test_a_command_with_ranks_is_served(tmp_path: Path) -> None:
    """Two ranks instead of eight: the stand-in has two K/V heads."""
    put(CODER.model, MODELS[CODER.model], tmp_path)
    settings = options("parallel.tp_size=2", "model.context_length=4096")
    tokens = tokens_of(CODER, tmp_path)
    with served([*settings, "--dialect", "vllm", "--", *tokens], tmp_path) as url:
        assert ask(url, CODER.model) == CODER.model


def with_models(launch: Launch, folder: Path) -> dict[str, Any]:
    """Return a file whose models are stand-ins, and whose GPUs are not asked for."""
    text = launch.text.replace("s3://my_dynamic_lora_path", str(folder / "adapters"))
    file: dict[str, Any] = yaml.safe_load(text)
    app = file["applications"][0]["args"] if "applications" in file else file
    for model in app.get("llm_configs", [app]):
        model.pop("accelerator_type", None)
        name = model["model_loading_config"]["model_id"]
        path = IDS[name].make(folder / name)
        model["model_loading_config"]["model_source"] = str(path)
        kwargs = model.setdefault("engine_kwargs", {})
        kwargs.pop("gpu_memory_utilization", None)
        kwargs["num_gpu_blocks_override"] = 512
        model.setdefault("deployment_config", {})["ray_actor_options"] = {"num_cpus": 0.1}
        if "lora_config" in model:
            make_adapter(path, folder / "adapters" / "sql", r=8, target_modules=ATTENTION)
    return file


def test_a_file_with_two_models_is_served(tmp_path: Path) -> None:
    file = with_models(FILES[0], tmp_path)
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(file))
    with served(["serve.yaml"], tmp_path) as url:
        assert ask(url, "qwen-0.5b") == "qwen-0.5b"
        assert ask(url, "qwen-1.5b") == "qwen-1.5b"


FILES_HERE = [launch for launch in FILES[1:] if not (launch.refused or launch.stops)]


@pytest.mark.parametrize("launch", FILES_HERE, ids=lambda launch: Path(launch.source).name)
def test_a_file_with_one_model_is_deployed(
    launch: Launch, cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "llm.yaml").write_text(yaml.safe_dump(with_models(launch, tmp_path)))
    raw = serve_config([str(tmp_path / "llm.yaml")], dialect="ray_serve_llm")
    args = small(our_application(raw)["args"])
    with deployed("launched", args):
        models = httpx.get(f"{cluster.url('launched')}/v1/models").json()["data"]
        assert ask(cluster.url("launched"), models[0]["id"]) in launch.text
        if "lora_config" in launch.text:
            assert ask(cluster.url("launched"), "sql") == "sql"


def test_a_command_with_a_plain_adapter_is_deployed(cluster: Cluster, tmp_path: Path) -> None:
    """The processes of the shared Ray have another cache, so the model is named by its folder."""
    put(PLAIN.model, MODELS[PLAIN.model], tmp_path)
    tokens = tokens_of(PLAIN, tmp_path)
    folder = tmp_path / "hub" / f"models--{PLAIN.model.replace('/', '--')}" / "made"
    assert architecture_of(folder) == "LlamaForCausalLM"
    tokens = shlex.split(shlex.join(tokens).replace(PLAIN.model, str(folder)))
    args = small(our_application(serve_config(tokens, dialect="vllm"))["args"])
    with deployed("launched", args):
        assert ask(cluster.url("launched"), "sql-lora") == "sql-lora"


def small(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return an application for the CPUs of the shared Ray."""
    sections = {name: dict(keys) for name, keys in args.items()}
    sections.setdefault("engine", {})["num_threads"] = 1
    sections["engine"].setdefault("kv_tokens", 16_384)
    sections.setdefault("parallel", {})["cpus_per_rank"] = 0.1
    return sections
