"""Where there are no kernels, tensors are chosen from and described by the torch code."""

from __future__ import annotations

import numpy as np
import torch

from remora.kernels import sampling
from remora.kernels.device_sampling import choose_on_device, token_logprobs_on_device
from remora.kernels.grammar_mask import mask_tokens, mask_tokens_on_device


def test_tokens_are_chosen_by_the_torch_code() -> None:
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(size=(3, 200)).astype(np.float32))
    logits[2, 5] = torch.nan
    temperature = np.array([0, 1, 1], np.float32)
    uniforms, top_p = rng.random(3), np.array([1, 0.5, 1])
    top_k, min_p = np.array([0, 40, 0]), np.zeros(3, np.float32)
    expected = sampling.choose(
        logits.clone(), temperature, uniforms, top_k=top_k, top_p=top_p, min_p=min_p
    )

    ids, is_good = choose_on_device(
        logits,
        torch.from_numpy(temperature),
        torch.from_numpy(uniforms),
        top_k=torch.from_numpy(top_k),
        top_p=torch.from_numpy(top_p),
        min_p=torch.from_numpy(min_p),
    )

    assert ids[:2].tolist() == expected[0][:2].tolist()
    assert is_good.tolist() == [True, True, False]


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
