"""Folded factors leave a block's function as it is, and lower the loss of rounding."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from remora.engine.models.decoder import DecoderBlock
from remora.engine.quantise.awq import folds, scale_inputs
from remora.engine.quantise.blocks import Calibration
from remora.engine.quantise.gptq import loss
from remora.engine.quantise.search import Scheme, round_to_grid, search_grid
from remora.engine.quantise.source import Checkpoint
from tests.conftest import TinyCheckpoints
from tests.engine.models.families import make_family
from tests.engine.models.logits import make_ids

SCHEME = Scheme(bits=4, group_size=32, symmetric=False, scale_dtype=torch.float32)
# Norms before linears, GQA, biases; a parallel block; a weight stored as its difference from 1.
NUM_FOLDS = {"llama-bias": 4, "cohere": 2, "gemma": 4}


def opened(path: Path) -> tuple[Checkpoint, Calibration, DecoderBlock]:
    checkpoint = Checkpoint(path)
    calibration = Calibration(checkpoint.config, [make_ids(90)], checkpoint.renamed)
    block = DecoderBlock(checkpoint.config, 0, dtype=torch.float32, device="cpu")
    checkpoint.fill(dict(block.tensors("model.layers.0.")))
    return checkpoint, calibration, block


@pytest.mark.parametrize("family", NUM_FOLDS)
@torch.inference_mode()
def test_scaled_inputs_leave_the_block_as_it_was(
    family: str, tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    is_tiny = family == "llama-bias"
    path = tiny_checkpoints(family) if is_tiny else make_family(tmp_path, family)[0]
    _, calibration, block = opened(path)
    before = copy.copy(calibration)
    before._streams = list(calibration._streams)
    before.advance(0, block)
    found = list(folds(block, torch.bfloat16))
    plain = [fold.linear.weight.clone() for fold in found]

    for fold in found:
        (gram,) = calibration.grams(0, block, [fold.linear])
        scale_inputs(fold, gram, SCHEME)

    after = calibration
    after.advance(0, block)
    assert len(found) == NUM_FOLDS[family]
    assert not any(
        torch.equal(one, fold.linear.weight) for one, fold in zip(plain, found, strict=True)
    )
    torch.testing.assert_close(after._streams[0], before._streams[0], rtol=1e-3, atol=1e-3)


@torch.inference_mode()
def test_inputs_of_unequal_size_lose_less_when_scaled(tiny_checkpoints: TinyCheckpoints) -> None:
    _, calibration, block = opened(tiny_checkpoints("llama"))
    fold = next(iter(folds(block, torch.float32)))
    assert block.attention_norm is not None
    block.attention_norm.weight[::16] *= 30

    def lost() -> float:
        weight = fold.linear.weight
        (gram,) = calibration.grams(0, block, [fold.linear])
        return float(
            loss(weight, round_to_grid(weight, search_grid(weight, SCHEME), SCHEME), gram).sum()
        )

    before = lost()
    (gram,) = calibration.grams(0, block, [fold.linear])
    scale_inputs(fold, gram, SCHEME)

    assert lost() < 0.6 * before
