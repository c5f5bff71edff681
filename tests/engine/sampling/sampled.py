"""Rows, logits and parameters for tests of the sampler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from remora.engine.sampling.sampler import Sampler
from remora.engine.types import RowInit, SamplingParams

MakeSampler = Callable[..., Sampler]


VOCAB_SIZE, EOS = 96, 5


def make_row(
    row: int, prompt: Sequence[int], outputs: Sequence[int] = (), *, seed: int = 1, **fields: Any
) -> RowInit:
    """Make a row; `fields` as of RowInit and of SamplingParams."""
    of_row = {name: fields.pop(name) for name in RowInit.__dataclass_fields__ if name in fields}
    return RowInit(
        row=row,
        token_ids=np.array([*prompt, *outputs], np.int64),
        num_prompt_tokens=len(prompt),
        seed=seed,
        sampling=SamplingParams(**fields),
        **of_row,
    )


def make_logits(seed: int, num_rows: int = 1, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * 2


def rows(*numbers: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(numbers, np.int32)


def make_peak(*ids: int, height: float = 9.0) -> torch.Tensor:
    """Logits of one row whose greatest are `ids`, falling."""
    logits = torch.zeros(1, VOCAB_SIZE)
    for place, token_id in enumerate(ids):
        logits[0, token_id] = height - place
    return logits


PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.5, 1.0, 1.7]),
        "top_k": st.sampled_from([0, 1, 7, 70]),
        "top_p": st.sampled_from([0.3, 0.9, 1.0]),
        "min_p": st.sampled_from([0.0, 0.05]),
        "typical_p": st.sampled_from([1.0, 0.4]),
        "presence_penalty": st.sampled_from([0.0, 1.5]),
        "frequency_penalty": st.sampled_from([0.0, 0.7]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "logit_bias": st.sampled_from([{}, {3: 2.0, 40: -100.0}]),
        "min_tokens": st.sampled_from([0, 3]),
        "stop_token_ids": st.sampled_from([(), (7, 9)]),
        "logprobs": st.sampled_from([None, 0, 4]),
    }
)
