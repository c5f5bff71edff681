"""Reading adapters: what fits is taken, and what does not is refused with all reasons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from remora.configs.errors import InvalidAdapter
from remora.engine.models.config import AttentionConfig, TensorRule
from remora.engine.models.families.tensor_rules import (
    QKV,
    blocks,
    of_layers,
    qkv_blocks,
    qkv_groups,
    unit_rows,
)
from remora.engine.weights.rename_tensors import RenamingRules
from remora.lora.adapter import LowRank, read_adapter, split_update
from remora.lora.files import CONFIG, MAX_HEADER_BYTES, WEIGHTS, read_files
from remora.lora.peft_config import MAX_PATTERNS
from tests.lora.broken import BROKEN_FILES, Breaker
from tests.lora.peft_files import AS_NAMED, PREFIX, RANK, SHAPES, make_tensors, write_adapter

MODULE = PREFIX.removeprefix("base_model.model.")
SIZES = {"q": 8, "k": 4, "v": 4}


def draw_tensors(module: str = "q_proj", outputs: int = 8) -> dict[str, Tensor]:
    tensors = make_tensors(module, outputs)
    return {name: torch.randn(tensor.shape) for name, tensor in tensors.items()}


def test_an_adapter_is_read_into_memory(tmp_path: Path) -> None:
    tensors = draw_tensors()
    adapter = read_adapter(write_adapter(tmp_path, tensors=tensors), SHAPES, AS_NAMED)
    write_adapter(tmp_path)  # does not change what was read

    (name,) = adapter.updates
    assert name == "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(adapter.updates[name].a, tensors[f"{PREFIX}q_proj.lora_A.weight"])
    assert torch.equal(adapter.updates[name].b, tensors[f"{PREFIX}q_proj.lora_B.weight"])
    assert adapter.updates[name].scale == 2.0
    assert (adapter.max_rank, adapter.label) == (RANK, tmp_path.name)


@pytest.mark.parametrize("prefix", ["base_model.model.", "", "base_model.model.model."])
def test_names_may_leave_out_the_first_words(prefix: str, tmp_path: Path) -> None:
    plain = make_tensors()
    named = {prefix + name.removeprefix("base_model.model.model."): plain[name] for name in plain}

    adapter = read_adapter(write_adapter(tmp_path, tensors=named), SHAPES, AS_NAMED)

    assert list(adapter.updates) == ["model.layers.0.self_attn.q_proj.weight"]


FUSED = RenamingRules(
    [*of_layers(r"model\.layers\.", {"self_attn.qkv_proj": QKV}, blocks(8, 4, 4))]
)


def test_a_fused_module_is_split(tmp_path: Path) -> None:
    tensors = draw_tensors("qkv_proj", 16)

    adapter = read_adapter(write_adapter(tmp_path, tensors=tensors), SHAPES, FUSED)

    a, b = (tensors[f"{PREFIX}qkv_proj.lora_{factor}.weight"] for factor in "AB")
    found = {name.split(".")[-2]: update for name, update in adapter.updates.items()}
    assert list(found) == ["q_proj", "k_proj", "v_proj"]
    assert all(torch.equal(update.a, a) for update in found.values())
    assert torch.equal(torch.cat([update.b for update in found.values()]), b)


@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_a_replaced_fused_module_is_split(kind: str, tmp_path: Path) -> None:
    whole = torch.randn(16, 8) if kind == "weight" else torch.randn(16)
    shapes = {**SHAPES, **{f"{MODULE}{part}_proj.bias": (size,) for part, size in SIZES.items()}}

    folder = write_adapter(tmp_path, tensors={f"{PREFIX}qkv_proj.{kind}": whole})
    adapter = read_adapter(folder, shapes, FUSED)

    assert list(adapter.replaced) == [f"{MODULE}{part}_proj.{kind}" for part in "qkv"]
    assert torch.equal(torch.cat([*adapter.replaced.values()]), whole)


def test_a_weight_is_changed_by_one_module(tmp_path: Path) -> None:
    tensors = make_tensors("qkv_proj", 16) | make_tensors("q_proj")
    folder = write_adapter(tmp_path, tensors=tensors)

    with pytest.raises(InvalidAdapter, match=r"q_proj\.weight, which another module"):
        read_adapter(folder, SHAPES, FUSED)


def test_a_weight_whose_rows_change_as_they_load_is_not_updated(tmp_path: Path) -> None:
    name = f"{MODULE}q_proj.weight"
    rules = RenamingRules([TensorRule(name, (name,), unit_rows, bars_updates="rows change")])

    with pytest.raises(InvalidAdapter, match="q_proj cannot be updated: rows change"):
        read_adapter(write_adapter(tmp_path), SHAPES, rules)


def test_digests_tell_adapters_apart(tmp_path: Path) -> None:
    first, same, other = (
        read_files(write_adapter(tmp_path, lora_alpha=alpha)).digest for alpha in (4, 4, 5)
    )
    assert first == same != other


def with_tensor(name: str, tensor: Tensor) -> Breaker:
    return lambda folder: write_adapter(folder, tensors=make_tensors() | {PREFIX + name: tensor})


def without_tensor(name: str) -> Breaker:
    kept = {key: value for key, value in make_tensors().items() if key != PREFIX + name}
    return lambda folder: write_adapter(folder, tensors=kept)


def with_config(**changes: Any) -> Breaker:
    return lambda folder: write_adapter(folder, **changes)


TIED_HEAD = {"base_model.model.lm_head.weight": torch.ones(2, 8)}


def with_long_header(folder: Path) -> None:
    size = MAX_HEADER_BYTES + 1
    (folder / WEIGHTS).write_bytes(size.to_bytes(8, "little") + b"{}".ljust(size))


NOT_A_NUMBER = torch.full((RANK, 8), torch.nan)
BROKEN: dict[str, tuple[Breaker, str]] = BROKEN_FILES | {
    "long header": (with_long_header, f"at most {MAX_HEADER_BYTES} are read"),
    "no tensors": (lambda folder: write_adapter(folder, tensors={}), "changes nothing"),
    "deep JSON": (lambda folder: (folder / CONFIG).write_text("[" * 10**6), "not valid JSON"),
    "list": (lambda folder: (folder / CONFIG).write_text('["LORA"]'), "expected an object"),
    "prompt tuning": (with_config(peft_type="PROMPT_TUNING"), "only LORA"),
    "rank 0": (with_config(r=0), "expected a number from 1"),
    "rank is true": (with_config(r=True), "expected a number from 1"),
    "alpha is infinite": (with_config(lora_alpha=float("inf")), "expected a number"),
    "pattern": (with_config(rank_pattern={"(": 2}), "is not a pattern"),
    "many patterns": (
        with_config(rank_pattern={f"m{n}": 2 for n in range(MAX_PATTERNS + 1)}),
        f"at most {MAX_PATTERNS}",
    ),
    "pattern of texts": (with_config(alpha_pattern={"q_proj": "2"}), "an object of numbers"),
    "unknown kind": (with_config(use_qalora=True, kind_of_2030={"x": 1}), "kind_of_2030"),
    "lora_bias": (with_config(lora_bias=True), "lora_bias = True is not supported"),
    "PiSSA": (with_config(init_lora_weights="pissa_niter_4"), "changes the base"),
    "other rank": (with_config(r=4), r"ranks 2 \(A\) and 2 \(B\) instead of 4"),
    "DoRA in name": (with_config(use_dora=True), "lacks its magnitude"),
    "no B": (without_tensor("q_proj.lora_B.weight"), "has lora_A only"),
    "not finite": (with_tensor("q_proj.lora_A.weight", NOT_A_NUMBER), "not finite"),
    "integers": (with_tensor("q_proj.lora_A.weight", torch.ones(RANK, 8).int()), "torch.int32"),
    "one dimension": (with_tensor("q_proj.lora_A.weight", torch.ones(8)), "not matrices"),
    "other width": (with_tensor("q_proj.lora_A.weight", torch.ones(RANK, 9)), r"\[8, 9\] instead"),
    "other layer": (with_tensor("../9.x.lora_A.weight", torch.ones(RANK, 8)), "no model has|only"),
    "unknown tensor": (with_tensor("q_proj.lora_C.weight", torch.ones(8)), "lora_C"),
    "unknown module": (with_tensor("z_proj.weight", torch.ones(8)), "has no .*z_proj"),
    "tied head": (
        lambda folder: write_adapter(folder, tensors=TIED_HEAD),
        "tie_word_embeddings",
    ),
}


@pytest.mark.parametrize(("spoil", "reason"), BROKEN.values(), ids=BROKEN)
def test_a_broken_adapter_is_refused_with_the_reason(
    spoil: Breaker, reason: str, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "broken")
    spoil(folder)

    with pytest.raises(InvalidAdapter, match=reason):
        read_adapter(folder, SHAPES, AS_NAMED)


def test_weights_that_are_too_large_are_not_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidAdapter, match="at most 100 are read"):
        read_files(write_adapter(tmp_path), max_bytes=100)


def test_one_error_names_all_faults(tmp_path: Path) -> None:
    tensors = make_tensors("z_proj") | make_tensors("k_proj", 5)
    folder = write_adapter(tmp_path, tensors=tensors, base_model_name_or_path="other/model")

    with pytest.raises(InvalidAdapter) as raised:
        read_adapter(folder, SHAPES, AS_NAMED)

    for part in ("no model.layers.0.self_attn.z_proj", "is for [5, 8] instead of [4, 8]"):
        assert part in str(raised.value)
    assert "trained on other/model" in str(raised.value)


@given(
    heads=st.sampled_from([(1, 1), (4, 1), (4, 2), (3, 3)]),
    inputs=st.integers(1, 6),
    rank=st.integers(1, 8),
    is_transposed=st.booleans(),
    grouped=st.booleans(),
    has_magnitude=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_parts_of_an_updated_weight_are_updates_of_its_parts(
    heads: tuple[int, int],
    inputs: int,
    rank: int,
    is_transposed: bool,
    grouped: bool,
    has_magnitude: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    num_heads, num_kv_heads = heads
    shape = AttentionConfig(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=2, scale=1.0)
    split = qkv_groups(shape) if grouped else qkv_blocks(shape)
    renaming = RenamingRules([TensorRule("all", ("q", "k", "v"), split, is_transposed)])
    outputs = 2 * (num_heads + 2 * num_kv_heads)
    update = LowRank(
        a=draw(rank, inputs),
        b=draw(outputs, rank),
        scale=0.5,
        magnitude=draw(outputs).abs() if has_magnitude else None,
    )
    weight = draw(outputs, inputs)

    whole = update.updated(weight)

    def stored(weight: Tensor) -> Tensor:
        return weight.t() if is_transposed else weight

    parts = split_update(update, "all", renaming)
    own, expected = (renaming.parts("all", stored(each)) for each in (weight, whole))
    for name, mine, after in zip("qkv", own, expected, strict=True):
        torch.testing.assert_close(parts[name].updated(mine), after)
    if update.magnitude is not None:
        torch.testing.assert_close(whole.norm(dim=1), update.magnitude)
