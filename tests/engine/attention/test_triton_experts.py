"""Engines with experts and latents on triton's kernels, which are interpreted, against torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from remora.engine.attention.latent import PagedLatents
from remora.engine.attention.torch_backend import TorchAttention
from remora.engine.layers.experts import Experts
from remora.engine.models.config import ExpertsConfig
from remora.engine.protocols import AttentionBackend
from remora.engine.types import SamplingParams
from remora.kernels.moe_rules import Routing
from tests.conftest import TinyCheckpoints
from tests.engine.graphs.device_runs import Rerun, run
from tests.engine.models.test_parity import make_prompts
from tests.kernels.gpu.devices import interpreted_only
from tests.kernels.gpu.interpreter import quicken
from tests.tiny_experts import LATENTS

pytestmark = interpreted_only

GREEDY = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, logprobs=0)
SMALL = {
    "deepseek-v3": {"num_attention_heads": 2, "first_k_dense_replace": 0},
    "qwen3-moe": {"decoder_sparse_step": 1},
}
REQUESTS = {str(number): (ids, GREEDY) for number, ids in enumerate(make_prompts([2, 5, 9]))}


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Let experts and attention to latents on a CPU be triton's until `monkeypatch` undoes it."""
    pytest.importorskip("triton")
    from remora.kernels.gpu.attention import mla as latent_kernels

    quicken(monkeypatch)
    few = latent_kernels.LatentLaunch(queries=32, keys=32, num_warps=4, num_stages=2, programs=4)
    monkeypatch.setattr(latent_kernels, "launch_of", lambda *shape: few)
    for module in ("moe", "moe_routing", "attention.mla"):
        monkeypatch.setattr(f"remora.kernels.{module}.by_triton", lambda device: True)
    with np.errstate(all="ignore"):
        yield monkeypatch


def make_pages(**shape: Any) -> AttentionBackend:
    """Make what the family needs: one KV head is one of latents here."""
    if shape.pop("num_kv_heads") == 1:
        size: int = LATENTS["kv_lora_rank"]
        return PagedLatents(row_size=shape.pop("head_dim"), latent_size=size, **shape)
    return TorchAttention(num_kv_heads=2, **shape)


@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss", "deepseek-v3"])
def test_recorded_steps_and_chunks(
    family: str, tiny_checkpoints: TinyCheckpoints, interpreted: pytest.MonkeyPatch
) -> None:
    """More requests than rows, prompts in chunks, decode steps padded to what was recorded."""
    path = tiny_checkpoints(family, **{"num_hidden_layers": 1, **SMALL.get(family, {})})
    graph_runner = Rerun()
    options: dict[str, Any] = {"max_running_requests": 2, "max_step_tokens": 10}

    got = run(
        path,
        REQUESTS,
        make_attention=make_pages,
        graph_runner=graph_runner,
        overlap=True,
        **options,
    )
    interpreted.undo()

    expected = run(path, REQUESTS, forward="eager", make_attention=make_pages, **options)
    assert graph_runner.num_replayed > 0
    assert got.token_ids() == expected.token_ids()
    for key, values in expected.logprobs().items():
        assert got.logprobs()[key] == pytest.approx(values, abs=1e-4)


def test_a_row_is_the_same_bits_in_any_company(interpreted: pytest.MonkeyPatch) -> None:
    """With what `engine.deterministic` brings about."""
    interpreted.setattr("remora.kernels.linear_invariant.by_triton", lambda device: True)
    config = ExpertsConfig(num_experts=2, size=24, routing=Routing(top_k=1), correction=True)
    layer = Experts(config, 40, dtype=torch.bfloat16, device="cpu")
    for shard in dict(layer.tensors("")).values():
        shard.memory.normal_(0.0, 0.2)
    layer.make_invariant()
    rows = torch.randn(70, 40).to(torch.bfloat16)

    together = layer(rows)

    assert torch.equal(together[:1], layer(rows[:1]))
    assert torch.equal(together[5:9], layer(rows[5:9]))
