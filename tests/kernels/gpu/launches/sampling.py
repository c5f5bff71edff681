"""Launches of sampling, for the vocabularies of Llama-3.1 and Gemma 3."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from remora.kernels.device_sampling import choose_on_device, token_logprobs_on_device
from remora.kernels.grammar_mask import mask_tokens_on_device
from remora.kernels.sampling import add_at, penalize

ROWS = 64


def make_logits(vocab_size: int) -> Tensor:
    return torch.empty((ROWS, vocab_size), dtype=torch.float32, device="meta")


def rows(dtype: torch.dtype) -> Tensor:
    return torch.empty(ROWS, dtype=dtype, device="meta")


def choose(vocab_size: int) -> None:
    choose_on_device(
        make_logits(vocab_size),
        rows(torch.float32),
        rows(torch.float64),
        top_k=rows(torch.int64),
        top_p=rows(torch.float64),
        min_p=rows(torch.float32),
    )


def describe(vocab_size: int) -> None:
    token_logprobs_on_device(make_logits(vocab_size), rows(torch.int64), 20)


def edit(vocab_size: int) -> None:
    logits, ints, floats = make_logits(vocab_size), rows(torch.int64), rows(torch.float32)
    words = torch.empty((ROWS, -(-vocab_size // 32)), dtype=torch.int32, device="meta")
    mask_tokens_on_device(logits, ints, words)
    add_at(logits, ints, ints, floats)
    penalize(logits, ints, ints, ints, repetition=floats, presence=floats, frequency=floats)


LAUNCHES: dict[str, Callable[[], object]] = {
    "choose 128256": lambda: choose(128256),
    "choose 262144": lambda: choose(262144),
    "describe 128256": lambda: describe(128256),
    "edit 151936": lambda: edit(151936),
}
