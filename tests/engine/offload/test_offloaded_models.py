"""Models with weights in host memory: what is on the device, and the same tokens as without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from remora.configs.errors import ConfigError
from remora.configs.planning.offload_plan import OffloadPlan
from remora.engine.models.decoder import DecoderModel
from remora.engine.offload.blocks import check_host_memory, offload
from remora.engine.offload.fetcher import LayerFetcher
from remora.engine.offload.streams import HostCopies
from tests.conftest import TinyCheckpoints
from tests.engine.attention.test_triton_backend import ROOM, Updates
from tests.engine.fakes import make_plan
from tests.engine.graphs.device_runs import Rerun, Run, run
from tests.engine.graphs.test_device_forward import make_requests
from tests.engine.loaded import load_f32
from tests.engine.offload.plans import offloaded
from tests.engine.offload.simulated import CPU, LateCopies
from tests.engine.weights.formats.checkpoints import quantise
from tests.engine.weights.formats.writers import SAMPLES, small

FAMILIES = ["llama-bias", "qwen3", "mixtral", "deepseek-v3", "qwen2-moe", "gpt-oss"]
REQUESTS = make_requests(max_tokens=6, logprobs=1)


class Offloading:
    """Moves layers of a model that is loaded; `adapt` of an engine's run."""

    def __init__(self, plan: OffloadPlan, streams: HostCopies) -> None:
        self.plan, self.streams = plan, streams
        self.fetcher: LayerFetcher | None = None

    def __call__(self, model: DecoderModel) -> None:
        self.fetcher = offload(model, self.plan, self.streams)
        assert self.fetcher is not None
        for buffer in self.fetcher.buffers:
            buffer.fill_(0xFF)  # not a number, in every format of floats


def check_same(got: Run, expected: Run) -> None:
    assert got.token_ids() == expected.token_ids()
    assert got.logprobs() == expected.logprobs()


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("streams", [HostCopies(CPU), LateCopies()], ids=["at once", "late"])
def test_tokens_and_logprobs_are_the_same_when_copies_are_early_or_late(
    streams: HostCopies, prefetch: int, tiny_checkpoints: TinyCheckpoints
) -> None:
    path = tiny_checkpoints("llama", num_hidden_layers=5)
    graph_runner = Rerun()
    adapt = Offloading(offloaded(0, 1, 3, 4, prefetch=prefetch), streams)

    got = run(path, REQUESTS, graph_runner=graph_runner, overlap=True, adapt=adapt)

    check_same(got, run(path, REQUESTS, graph_runner=Rerun(), overlap=True))
    assert graph_runner.num_replayed > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, tiny_checkpoints: TinyCheckpoints) -> None:
    path = tiny_checkpoints(family)
    adapt = Offloading(offloaded(1, 2), LateCopies())

    got = run(path, REQUESTS, graph_runner=Rerun(), adapt=adapt)

    check_same(got, run(path, REQUESTS, graph_runner=Rerun()))


@pytest.mark.parametrize("name", ["awq", "gptq-act-order", "ct-int8", "fp8-tensor", "ct-mxfp4"])
def test_quantised_weights(name: str, tiny_checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    linears = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    path = tiny_checkpoints("llama", num_hidden_layers=2, intermediate_size=192)
    torch.manual_seed(0)
    quantised, _ = quantise(path, tmp_path, small(SAMPLES[name]), linears)
    adapt = Offloading(offloaded(0, 1), LateCopies())

    got = run(quantised, REQUESTS, held="stored", graph_runner=Rerun(), adapt=adapt)

    check_same(got, run(quantised, REQUESTS, held="stored", graph_runner=Rerun()))


def test_quantised_experts(tiny_checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    path = tiny_checkpoints("mixtral", num_hidden_layers=2, intermediate_size=96)
    torch.manual_seed(0)
    quantised, _ = quantise(path, tmp_path, small(SAMPLES["awq"]), (".w1", ".w2", ".w3"))
    adapt = Offloading(offloaded(0, 1), LateCopies())

    got = run(quantised, REQUESTS, held="stored", graph_runner=Rerun(), adapt=adapt)

    check_same(got, run(quantised, REQUESTS, held="stored", graph_runner=Rerun()))


def test_adapters_stay_on_the_device(tiny_checkpoints: TinyCheckpoints) -> None:
    path = tiny_checkpoints("llama")
    options: dict[str, Any] = {"room": ROOM, "adapters": {"r0": 1, "r2": 4}}
    offloading = Offloading(offloaded(0, 1, 2), LateCopies())

    def adapt(model: DecoderModel) -> Updates:
        offloading(model)
        return Updates.of(model)

    got = run(path, REQUESTS, graph_runner=Rerun(), adapt=adapt, **options)

    expected = run(path, REQUESTS, graph_runner=Rerun(), adapt=Updates.of, **options)
    check_same(got, expected)
    assert expected.token_ids() != run(path, REQUESTS).token_ids()


def test_drafts_of_a_draft_model(tiny_checkpoints: TinyCheckpoints) -> None:
    path = tiny_checkpoints("llama")
    requests = make_requests(max_tokens=6)
    adapt = Offloading(offloaded(0, 1, 2), LateCopies())

    got = run(path, requests, draft=path, graph_runner=Rerun(), adapt=adapt)

    expected = run(path, requests, draft=path, graph_runner=Rerun())
    assert got.token_ids() == expected.token_ids()
    assert got.num_right == expected.num_right > 0


def test_a_step_copies_each_offloaded_layer_once(tiny_checkpoints: TinyCheckpoints) -> None:
    path, streams = tiny_checkpoints("llama"), LateCopies()

    got = run(path, make_requests(max_tokens=3), adapt=Offloading(offloaded(0, 2), streams))

    assert streams.num_copies == 2 * got.num_steps


def large_weights(model: DecoderModel, *layers: int) -> list[torch.Tensor]:
    """Return the tensors of the large weights of layers."""
    return [
        tensor
        for layer in layers
        for holder in model.blocks[layer].weight_holders()
        for tensor in holder.weight_tensors()
    ]


def storages(model: DecoderModel, *layers: int) -> dict[int, int]:
    """Return address and size of the storages of the large weights of layers."""
    found = [tensor.untyped_storage() for tensor in large_weights(model, *layers)]
    return {storage.data_ptr(): storage.nbytes() for storage in found}


@pytest.mark.parametrize("family", ["llama", "mixtral", "deepseek-v3"])
def test_the_device_holds_buffers_in_the_place_of_weights(
    family: str, tiny_checkpoints: TinyCheckpoints
) -> None:
    plain = load_f32(tiny_checkpoints(family, num_hidden_layers=4))
    model = load_f32(tiny_checkpoints(family, num_hidden_layers=4))
    pinned: list[int] = []

    class Counted(HostCopies):
        def pinned(self, num_bytes: int) -> torch.Tensor:
            pinned.append(num_bytes)
            return super().pinned(num_bytes)

    fetcher = offload(model, offloaded(1, 2, 3, prefetch=2), Counted(CPU))

    assert fetcher is not None
    layer_bytes = [sum(each.nbytes for each in large_weights(plain, n)) for n in (1, 2, 3)]
    buffers = {buffer.data_ptr(): len(buffer) for buffer in fetcher.buffers}
    assert storages(model, 1, 2, 3) == buffers
    assert storages(model, 0).keys().isdisjoint(buffers)
    assert len(buffers) == 2
    slack = 256 * 20  # alignment of each tensor
    for size in buffers.values():
        assert max(layer_bytes) <= size <= max(layer_bytes) + slack
    assert sum(layer_bytes) <= sum(pinned) <= sum(layer_bytes) + 3 * slack


@pytest.mark.parametrize("family", ["llama", "mixtral", "deepseek-v3"])
def test_offloaded_weights_are_never_allocated_on_the_device(
    family: str, tiny_checkpoints: TinyCheckpoints
) -> None:
    config = load_f32(tiny_checkpoints(family)).config
    model = DecoderModel(config, dtype=torch.float32, device="meta")

    model.load_on_host({1, 7})

    for layer in range(len(model.blocks)):
        devices = {each.device.type for each in large_weights(model, layer)}
        assert devices == {"cpu" if layer == 1 else "meta"}
    on_host = [n for n, shard in model.tensors().items() if shard.memory.device.type == "cpu"]
    assert on_host
    assert all(name.startswith("model.layers.1.") for name in on_host)
    assert not any("norm" in name or "mlp.gate." in name for name in on_host)


def test_weights_beyond_the_free_host_memory_are_refused_before_they_are_read() -> None:
    plan = make_plan(offload=offloaded(1, 2, host_bytes=2**30))

    check_host_memory(plan, lambda: 2**30)
    check_host_memory(make_plan(), lambda: 0)
    with pytest.raises(ConfigError, match=r"2 layers need 1 GiB .* and 512 MiB are free"):
        check_host_memory(plan, lambda: 2**29)
