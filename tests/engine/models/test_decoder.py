"""Parity with transformers, in float32, of checkpoints that transformers wrote."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.conftest import TinyCheckpoints
from tests.engine.loaded import load
from tests.engine.models.logits import NUM_TOKENS, assert_logits, assert_same, make_ids
from tests.engine.models.oracle import Oracle
from tests.engine.models.paged_model import PagedModel
from tests.tiny_experts import EXPERT_FAMILIES
from tests.tiny_models import FAMILIES


@pytest.mark.parametrize("family", [*FAMILIES, *EXPERT_FAMILIES])
def test_logits_equal_those_of_transformers(family: str, tiny_checkpoints: TinyCheckpoints) -> None:
    path = tiny_checkpoints(family)

    assert_logits(load(path), Oracle(path))


def test_dynamic_rope_past_the_original_length_is_what_decoding_token_by_token_gives(
    tiny_checkpoints: TinyCheckpoints,
) -> None:
    path, ids = tiny_checkpoints("dynamic-rope"), make_ids(110)

    logits = PagedModel(load(path)).step(a=ids)["a"]

    assert_same(logits, Oracle(path, stepwise=True).logits(ids))


def test_old_spelling_of_rope_settings_gives_the_same_model(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    path, ids = tiny_checkpoints("llama3-rope"), make_ids(NUM_TOKENS)
    old = tmp_path / "old"
    shutil.copytree(path, old)
    raw = json.loads((old / "config.json").read_text())
    scaling = raw.pop("rope_parameters")
    raw["rope_theta"], raw["rope_scaling"] = scaling.pop("rope_theta"), scaling
    (old / "config.json").write_text(json.dumps(raw))

    logits = PagedModel(load(old)).step(a=ids)["a"]

    assert torch.equal(logits, PagedModel(load(path)).step(a=ids)["a"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_float32(
    dtype: torch.dtype, tiny_checkpoints: TinyCheckpoints
) -> None:
    path, ids = tiny_checkpoints("qwen3"), make_ids(NUM_TOKENS)

    logits = PagedModel(load(path, dtype)).step(a=ids)["a"]

    exact = Oracle(path).logits(ids)
    assert logits.dtype == torch.float32
    # bfloat16 has 8 bits: errors of a few per cent of a logit's spread over three layers.
    assert (logits - exact).abs().mean() < 0.05 * exact.std()


@pytest.mark.parametrize("family", ["llama", "qwen3-moe", "gpt-oss", "deepseek-v3"])
def test_packed_weights_change_no_logit(family: str, tiny_checkpoints: TinyCheckpoints) -> None:
    path, ids = tiny_checkpoints(family), make_ids(NUM_TOKENS)
    exact = PagedModel(load(path)).step(a=ids)["a"]
    model = load(path, torch.bfloat16)
    plain = PagedModel(model).step(a=ids)["a"]

    model.pack()
    packed = PagedModel(model).step(a=ids)["a"]

    # Without packing for this machine, the two are equal.
    torch.testing.assert_close(packed, plain, atol=0.05, rtol=0)
    # A token that is routed to another expert differs much; most are not.
    assert (packed - exact).abs().median() < 0.12 * exact.std()
