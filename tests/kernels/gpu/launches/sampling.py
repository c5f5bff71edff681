"""Launches of sampling, for the vocabularies of Llama-3.1 and Gemma 3."""

from __future__ import annotations

from functools import partial

import torch

from remora.kernels.device_sampling import choose_on_device, token_logprobs_on_device
from remora.kernels.grammar_mask import mask_tokens_on_device
from remora.kernels.sampling import add_at, penalize
from tests.kernels.gpu.devices import empty

ROWS = 64
INTS, FLOATS, DOUBLES = (
    empty(ROWS, dtype=torch.int64),
    empty(ROWS),
    empty(ROWS, dtype=torch.float64),
)


def choose(vocab_size: int) -> None:
    filters = {"top_k": INTS, "top_p": DOUBLES, "min_p": FLOATS}
    choose_on_device(empty(ROWS, vocab_size), FLOATS, INTS, **filters)


def edit(vocab_size: int) -> None:
    logits = empty(ROWS, vocab_size)
    mask_tokens_on_device(logits, INTS, empty(ROWS, -(-vocab_size // 32), dtype=torch.int32))
    add_at(logits, INTS, INTS, FLOATS)
    penalties = {"repetition": FLOATS, "presence": FLOATS, "frequency": FLOATS}
    penalize(logits, INTS, INTS, INTS, **penalties)


LAUNCHES = {
    "choose 128256": partial(choose, 128256),
    "choose 262144": partial(choose, 262144),
    "describe 128256": partial(token_logprobs_on_device, empty(ROWS, 128256), INTS, 20),
    "edit 151936": partial(edit, 151936),
}
