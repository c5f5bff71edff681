"""Whole engines on triton's kernels, which are interpreted, against torch's operations."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from remora.configs.errors import ConfigError
from remora.configs.load import parse_args
from remora.configs.planning.device_plan import DevicePlan, plan_device
from remora.configs.planning.lora_slots import LoRASlotConfig
from remora.engine.attention.torch_backend import TorchAttention
from remora.engine.attention.triton_backend import TritonAttention
from remora.engine.layers.embedding import Embedding
from remora.engine.layers.linear import Linear
from remora.engine.models.decoder import DecoderModel
from remora.engine.runner.device import make_attention, make_forward, split_options
from remora.engine.types import SamplingParams
from remora.kernels.attention.decode import attend_decode_paged, attend_decode_paged_reference
from remora.kernels.gpu.attention import decode as attention_kernels
from remora.kernels.linear_invariant import linear_invariant
from remora.kernels.lora import LowRankSlots
from tests.conftest import TinyCheckpoints
from tests.engine.fakes import make_plan
from tests.engine.graphs.device_runs import Requests, Rerun, Run, run
from tests.engine.loaded import load_f32
from tests.kernels.gpu.devices import interpreted_only
from tests.kernels.gpu.interpreter import quicken
from tests.kernels.gpu.paged import launch_few_programs, make_paged

pytestmark = interpreted_only


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Let attention of tensors of a CPU be triton's until `monkeypatch` undoes it."""
    pytest.importorskip("triton")
    quicken(monkeypatch)
    launch_few_programs(monkeypatch)
    for module in ("decode", "prefill"):
        monkeypatch.setattr(f"remora.kernels.attention.{module}.by_triton", lambda device: True)
    with np.errstate(all="ignore"):
        yield monkeypatch


@pytest.fixture
def all_interpreted(interpreted: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Let everything that has a kernel be triton's, which takes long."""
    interpreted.setattr("remora.kernels.dispatch.TRITON_DEVICES", frozenset({"cpu"}))
    return interpreted


@pytest.fixture(scope="module")
def tiny(tiny_checkpoints: TinyCheckpoints) -> Path:
    return tiny_checkpoints("llama", num_hidden_layers=1)


def make_requests(lengths: list[int], **changes: Any) -> Requests:
    numbers = random.Random(0)
    values: dict[str, Any] = {"max_tokens": 5, "temperature": 0.0, "ignore_eos": True} | changes
    return {
        f"r{number}": (
            [numbers.randrange(10, 250) for _ in range(length)],
            SamplingParams(**values),
        )
        for number, length in enumerate(lengths)
    }


def compare(path: Path, requests: Requests, patch: pytest.MonkeyPatch, **options: Any) -> Run:
    """Run on triton's kernels, then as torch's operations; all tokens must be the same."""
    got = run(path, requests, make_attention=TritonAttention, **options)
    patch.undo()
    as_a_device = {"graph_runner", "overlap", "how"}
    options = {key: value for key, value in options.items() if key not in as_a_device}
    expected = run(path, requests, forward="eager", **options)
    assert got.token_ids() == expected.token_ids()
    assert got.ends() == expected.ends()
    for key, values in expected.logprobs().items():
        assert got.logprobs()[key] == pytest.approx(values, abs=1e-4)
    return got


def test_a_prompt_and_what_follows(tiny: Path, all_interpreted: pytest.MonkeyPatch) -> None:
    """In one chunk, then a token at a time."""
    requests = make_requests([9], max_tokens=3)

    compare(tiny, requests, all_interpreted, max_step_tokens=64, prefill_chunk_tokens=64)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_chunks_beside_rows_that_decode(
    family: str, tiny_checkpoints: TinyCheckpoints, interpreted: pytest.MonkeyPatch
) -> None:
    """More requests than rows, prompts in chunks; windows, or norms of heads, in some families."""
    path = tiny_checkpoints(family, num_hidden_layers=1)
    requests = make_requests([1, 9, 30, 3, 17])

    compare(path, requests, interpreted, max_running_requests=3, max_step_tokens=12)


def test_steps_that_are_recorded_and_overlap(tiny: Path, interpreted: pytest.MonkeyPatch) -> None:
    """Padded to sizes that were recorded; what a step's tokens are, only the device knows."""
    graph_runner = Rerun()

    compare(tiny, make_requests([2, 9, 5]), interpreted, graph_runner=graph_runner, overlap=True)

    assert graph_runner.num_replayed > 0


def test_steps_with_prompts_that_are_recorded(tiny: Path, interpreted: pytest.MonkeyPatch) -> None:
    """The decode kernel's rows of length 0, and the prompts' kernel, write the same tokens."""
    graph_runner = Rerun()
    how = DevicePlan(graph_sizes=(), graph_prompt_sizes=(8, 16))

    compare(
        tiny,
        make_requests([2, 9, 5, 13], max_tokens=3),
        interpreted,
        graph_runner=graph_runner,
        overlap=True,
        how=how,
        max_running_requests=3,
        max_step_tokens=12,
    )

    assert graph_runner.num_replayed > 0


def test_rows_that_are_preempted(tiny: Path, interpreted: pytest.MonkeyPatch) -> None:
    requests = make_requests([7, 8, 6], max_tokens=9, ignore_eos=False, temperature=0.9, seed=11)
    few_pages = {"num_pages": 9, "conservativeness": 0.02, "max_model_len": 32}

    got = compare(tiny, requests, interpreted, **few_pages)

    assert got.num_preemptions > 0


def test_logprobs(tiny: Path, interpreted: pytest.MonkeyPatch) -> None:
    got = compare(tiny, make_requests([6, 11], logprobs=3, prompt_logprobs=2), interpreted)

    assert all(got.logprobs().values())


@dataclass(frozen=True, slots=True)
class Updates:
    """AdapterPool of random updates, each by its lora_id's number."""

    slots: list[LowRankSlots]

    @classmethod
    def of(cls, model: DecoderModel) -> Updates:
        layers: list[Linear | Embedding] = [model.embedding, model.head.linear]
        for block in model.blocks:
            layers += [linear for _, linear in block.linears("")]
        return cls([layer.allocate_slots(ROOM.num_slots, ROOM.max_rank) for layer in layers])

    def install(self, slot: int, lora_id: int) -> None:
        generator = torch.Generator().manual_seed(lora_id)
        for slots in self.slots:
            slots.clear(slot - 1)
            for part in range(len(slots.bounds) - 1):
                outputs = slots.bounds[part + 1] - slots.bounds[part]
                a = torch.randn(lora_id, slots.a.shape[2], generator=generator) * 0.2
                b = torch.randn(outputs, lora_id, generator=generator) * 0.2
                slots.write(slot - 1, part, a, b)


ROOM = LoRASlotConfig(num_slots=2, max_rank=4, targets=("q_proj",))


def test_rows_with_adapters(tiny: Path, all_interpreted: pytest.MonkeyPatch) -> None:
    """Beside a row without."""
    requests = make_requests([3, 4, 2], max_tokens=2)
    adapters = {"r0": 1, "r2": 4}
    options: dict[str, Any] = {"adapt": Updates.of, "adapters": adapters}

    got = compare(tiny, requests, all_interpreted, room=ROOM, **options)

    plain = run(tiny, requests, forward="eager")
    changed = {key for key, ids in got.token_ids().items() if ids != plain.token_ids()[key]}
    assert changed == {("r0", 0), ("r2", 0)}


def test_recorded_steps_with_adapters(tiny: Path, all_interpreted: pytest.MonkeyPatch) -> None:
    """Tiles of adapters are padded, and those of logits follow the graph."""
    graph_runner = Rerun()

    compare(
        tiny,
        make_requests([3, 4], max_tokens=1),
        all_interpreted,
        room=ROOM,
        adapt=Updates.of,
        adapters={"r0": 1},
        graph_runner=graph_runner,
        how=DevicePlan(graph_sizes=(), graph_prompt_sizes=(9,)),
    )

    assert graph_runner.num_replayed == 1


def test_a_row_is_the_same_bits_in_any_company(tiny: Path, interpreted: pytest.MonkeyPatch) -> None:
    """With what `engine.deterministic` brings about."""
    interpreted.setattr("remora.kernels.linear_invariant.by_triton", lambda device: True)
    requests = make_requests([9, 4, 6], max_tokens=3, logprobs=0)

    def logprobs(asked: Requests) -> list[float]:
        return run(
            tiny,
            asked,
            make_attention=partial(TritonAttention, fixed_split=True),
            adapt=DecoderModel.make_invariant,
        ).logprobs()["r0", 0]

    assert logprobs({"r0": requests["r0"]}) == logprobs(requests)


def on_gpu(**engine: Any) -> DevicePlan:
    config = parse_args({"model": {"path": "x"}, "engine": engine})
    return plan_device(config, "cuda", has_triton=True, max_running=4, has_adapters=False)


@pytest.mark.observes("engine.deterministic")
def test_what_is_deterministic_multiplies_and_attends_accordingly(tiny: Path) -> None:
    model = load_f32(tiny)
    make_forward(model, make_plan(on_device=on_gpu(deterministic=True)), 5)

    linears = [linear for _, linear in model.blocks[0].linears("")]
    assert len(linears) == 4
    assert {linear.product for linear in (*linears, model.head.linear)} == {linear_invariant}


@pytest.mark.observes("engine.attention_splits", "engine.attention_split_tokens")
@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ({"attention_splits": 1}, [1, 1]),
        ({"attention_splits": 3}, [1, 3]),
        ({"attention_split_tokens": 64}, [1, 10]),
        ({"attention_split_tokens": 64, "attention_splits": 2}, [1, 2]),
        ({"deterministic": True}, [1, 2]),
    ],
)
def test_keys_are_divided_into_as_many_parts_as_is_written(
    keys: dict[str, Any], parts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[list[int]] = []

    def noted(sums: Tensor, weights: Tensor, items: Tensor, out: Tensor) -> None:
        found.append(items[:, 1].tolist())
        merge(sums, weights, items, out)

    merge = attention_kernels.merge
    monkeypatch.setattr(attention_kernels, "merge", noted)
    paged = make_paged(
        [40, 640], page_size=16, num_kv_heads=1, head_dim=16, dtype=torch.float32, device="cpu"
    )
    query = torch.randn(2, 2, 16)
    tensors = (query, paged.kv_pages, paged.tables, paged.lengths)

    options = split_options(on_gpu(**keys))
    out = attend_decode_paged(*tensors, scale=0.25, window=None, **options)

    assert found == [parts]
    exact = attend_decode_paged_reference(*tensors, scale=0.25, window=None)
    torch.testing.assert_close(out, exact, atol=1e-5, rtol=1e-5)


def test_what_divides_no_keys_refuses_to() -> None:
    with pytest.raises(ConfigError, match=r"engine\.attention_splits = 2"):
        on_gpu(attention_splits=2, attention_backend="torch")


@pytest.mark.observes("engine.attention_backend")
@pytest.mark.parametrize(
    ("backend", "expected"), [("triton", TritonAttention), ("torch", TorchAttention)]
)
def test_attention_is_what_the_plan_says(
    backend: Literal["triton", "torch"],
    expected: type[TritonAttention | TorchAttention],
    tiny: Path,
) -> None:
    model = load_f32(tiny)
    plan = make_plan(on_device=on_gpu(attention_backend=backend))

    made = make_attention(model, plan, 5)

    assert isinstance(made, expected)
    assert made.kv_pages.shape == (1, 2, 6, 4, 2, 16)
