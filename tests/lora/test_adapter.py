"""Reading adapters: what fits is taken, and what does not is refused with all reasons."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
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
from remora.lora.files import CONFIG, PICKLES, WEIGHTS, read_files
from tests.lora.peft_files import AS_NAMED

PREFIX = "base_model.model.model.layers.0.self_attn."
SHAPES = {
    "model.embed_tokens.weight": (32, 8),
    "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "model.layers.0.self_attn.k_proj.weight": (4, 8),
    "model.layers.0.self_attn.v_proj.weight": (4, 8),
    "model.layers.0.self_attn.q_proj.bias": (8,),
    "model.layers.0.input_layernorm.weight": (8,),
}
RANK = 2
MODULE = PREFIX.removeprefix("base_model.model.")
SIZES = {"q": 8, "k": 4, "v": 4}


def make_config(**changes: Any) -> dict[str, Any]:
    return {"peft_type": "LORA", "r": RANK, "lora_alpha": 4, "target_modules": ["q_proj"]} | changes


def make_tensors(module: str = "q_proj", outputs: int = 8) -> dict[str, Tensor]:
    return {
        f"{PREFIX}{module}.lora_A.weight": torch.randn(RANK, 8),
        f"{PREFIX}{module}.lora_B.weight": torch.randn(outputs, RANK),
    }


def write(folder: Path, config: Any = None, tensors: dict[str, Tensor] | None = None) -> Path:
    (folder / CONFIG).write_text(json.dumps(make_config() if config is None else config))
    save_file(make_tensors() if tensors is None else tensors, folder / WEIGHTS)
    return folder


def test_an_adapter_is_read(tmp_path: Path) -> None:
    tensors = make_tensors()

    adapter = read_adapter(write(tmp_path, tensors=tensors), SHAPES, AS_NAMED)

    (name,) = adapter.updates
    assert name == "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(adapter.updates[name].a, tensors[f"{PREFIX}q_proj.lora_A.weight"])
    assert adapter.updates[name].scale == 2.0
    assert (adapter.max_rank, adapter.label) == (RANK, tmp_path.name)


@pytest.mark.parametrize("prefix", ["base_model.model.", "", "base_model.model.model."])
def test_names_may_leave_out_the_first_words(prefix: str, tmp_path: Path) -> None:
    plain = make_tensors()
    named = {prefix + name.removeprefix("base_model.model.model."): plain[name] for name in plain}

    adapter = read_adapter(write(tmp_path, tensors=named), SHAPES, AS_NAMED)

    assert list(adapter.updates) == ["model.layers.0.self_attn.q_proj.weight"]


FUSED = RenamingRules(
    [*of_layers(r"model\.layers\.", {"self_attn.qkv_proj": QKV}, blocks(8, 4, 4))]
)


def test_a_fused_module_is_taken_apart(tmp_path: Path) -> None:
    tensors = make_tensors("qkv_proj", 16)

    adapter = read_adapter(write(tmp_path, tensors=tensors), SHAPES, FUSED)

    a, b = (tensors[f"{PREFIX}qkv_proj.lora_{factor}.weight"] for factor in "AB")
    found = {name.split(".")[-2]: update for name, update in adapter.updates.items()}
    assert list(found) == ["q_proj", "k_proj", "v_proj"]
    assert all(torch.equal(update.a, a) for update in found.values())
    assert torch.equal(torch.cat([update.b for update in found.values()]), b)


@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_a_fused_module_that_is_brought_along_is_taken_apart(kind: str, tmp_path: Path) -> None:
    whole = torch.randn(16, 8) if kind == "weight" else torch.randn(16)
    shapes = {**SHAPES, **{f"{MODULE}{part}_proj.bias": (size,) for part, size in SIZES.items()}}

    folder = write(tmp_path, tensors={f"{PREFIX}qkv_proj.{kind}": whole})
    adapter = read_adapter(folder, shapes, FUSED)

    assert list(adapter.replaced) == [f"{MODULE}{part}_proj.{kind}" for part in "qkv"]
    assert torch.equal(torch.cat([*adapter.replaced.values()]), whole)


def test_a_weight_is_changed_by_one_module(tmp_path: Path) -> None:
    folder = write(tmp_path, tensors=make_tensors("qkv_proj", 16) | make_tensors("q_proj"))

    with pytest.raises(InvalidAdapter, match=r"q_proj\.weight, which another module"):
        read_adapter(folder, SHAPES, FUSED)


def test_a_weight_whose_rows_change_as_they_load_is_not_updated(tmp_path: Path) -> None:
    name = f"{MODULE}q_proj.weight"
    rules = RenamingRules([TensorRule(name, (name,), unit_rows, bars_updates="rows change")])

    with pytest.raises(InvalidAdapter, match="q_proj cannot be updated: rows change"):
        read_adapter(write(tmp_path), SHAPES, rules)


def test_digests_tell_adapters_apart(tmp_path: Path) -> None:
    write(tmp_path)
    first = read_files(tmp_path).digest
    assert read_files(tmp_path).digest == first
    write(tmp_path, config=make_config(lora_alpha=5), tensors=read_files(tmp_path).tensors)
    assert read_files(tmp_path).digest != first


def with_tensor(name: str, tensor: Tensor) -> Callable[[Path], object]:
    return lambda folder: write(folder, tensors=make_tensors() | {PREFIX + name: tensor})


def without_tensor(name: str) -> Callable[[Path], object]:
    kept = {key: value for key, value in make_tensors().items() if key != PREFIX + name}
    return lambda folder: write(folder, tensors=kept)


def with_config(**changes: Any) -> Callable[[Path], object]:
    return lambda folder: write(folder, make_config(**changes))


def truncated(folder: Path) -> None:
    write(folder)
    os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size - 5)


def instead(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    def do(folder: Path) -> None:
        write(folder)
        (folder / name).unlink()
        make(folder / name)

    return do


def pickled(folder: Path) -> None:
    write(folder)
    (folder / WEIGHTS).rename(folder / PICKLES[0])


NOT_A_NUMBER = torch.full((RANK, 8), torch.nan)
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no files": (lambda folder: None, f"{CONFIG} is not there"),
    "no weights": (instead(WEIGHTS, lambda file: None), f"{WEIGHTS} is not there"),
    "pickle": (pickled, "a pickle"),
    "truncated": (truncated, "Is the copy complete"),
    "empty file": (instead(WEIGHTS, Path.touch), "cannot be read as safetensors"),
    "no tensors": (lambda folder: write(folder, tensors={}), "changes nothing"),
    "pipe": (instead(WEIGHTS, os.mkfifo), "no regular file"),
    "endless": (instead(WEIGHTS, lambda file: file.symlink_to("/dev/zero")), "leads out of"),
    "folder": (instead(WEIGHTS, Path.mkdir), "no regular file"),
    "config is a pipe": (instead(CONFIG, os.mkfifo), "no regular file"),
    "no JSON": (instead(CONFIG, lambda file: file.write_text("{")), "not valid JSON"),
    "deep JSON": (instead(CONFIG, lambda file: file.write_text("[" * 10**6)), "not valid JSON"),
    "huge config": (instead(CONFIG, lambda file: file.write_text(" " * 2**21)), "at most"),
    "list": (lambda folder: write(folder, ["LORA"]), "expected an object"),
    "prompt tuning": (with_config(peft_type="PROMPT_TUNING"), "only LORA"),
    "rank 0": (with_config(r=0), "expected a number from 1"),
    "rank is true": (with_config(r=True), "expected a number from 1"),
    "alpha is infinite": (with_config(lora_alpha=float("inf")), "expected a number"),
    "pattern": (with_config(rank_pattern={"(": 2}), "is not a pattern"),
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
        lambda folder: write(folder, tensors={"base_model.model.lm_head.weight": torch.ones(2, 8)}),
        "tie_word_embeddings",
    ),
}


@pytest.mark.parametrize(("make", "reason"), BROKEN.values(), ids=BROKEN)
def test_a_broken_adapter_is_refused_with_the_reason(
    make: Callable[[Path], object], reason: str, tmp_path: Path
) -> None:
    make(tmp_path)

    with pytest.raises(InvalidAdapter, match=reason):
        read_adapter(tmp_path, SHAPES, AS_NAMED)


def test_weights_that_are_too_large_are_not_read(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(InvalidAdapter, match="at most 100 are read"):
        read_files(tmp_path, max_bytes=100)


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    tensors = make_tensors("z_proj") | make_tensors("k_proj", 5)
    config = make_config(base_model_name_or_path="other/model")

    with pytest.raises(InvalidAdapter) as raised:
        read_adapter(write(tmp_path, config, tensors), SHAPES, AS_NAMED)

    for part in ("no model.layers.0.self_attn.z_proj", "is for [5, 8] instead of [4, 8]"):
        assert part in str(raised.value)
    assert "trained on other/model" in str(raised.value)


def test_tensors_of_an_adapter_are_whole(tmp_path: Path) -> None:
    """What is read does not depend on the file any more."""
    tensors = make_tensors()
    adapter = read_adapter(write(tmp_path, tensors=tensors), SHAPES, AS_NAMED)
    write(tmp_path, tensors={name: torch.zeros_like(tensor) for name, tensor in tensors.items()})

    (update,) = adapter.updates.values()
    assert torch.equal(update.b, tensors[f"{PREFIX}q_proj.lora_B.weight"])
    assert not load_file(tmp_path / WEIGHTS)[f"{PREFIX}q_proj.lora_B.weight"].any()


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
