"""Parity with transformers, in float32, of checkpoints that transformers wrote."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from remora.engine.models.checkpoint import read_config
from remora.engine.models.decoder import DecoderModel
from remora.engine.models.load import load_model
from remora.engine.weights.loader import fill
from remora.engine.weights.safetensors import SafetensorsWeights
from tests.conftest import TinyCheckpoints
from tests.engine.models.paged_model import PagedModel
from tests.tiny_models import FAMILIES, VOCAB_SIZE

# Logits are about 2; what differs is the order of sums in float32.
TOLERANCE = 2e-4
NUM_TOKENS = 60  # more than two windows and three pages; less than dynamic rope's original length


def make_ids(num_tokens: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB_SIZE, (num_tokens,), generator=generator).tolist()


def load(path: Path, dtype: torch.dtype = torch.float32) -> DecoderModel:
    return load_model(path, dtype=dtype, load_format="auto", device="cpu", show_progress=False)


def load_oracle(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.inference_mode()
def oracle_logits(path: Path, token_ids: list[int]) -> Tensor:
    logits: Tensor = load_oracle(path)(torch.tensor([token_ids])).logits[0]
    return logits


def assert_same(logits: Tensor, expected: Tensor) -> None:
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(family: str, tiny_checkpoints: TinyCheckpoints) -> None:
    path, ids = tiny_checkpoints(family), make_ids(NUM_TOKENS)

    logits = PagedModel(load(path)).step(a=ids)["a"]

    assert_same(logits, oracle_logits(path, ids))


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_in_chunks_gives_the_same_logits(
    family: str, tiny_checkpoints: TinyCheckpoints
) -> None:
    path, ids = tiny_checkpoints(family), make_ids(NUM_TOKENS)
    paged = PagedModel(load(path))

    chunks = [ids[0:7], ids[7:8], ids[8:40], ids[40:60]]
    logits = torch.cat([paged.step(a=chunk)["a"] for chunk in chunks])

    assert_same(logits, oracle_logits(path, ids))


@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_token_by_token_gives_the_same_logits(
    family: str, tiny_checkpoints: TinyCheckpoints
) -> None:
    path, ids = tiny_checkpoints(family), make_ids(NUM_TOKENS)
    paged = PagedModel(load(path))

    logits = torch.cat([paged.step(a=[token])["a"] for token in ids])

    assert_same(logits, oracle_logits(path, ids))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mixed_batch_gives_each_sequence_its_own_logits(
    family: str, tiny_checkpoints: TinyCheckpoints
) -> None:
    path = tiny_checkpoints(family)
    one, two, three, four = (make_ids(NUM_TOKENS - 9 * seed, seed) for seed in range(4))
    paged = PagedModel(load(path), page_size=8)
    paged.step(one=one[:-1], two=two[:3])

    step = paged.step(three=three[:20], one=one[-1:], four=four, two=two[3:])
    last = paged.step(two=[7], three=three[20:])

    assert_same(step["one"], oracle_logits(path, one)[-1:])
    assert_same(step["two"], oracle_logits(path, two)[3:])
    assert_same(step["four"], oracle_logits(path, four))
    assert_same(last["two"], oracle_logits(path, [*two, 7])[-1:])
    assert_same(last["three"], oracle_logits(path, three)[20:])


def test_dynamic_rope_past_the_original_length_is_what_decoding_token_by_token_gives(
    tiny_checkpoints: TinyCheckpoints,
) -> None:
    path, ids = tiny_checkpoints("dynamic-rope"), make_ids(110)
    oracle, cache, steps = load_oracle(path), None, []
    with torch.inference_mode():
        for token in ids:
            out = oracle(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            steps.append(out.logits[0])

    logits = PagedModel(load(path)).step(a=ids)["a"]

    assert_same(logits, torch.cat(steps))


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

    exact = oracle_logits(path, ids)
    assert logits.dtype == torch.float32
    # bfloat16 has 8 bits: errors of a few per cent of a logit's spread over three layers.
    assert (logits - exact).abs().mean() < 0.05 * exact.std()


def test_packed_weights_change_no_logit(tiny_checkpoints: TinyCheckpoints) -> None:
    path, ids = tiny_checkpoints("llama-bias"), make_ids(NUM_TOKENS)
    plain = DecoderModel(read_config(path), dtype=torch.bfloat16, device="cpu")
    fill(plain.tensors(), SafetensorsWeights(path), show_progress=False)

    packed = load(path, torch.bfloat16)
    packed.pack()

    logits = PagedModel(packed).step(a=ids)["a"]
    # Where there is nothing to pack for, the two are the same to begin with.
    torch.testing.assert_close(logits, PagedModel(plain).step(a=ids)["a"], atol=0.05, rtol=0)


def test_smollm2_logits_equal_those_of_transformers(smollm2_path: Path) -> None:
    ids = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, *range(1000, 1060)]
    paged = PagedModel(load(smollm2_path))

    logits = torch.cat([paged.step(a=ids[:50])["a"], paged.step(a=ids[50:])["a"]])

    # Logits reach 30 here, over 30 layers.
    expected = oracle_logits(smollm2_path, ids)
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=0)
