"""Filters of rows against transformers' warpers, and the rule of the infill filter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from remora.configs.errors import InvalidSampling
from remora.engine.sampling.params import SamplingParams, sequence_seed
from remora.engine.sampling.row_filters import RowFilter
from tests.engine.sampling.sampled import VOCAB_SIZE, MakeSampler, make_row, rows


def filtered(logits: torch.Tensor, *pieces: bytes, **params: Any) -> list[int]:
    """Return the tokens that a filter leaves; token 0 ends the output."""
    sampling = SamplingParams(**params)
    left = logits.clone()
    RowFilter(sampling, sampling.temperature, lambda id_: pieces[id_], [0]).run(left)
    return (left > -torch.inf).nonzero().flatten().tolist()


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 1000),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 5]),
    top_p=st.sampled_from([1.0, 0.7]),
    min_p=st.sampled_from([0.0, 0.1]),
    mass=st.sampled_from([0.05, 0.5, 0.95]),
)
def test_typical_equals_transformers(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, mass: float
) -> None:
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(seed)) * 3
    warpers: list[Any] = [TemperatureLogitsWarper(temperature)]
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [MinPLogitsWarper(min_p)] if min_p else []
    warpers += [TypicalLogitsWarper(mass)]
    wanted = LogitsProcessorList(warpers)(torch.zeros(1, 1, dtype=torch.int64), logits.clone())

    found = filtered(
        logits[0], temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, typical_p=mass
    )

    assert found == (wanted[0] > -torch.inf).nonzero().flatten().tolist()


def of_shares(*shares: float) -> torch.Tensor:
    return torch.tensor(shares).log()


@pytest.mark.parametrize(
    ("shares", "pieces", "kept"),
    [
        ((0.0, 0.55, 0.35, 0.1), (b"", b"a", b"b", b"c"), [1, 2]),
        # Beginnings count for the likelier of the two.
        ((0.0, 0.3, 0.35, 0.35), (b"", b"a", b"ab", b"c"), [2, 3]),
        ((0.0, 0.15, 0.1, 0.6, 0.15), (b"", b"x", b"xy", b"c", b"d"), [3]),
        # The end is likelier than all text, counted for each candidate.
        ((0.1, 0.3, 0.3, 0.3), (b"", b"a", b"b", b"c"), [0]),
        ((0.01, 0.7, 0.29), (b"", b"a", b"b"), [1]),
        # No text is likely enough: the end if there is one, else the likeliest.
        ((0.001, *[0.1] * 10), (b"", *(bytes([97 + i]) for i in range(10))), [0]),
        ((0.0, 0.19, *[0.09] * 9), (b"", *(bytes([97 + i]) for i in range(10))), [1]),
        ((1.0, 0.0), (b"", b"a"), [0]),
    ],
)
def test_infill_prefers_text_that_is_likely_and_its_end(
    shares: tuple[float, ...], pieces: tuple[bytes, ...], kept: list[int]
) -> None:
    assert filtered(of_shares(*shares), *pieces, infill=True) == kept


@pytest.mark.parametrize("params", [{"typical_p": 0.2}, {"infill": True}])
def test_a_row_draws_from_what_its_filter_leaves(
    make_sampler: MakeSampler, params: dict[str, Any]
) -> None:
    logits = torch.full((1, VOCAB_SIZE), -torch.inf)
    logits[0, [20, 30, 40]] = of_shares(0.55, 0.4, 0.05)
    sampler = make_sampler(make_row(0, [1], top_k=2, **params), make_row(1, [1], temperature=0.0))

    drawn = set()
    for _ in range(60):
        sampled = sampler.sample(logits.repeat(2, 1), rows(0, 1))
        drawn.add(sampled.token_ids[0].item())
        assert sampled.token_ids[1].item() == 20
    assert drawn <= {20, 30}
    sampler.drop_row(0)
    sampler.add_row(make_row(0, [1]))
    drawn = {sampler.sample(logits.clone(), rows(0)).token_ids.item() for _ in range(200)}
    assert drawn == {20, 30, 40}


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("params", [{"typical_p": 0.2}, {"infill": True}])
def test_logits_that_are_not_finite_are_still_found(
    make_sampler: MakeSampler, params: dict[str, Any], bad: float
) -> None:
    sampler = make_sampler(make_row(0, [1], **params))
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 3] = bad
    assert sampler.sample(logits, rows(0)).bad_rows


@pytest.mark.parametrize("value", [0.0, -0.1, 1.1])
def test_a_mass_beyond_its_range_is_refused(value: float) -> None:
    with pytest.raises(InvalidSampling):
        SamplingParams(typical_p=value)


def test_seeds_of_sequences_differ_and_stay_in_range() -> None:
    seeds = {sequence_seed(2**64 - 1, index) for index in range(16)}
    assert len(seeds) == 16
    assert max(seeds) < 2**64
    assert np.uint64(sequence_seed(7, 0)) == 7
