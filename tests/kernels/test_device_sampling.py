"""Where there are no kernels, tensors are chosen from and described by the torch code."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from remora.kernels import sampling
from remora.kernels.device_sampling import choose_on_device, token_logprobs_on_device
from remora.kernels.grammar_mask import mask_tokens, mask_tokens_on_device
from remora.kernels.sampling import NO_FAULT, NOT_FINITE


def test_tokens_are_chosen_by_the_torch_code() -> None:
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(size=(3, 200)).astype(np.float32))
    logits[2, 5] = torch.nan
    params: dict[str, Any] = {
        "temperature": np.array([0, 1, 1], np.float32),
        "keys": rng.integers(-(2**63), 2**63, 3),
        "top_k": np.array([0, 40, 0]),
        "top_p": np.array([1, 0.5, 1]),
        "min_p": np.zeros(3, np.float32),
    }
    expected, _ = sampling.choose(logits.clone(), **params)

    on_device = {name: torch.from_numpy(values) for name, values in params.items()}
    ids, faults = choose_on_device(logits, **on_device)

    assert ids[:2].tolist() == expected[:2].tolist()
    assert faults.tolist() == [NO_FAULT, NO_FAULT, NOT_FINITE]


def test_tokens_are_described_by_the_torch_code() -> None:
    logits, ids = torch.arange(10.0)[None], np.array([7])

    described = token_logprobs_on_device(logits, torch.from_numpy(ids), 2)

    expected = sampling.token_logprobs(logits, ids, 2)
    for place in range(4):
        assert described[place].numpy().tolist() == expected[place].tolist()


def test_tokens_are_masked_by_the_torch_code() -> None:
    logits, lines = torch.zeros(2, 40), np.array([1])
    words = np.array([[5, 1]], np.int32)
    expected = logits.clone()
    mask_tokens(expected, lines, words)

    mask_tokens_on_device(logits, torch.from_numpy(lines), torch.from_numpy(words))

    assert torch.equal(logits, expected)
    assert logits[1].isfinite().nonzero().flatten().tolist() == [0, 2, 32]
