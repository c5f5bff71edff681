"""Attention by other packages: their calls, with numbers; which models they are refused for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from remora.configs.errors import ConfigError
from remora.configs.machine import attention_libraries
from remora.configs.planning.device_plan import DevicePlan
from remora.engine.attention import libraries
from remora.engine.attention.flash_attention import (
    FlashAttention,
    FlashAttention2,
    FlashAttention3,
    FlashAttention4,
    PagedCall,
    TorchVarlen,
)
from remora.engine.attention.flashinfer_backend import FlashInferAttention, HostPages
from remora.engine.attention.libraries import Needs, check_supported
from remora.engine.attention.torch_backend import TorchAttention
from remora.engine.models.checkpoint import read_config
from remora.engine.runner.batch import AttentionSpec, QKNormRope
from remora.engine.runner.device import make_attention
from remora.engine.runner.eager import make_batch
from remora.engine.runner.inputs import NOTHING_GROWN, StepInputs
from remora.engine.types import SamplingParams
from tests.conftest import TinyCheckpoints
from tests.engine.attention import fake_libraries as fakes
from tests.engine.fakes import make_plan, make_window_room
from tests.engine.graphs.device_runs import Requests, Rerun, run
from tests.engine.loaded import load_f32
from tests.engine.models.families import make_family

T = TypeVar("T")
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 16
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
PLAIN = AttentionSpec(scale=0.25)
WINDOW = AttentionSpec(scale=0.3, window=5)
CAP = AttentionSpec(scale=0.3, soft_cap=2.0, window=40)
CALLS: dict[str, PagedCall] = {
    "fa2": FlashAttention2(
        fakes.FlashAttn2.flash_attn_with_kvcache, fakes.FlashAttn2.flash_attn_varlen_func
    ),
    "fa3": FlashAttention3(fakes.FlashAttn3.flash_attn_with_kvcache),
    "fa4": FlashAttention4(fakes.FlashAttn4.flash_attn_varlen_func, splits=False),
    "torch_varlen": TorchVarlen(fakes.varlen_attn),
}
SPECS = {
    "fa2": (PLAIN, WINDOW, CAP, AttentionSpec(scale=0.25, slopes=SLOPES)),
    "fa3": (PLAIN, WINDOW, CAP),
    "fa4": (PLAIN, WINDOW, CAP, AttentionSpec(scale=0.25, sinks=SINKS)),
    "torch_varlen": (PLAIN, WINDOW),
    "flashinfer": (PLAIN, WINDOW, CAP),
}
PAGE_SIZES = {"fa2": 256, "torch_varlen": 256}


def make_step(lengths: list[int], counts: list[int], page_size: int) -> StepInputs:
    """Return a step of rows in reverse order, whose pages follow one another backwards."""
    num_rows = len(lengths)
    num_pages = [-(-length // page_size) for length in lengths]
    tables = np.zeros((num_rows, max(num_pages) + 1), np.int32)
    first = sum(num_pages)
    rows = np.arange(num_rows)[::-1].astype(np.int64)
    for row, number in zip(rows, num_pages, strict=True):
        tables[row, :number] = np.arange(first, first - number, -1)
        first -= number
    positions = np.concatenate(
        [np.arange(length - count, length) for length, count in zip(lengths, counts, strict=True)]
    )
    of_tokens = np.repeat(rows, counts)
    slots = tables[of_tokens, positions // page_size] * np.int64(page_size) + positions % page_size
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    return StepInputs(
        token_ids=np.zeros(len(positions), np.int64),
        positions=positions,
        slots=slots,
        starts=starts,
        lengths=np.array(lengths, np.int64),
        rows=rows,
        tables=tables,
        num_decodes=counts.count(1),
        logit_index=starts[1:] - 1,
        adapters=np.zeros(len(positions), np.int32),
        grown=NOTHING_GROWN,
    )


def pages_of(page_size: int, **more: Any) -> dict[str, Any]:
    return {
        "num_layers": 2,
        "num_pages": 40,
        "page_size": page_size,
        "num_kv_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "dtype": torch.float32,
        "device": "cpu",
        **more,
    }


def make_flashinfer(
    library: fakes.FlashInfer, num_heads: int = NUM_HEADS, **pages: Any
) -> FlashInferAttention:
    return FlashInferAttention(library, num_heads=num_heads, max_rows=8, max_tokens=512, **pages)


@pytest.fixture(autouse=True)
def small_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remora.engine.attention.flashinfer_backend.FLOAT_WORKSPACE_BYTES", 1024)


@pytest.mark.parametrize(
    "counts", [(1, 1, 1), (1, 1, 9, 30), (7, 30)], ids=["decode", "mixed", "extend"]
)
@pytest.mark.parametrize("name", [*CALLS, "flashinfer"])
def test_rows_attend_as_by_torch(name: str, counts: tuple[int, ...]) -> None:
    """Each spec in one step, layer by layer, and again in a second step."""
    torch.manual_seed(0)
    page_size = PAGE_SIZES.get(name, 16)
    lengths = [300, 33, 77, 30][: len(counts)]
    backend: Any
    if name == "flashinfer":
        backend = make_flashinfer(fakes.FlashInfer(), **pages_of(page_size))
    else:
        backend = FlashAttention(CALLS[name], **pages_of(page_size))
    reference = TorchAttention(**pages_of(page_size))
    backend.kv_pages.normal_()
    reference.kv_pages.copy_(backend.kv_pages)
    for step in (
        make_step(lengths, list(counts), page_size),
        make_step([each + 1 for each in lengths], list(counts), page_size),
    ):
        batch = make_batch(step, page_size=page_size, device=torch.device("cpu"))
        if name == "flashinfer":
            backend.plan_step(step, None)
        for spec in SPECS[name]:
            heads = torch.randn(sum(counts), NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM)
            angles = torch.rand(sum(counts), HEAD_DIM // 2)
            rope = QKNormRope(cos=angles.cos(), sin=angles.sin())
            for layer in range(2):
                got = backend.attend(layer, heads, rope, batch, spec)
                expected = reference.attend(layer, heads, rope, batch, spec)
                torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(backend.kv_pages, reference.kv_pages)


def test_flashinfer_plans_once_for_all_layers_of_a_kind() -> None:
    library = fakes.FlashInfer()
    backend = make_flashinfer(library, **pages_of(16))
    step = make_step([20, 40, 9], [1, 1, 9], 16)
    batch = make_batch(step, page_size=16, device=torch.device("cpu"))
    heads = torch.randn(11, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM)
    ones = torch.ones(11, HEAD_DIM // 2)
    rope = QKNormRope(cos=ones, sin=torch.zeros_like(ones))

    backend.plan_step(step, None)
    for spec in (PLAIN, WINDOW, PLAIN):
        backend.attend(0, heads, rope, batch, spec)

    assert library.num_plans == 4  # decode and extend rows, with and without a window


def test_host_pages_are_those_of_the_tables_and_padding_has_the_dump_page() -> None:
    tables = np.array([[7, 8, 0], [3, 0, 0], [4, 5, 6]], np.int32)

    pages = HostPages.of(tables, np.array([2, 0]), np.array([33, 32]), 16).padded(4)

    assert pages.indptr.tolist() == [0, 3, 5, 6, 7]
    assert pages.indices.tolist() == [4, 5, 6, 7, 8, 0, 0]
    assert pages.last_lens.tolist() == [1, 16, 1, 1]


class Captured(Rerun):
    """A GraphRunner that lets nothing be planned in what it captures and replays."""

    def __init__(self, library: fakes.FlashInfer) -> None:
        super().__init__()
        self.library = library

    def capture(self, run: Callable[[], T]) -> Callable[[], T]:
        run()
        self.library.is_captured = True
        replay = super().capture(run)
        self.library.is_captured = False

        def replay_captured() -> T:
            self.library.is_captured = True
            made = replay()
            self.library.is_captured = False
            return made

        return replay_captured


def make_requests(lengths: list[int]) -> Requests:
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    generator = np.random.default_rng(0)
    return {
        f"r{number}": (generator.integers(10, 250, length).tolist(), params)
        for number, length in enumerate(lengths)
    }


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("name", [*CALLS, "flashinfer"])
def test_an_engine_generates_the_same_tokens(
    name: str, family: str, tiny_checkpoints: TinyCheckpoints
) -> None:
    """With chunks of prompts beside rows that decode, captured steps and overlap."""
    path = tiny_checkpoints(family, num_hidden_layers=2)
    requests = make_requests([1, 9, 30, 3, 17])
    library = fakes.FlashInfer()
    make: Callable[..., Any] = partial(make_flashinfer, library, read_config(path).num_heads)
    if name in CALLS:
        make = partial(FlashAttention, CALLS[name])
    graph_runner = Captured(library)
    options: dict[str, Any] = {"max_running_requests": 3, "max_step_tokens": 12}
    if name in PAGE_SIZES:
        options |= {"page_size": PAGE_SIZES[name], "num_pages": 8}

    got = run(
        path, requests, make_attention=make, graph_runner=graph_runner, overlap=True, **options
    )

    assert got.token_ids() == run(path, requests, forward="eager", **options).token_ids()
    assert graph_runner.num_replayed > 0


def test_flashinfer_plans_both_pools_of_a_model_with_window_pages(
    tiny_checkpoints: TinyCheckpoints,
) -> None:
    path = tiny_checkpoints("qwen2", num_hidden_layers=2)
    room = make_window_room(window=24, num_pages=40, overlap=True)
    room = replace(room, layers=(False, True))
    requests = make_requests([5, 60, 33])
    library = fakes.FlashInfer()
    options: dict[str, Any] = {"max_step_tokens": 16, "windows": room}

    got = run(
        path,
        requests,
        make_attention=partial(make_flashinfer, library, read_config(path).num_heads),
        graph_runner=Captured(library),
        overlap=True,
        **options,
    )

    assert got.token_ids() == run(path, requests, forward="eager", **options).token_ids()


def needs(**changes: Any) -> Needs:
    values: dict[str, Any] = {
        "features": frozenset(),
        "head_dim": 128,
        "dtype": torch.bfloat16,
        "page_size": 16,
        "capability": 9,
    }
    return Needs(**(values | changes))


@pytest.mark.parametrize(
    ("name", "changes", "lacking", "others"),
    [
        ("flashinfer", {"features": frozenset({libraries.SINKS})}, "attention sinks", "triton"),
        ("flashinfer", {"head_dim": 80}, "heads of 80 values", "triton or fa3"),
        ("fa2", {}, "pages of 16 tokens", "triton or flashinfer or fa3 or torch"),
        ("fa3", {"capability": 10}, "compute capability 10", "triton or flashinfer or torch"),
        ("fa3", {"dtype": torch.float32}, "float32", "triton or torch"),
        ("fa3", {"features": frozenset({libraries.ALIBI}), "page_size": 256}, "ALiBi", "fa2"),
        ("triton", {"features": frozenset({libraries.CHUNKS})}, "attention chunks", "torch"),
        ("fa4", {"features": frozenset({libraries.LATENTS})}, "latent attention", "triton"),
    ],
)
def test_what_a_backend_lacks_is_refused_with_those_that_do(
    name: str,
    changes: dict[str, Any],
    lacking: str,
    others: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(libraries, "attention_libraries", lambda: ("flashinfer", "fa2", "fa3"))

    message = rf"engine\.attention_backend = {name}: .*{lacking}.*; set it to {others}"
    with pytest.raises(ConfigError, match=message):
        check_supported(name, needs(**changes))
    check_supported(others.split(" or ")[0], needs(**changes))


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("gemma2", {libraries.WINDOWS, libraries.CAPS}),
        ("falcon-1b-alibi", {libraries.ALIBI}),
    ],
)
def test_needs_are_read_from_the_model(
    family: str, expected: frozenset[str], tmp_path: Path
) -> None:
    make_family(tmp_path, family)

    assert Needs.of(read_config(tmp_path), torch.float32, 16, None).features == expected


@pytest.mark.parametrize(
    ("name", "module", "package"),
    [
        ("fa2", "flash_attn", fakes.FlashAttn2),
        ("fa3", "flash_attn_interface", fakes.FlashAttn3),
        ("fa4", "flash_attn.cute", fakes.FlashAttn4),
        (
            "torch_varlen",
            "torch.nn.attention.varlen",
            SimpleNamespace(varlen_attn=fakes.varlen_attn),
        ),
        ("flashinfer", "flashinfer", fakes.FlashInfer()),
    ],
)
def test_a_named_backend_is_made_of_its_package(
    name: Any,
    module: str,
    package: Any,
    tiny_checkpoints: TinyCheckpoints,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, module, package)
    model = load_f32(tiny_checkpoints("llama", num_hidden_layers=1))
    plan = make_plan(on_device=DevicePlan(attention_backend=name))

    made = make_attention(model, plan, 5)

    assert isinstance(made, FlashInferAttention if name == "flashinfer" else FlashAttention)
    assert made.kv_pages.shape == (1, 2, 6, 4, 2, 16)


def test_a_package_that_cannot_be_imported_is_a_configuration_error(
    tiny_checkpoints: TinyCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    model = load_f32(tiny_checkpoints("llama", num_hidden_layers=1))

    with pytest.raises(ConfigError, match=r"engine\.attention_backend = fa3: its package"):
        make_attention(model, make_plan(on_device=DevicePlan(attention_backend="fa3")), 5)


def test_installed_libraries_are_found_without_importing_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in (
        "flash_attn/cute/interface.py",
        "flash_attn_interface.py",
        "flashinfer/__init__.py",
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("raise ImportError\n")
    monkeypatch.syspath_prepend(tmp_path)

    assert attention_libraries() == ("flashinfer", "fa4", "fa3", "torch_varlen")
