"""Start-up of an engine that offloads weights, with a CPU in the device's place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from remora.configs.load import parse_args
from remora.configs.planning.plan import EnginePlan
from remora.engine import launch
from remora.engine.launch import BuiltEngine, build_engine
from remora.engine.models.decoder import DecoderModel
from tests.conftest import TinyCheckpoints
from tests.engine.fakes import make_request
from tests.engine.offload.plans import offloaded

SMALL = {"max_running_requests": 2, "max_step_tokens": 8}  # of a start's warm-up
GREEDY: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}


def generated(built: BuiltEngine) -> list[int]:
    from remora.engine.types import SamplingParams

    built.engine.add(make_request("r", list(range(10, 30)), SamplingParams(**GREEDY)))
    found: list[int] = []
    while built.engine.has_work:
        found += [token for output in built.engine.step() for token in output.token_ids]
    built.engine.close()
    return found


def test_layers_are_loaded_on_the_host_and_fetched(
    tiny_checkpoints: TinyCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another name of the CPU, which start-up treats as a device that is none."""
    config = parse_args(
        {
            "model": {"path": str(tiny_checkpoints("llama")), "dtype": "float32"},
            "engine": {"device": "cpu", "cpu_kernels": "torch", "kv_tokens": 64, **SMALL},
        }
    )
    expected = generated(build_engine(config, show_progress=False))
    made = launch._plan
    moved: list[set[int]] = []
    load_on_host = DecoderModel.load_on_host

    def planned(*args: Any) -> EnginePlan:
        return replace(made(*args), device="cpu:0", offload=offloaded(0, 2))

    def noting(model: DecoderModel, layers: Any) -> None:
        moved.append(set(layers))
        load_on_host(model, layers)

    monkeypatch.setattr(launch, "_plan", planned)
    monkeypatch.setattr(DecoderModel, "load_on_host", noting)
    built = build_engine(config, show_progress=False)

    assert {0, 2} in moved
    assert "weights of 2 layers in host memory" in built.kernels
    assert generated(built) == expected
