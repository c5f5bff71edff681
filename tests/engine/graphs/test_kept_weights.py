"""Step programs whose packed weights are kept: the same bits, and no tensor is read for them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from remora.configs.environment import cache_dir
from remora.configs.load import parse_args
from remora.engine.graphs.step_builder import StepProgramBuilder
from remora.engine.launch import build_engine
from remora.engine.models.decoder import DecoderModel
from remora.engine.models.load import open_model
from remora.engine.weights import packed_cache
from remora.engine.weights.packed_cache import PackedCache
from remora.engine.weights.safetensors import SafetensorsWeights
from remora.kernels.cpu.library import Library, Team
from tests.conftest import TinyCheckpoints
from tests.engine.graphs.stepping import (
    MODES,
    NO_ADAPTERS,
    SHAPE,
    Stepper,
    as_it_is,
    make_native,
    make_table,
)
from tests.engine.graphs.test_adapters import ADAPTERS, add_adapters
from tests.engine.graphs.test_stored_weights import INT8, LINEARS
from tests.engine.weights.formats.checkpoints import quantise

STEPS = ({0: 30, 1: 70}, {0: 1, 1: 1, 2: 20})
ROUNDED = ("_proj.weight", "lm_head.weight")  # endings of names
NOT_ROUNDED = "kv_b_proj"  # it is absorbed


@pytest.fixture(autouse=True)
def read(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of the tensors that are read; small products are kept, too."""
    names: set[str] = set()
    read = SafetensorsWeights.read

    def record(source: SafetensorsWeights, wanted: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in read(source, wanted):
            names.add(name)
            yield name, tensor

    monkeypatch.setattr(SafetensorsWeights, "read", record)
    monkeypatch.setattr(packed_cache, "LEAST_BYTES", 0)
    return names


@contextmanager
def started(
    path: Path,
    root: Path,
    library: Library,
    mode: str,
    prepare: Callable[[DecoderModel], None] = as_it_is,
    adapters: dict[int, int] | None = None,
) -> Iterator[Stepper]:
    """Build a program as the engine does, with a cache."""
    opened = open_model(
        path, dtype=torch.bfloat16, load_format="auto", device="cpu", show_progress=False
    )
    cache = PackedCache.of(path, "auto", "", root=root, limit_bytes=2**40)
    table = make_table()
    with opened as (model, fill), cache.open(mode, 2) as store:
        prepare(model)
        builder = StepProgramBuilder(model, Team(library, 2), SHAPE, table, MODES[mode])
        program = builder.build(fill, store)
    yield Stepper(program, table, NO_ADAPTERS if adapters is None else adapters)
    program.close()


def check(path: Path, root: Path, library: Library, mode: str, read: set[str]) -> None:
    """Compare two starts with one without a cache; the second reads no tensor that is rounded."""
    plain = make_native(path, library, mode)
    expected = [plain.step(counts) for counts in STEPS]
    plain.forward.close()
    for is_first in (True, False):
        read.clear()
        with started(path, root, library, mode) as stepper:
            rounded = [name for name in read if name.endswith(ROUNDED) and NOT_ROUNDED not in name]
            assert bool(rounded) == is_first
            for counts, logits in zip(STEPS, expected, strict=True):
                assert torch.equal(stepper.step(counts), logits)


@pytest.mark.parametrize("mode", ["int4", "int4_pure", "int8"])
def test_kept_weights_have_the_same_bits(
    mode: str,
    library: Library,
    tiny_checkpoints: TinyCheckpoints,
    tmp_path: Path,
    read: set[str],
) -> None:
    check(tiny_checkpoints("llama-bias"), tmp_path, library, mode, read)


@pytest.mark.parametrize("family", ["qwen2.5-tied", "qwen3-moe", "gpt-oss", "deepseek-v3"])
def test_tied_heads_experts_and_latents_are_kept(
    family: str,
    library: Library,
    tiny_checkpoints: TinyCheckpoints,
    tmp_path: Path,
    read: set[str],
) -> None:
    check(tiny_checkpoints(family), tmp_path, library, "int4", read)


def test_layers_that_adapters_join_are_other_products(
    library: Library, tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    path = tiny_checkpoints("llama", num_key_value_heads=1)  # v_proj begins within a block
    found = []
    plain = make_native(path, library, "int4", prepare=add_adapters, adapters=ADAPTERS)
    expected = plain.step(STEPS[0])
    plain.forward.close()
    with started(path, tmp_path, library, "int4"):
        found.append(len(list(tmp_path.glob("*/*"))))
    for _ in range(2):
        with started(path, tmp_path, library, "int4", add_adapters, ADAPTERS) as stepper:
            assert torch.equal(stepper.step(STEPS[0]), expected)
        found.append(len(list(tmp_path.glob("*/*"))))

    assert found[0] < found[1] == found[2]


def test_weights_that_are_held_as_stored_are_not_kept(
    library: Library, tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    (tmp_path / "checkpoints").mkdir()
    path, _ = quantise(tiny_checkpoints("llama"), tmp_path / "checkpoints", INT8, LINEARS)

    with started(path, tmp_path / "packed", library, "int4"):
        (file,) = (tmp_path / "packed").glob("*/*")

    assert file.name.startswith("lm_head.weight-")


def build(path: Path, **model: object) -> str:
    """Build an engine as served; return what it says of its kernels."""
    engine = {"kv_tokens": 256, "num_threads": 1, "max_running_requests": 1, "device": "cpu"}
    config = parse_args({"model": {"path": str(path), **model}, "engine": engine})
    built = build_engine(config, show_progress=False)
    built.engine.close()
    return built.kernels


@pytest.mark.observes("model.packed_cache")
def test_an_engine_keeps_what_it_rounds_unless_that_is_off(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cache = tiny_checkpoints("llama"), tmp_path / "cache"
    cache.mkdir()
    (cache / "kernels").symlink_to(cache_dir() / "kernels")
    monkeypatch.setenv("REMORA_CACHE", str(cache))

    build(path)
    build(path, quantization="int4", packed_cache=None)
    build(path, quantization="int4", load_format="dummy")
    assert not (cache / "packed").exists()

    said = [build(path, quantization="int4") for _ in range(2)]
    assert ["packed weights cached" in each for each in said] == [False, True]
    assert len(list((cache / "packed").iterdir())) == 1
    assert "cached" not in build(path, quantization="int4", packed_cache=None)
