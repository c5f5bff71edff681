"""Compares logits of our models with those of transformers, in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from remora.engine.fallback.model import FallbackModel
from remora.engine.models.decoder import DecoderModel
from tests.engine.models.oracle import Oracle
from tests.engine.models.paged_model import PagedModel
from tests.tiny_models import VOCAB_SIZE

# Logits are about 2, hidden states up to 50 (gemma); what differs is the order of sums in float32.
TOLERANCE = 4e-4
NUM_TOKENS = 60  # more than two windows and three pages; less than dynamic rope's original length


def make_ids(num_tokens: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB_SIZE, (num_tokens,), generator=generator).tolist()


def assert_same(logits: Tensor, expected: Tensor) -> None:
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


def assert_logits(model: DecoderModel | FallbackModel, oracle: Oracle) -> None:
    """Compare logits of tokens at once, in chunks, one by one, and beside other sequences."""
    paged = PagedModel(model, page_size=8)
    ids, other = make_ids(NUM_TOKENS), make_ids(30, seed=1)
    expected, of_other = oracle.logits(ids), oracle.logits(other)
    assert expected.std() > 0.01

    whole = paged.step(whole=ids)["whole"]
    chunks = [paged.step(cut=part)["cut"] for part in (ids[:7], ids[7:8], ids[8:40], ids[40:59])]
    one_by_one = [paged.step(one=[token])["one"] for token in ids[:59]]
    first = paged.step(one=ids[59:], other=other[:20], new=ids[:31])
    last = paged.step(cut=ids[59:], other=other[20:], new=ids[31:])

    assert_same(whole, expected)
    assert_same(torch.cat([*chunks, last["cut"]]), expected)
    assert_same(torch.cat([*one_by_one, first["one"]]), expected)
    assert_same(torch.cat([first["other"], last["other"]]), of_other)
    assert_same(torch.cat([first["new"], last["new"]]), expected)
