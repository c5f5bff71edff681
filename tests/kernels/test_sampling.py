"""Filters and draws against brute-force references written with a full sort."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from remora.engine.sampling.token_sampler import SamplingKernels
from remora.kernels import sampling
from tests.sampling_kernels import NAMES, racing_times, sampling_kernels

# Vocabulary sizes around the block width, the first prefilters and several blocks.
VOCAB_SIZES = st.sampled_from([1, 2, 63, 64, 65, 127, 128, 129, 300, 512, 640, 1500])
# Numbers up to 16 in float32, a unit in the last place of which is 1e-6.
LOGPROB_TOLERANCE = 4e-6
# Times of a race, as a fraction of them: weights and numbers are float32.
CLOSE = 1e-5


TIES = {"seed": 0, "vocab_size": 300, "step": 1.0, "spread": 1.0, "temperature": 1.0, "min_p": 0.0}


def make_logits(seed: int, vocab_size: int, step: float, spread: float) -> npt.NDArray[np.float32]:
    """Normal logits on a grid of `step`, so that equal values are common."""
    values = np.random.default_rng(seed).normal(size=vocab_size) * spread
    return (np.round(values / step) * step).astype(np.float32)


def make_kept_probs(
    logits: npt.NDArray[np.float32], *, temperature: float, top_k: int, top_p: float, min_p: float
) -> npt.NDArray[np.float64]:
    """Probabilities after all filters, by a full sort; equals of the last kept token stay."""
    scaled = logits.astype(np.float64) / temperature
    probs = np.exp(scaled - scaled.max())
    if top_k:
        probs[scaled < np.sort(scaled)[::-1][min(top_k, len(scaled)) - 1]] = 0
    probs /= probs.sum()
    if top_p < 1:
        order = np.sort(probs)[::-1]
        mass = np.cumsum(order)
        assume(np.abs(mass - top_p).min() > 1e-5)
        probs[probs < order[np.searchsorted(mass, top_p)]] = 0
    assume(min_p == 0 or np.abs(np.log(probs[probs > 0] / probs.max() / min_p)).min() > 1e-4)
    kept: npt.NDArray[np.float64] = np.where(probs < min_p * probs.max(), 0, probs)
    kept /= kept.sum()
    return kept


@pytest.fixture(scope="module", params=NAMES)
def kernels(request: pytest.FixtureRequest) -> SamplingKernels:
    return sampling_kernels(request.param)


def choose(
    kernels: SamplingKernels,
    logits: torch.Tensor,
    keys: npt.ArrayLike = 0,
    *,
    temperature: npt.ArrayLike = 1.0,
    top_k: npt.ArrayLike = 0,
    top_p: npt.ArrayLike = 1.0,
    min_p: npt.ArrayLike = 0.0,
) -> list[int]:
    """Choose from a copy; a single number holds for every row."""

    def per_row(values: npt.ArrayLike, dtype: type[Any]) -> npt.NDArray[Any]:
        return np.array(np.broadcast_to(np.asarray(values, dtype), len(logits)))

    token_ids, is_good = kernels.choose(
        logits.clone(),
        per_row(temperature, np.float32),
        per_row(keys, np.int64),
        top_k=per_row(top_k, np.int64),
        top_p=per_row(top_p, np.float64),
        min_p=per_row(min_p, np.float32),
    )
    assert is_good.all()
    chosen: list[int] = token_ids.tolist()
    return chosen


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    vocab_size=VOCAB_SIZES,
    step=st.sampled_from([1e-3, 0.25, 1.0]),
    spread=st.sampled_from([0.1, 1.0, 6.0]),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 40, 63, 64, 65, 511, 600, 10**6]),
    top_p=st.sampled_from([0.01, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.011, 0.31, 1.0]),
)
# Equals of the last kept token that reach beyond the first 64 candidates, without and with top-k.
@example(**TIES, top_k=0, top_p=0.5)
@example(**TIES, top_k=63, top_p=0.5)
@example(**TIES, top_k=63, top_p=1.0)
def test_of_the_kept_tokens_the_one_that_wins_the_race_is_drawn(
    kernels: SamplingKernels,
    seed: int,
    vocab_size: int,
    step: float,
    spread: float,
    min_p: float,
    **filters: Any,
) -> None:
    logits = make_logits(seed, vocab_size, step, spread)
    probs = make_kept_probs(logits, min_p=min_p if min_p < 1 else 0.0, **filters)
    if min_p == 1.0:
        probs = (logits == logits.max()) / (logits == logits.max()).sum()
    keys = np.random.default_rng(seed).integers(-(2**63), 2**63, 40)
    rows = torch.from_numpy(logits).expand(len(keys), -1)

    drawn = choose(kernels, rows, keys, min_p=min_p, **filters)

    times = racing_times(keys, probs)
    own = np.take_along_axis(times, np.array(drawn)[:, None], 1)[:, 0]
    assert (own <= times.min(1) * (1 + CLOSE)).all()  # infinite, had the token no probability


@pytest.mark.parametrize("key", [0, -1, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("vocab_size", [3, 64, 1000])
def test_a_token_that_alone_has_probability_is_drawn(
    kernels: SamplingKernels, key: int, vocab_size: int
) -> None:
    logits = torch.full((1, vocab_size), -torch.inf)
    logits[0, 1] = 3.0

    whole = choose(kernels, logits, key)
    cut = choose(kernels, logits, key, top_k=2, top_p=0.9, min_p=0.1)

    assert whole == cut == [1]


def test_numbers_are_exponentially_distributed_over_keys_and_over_ids() -> None:
    keys = torch.randint(-(2**62), 2**62, (2000,))
    for found in (
        sampling.exponentials(keys, torch.tensor([17])),
        sampling.exponentials(keys[:1], torch.arange(2000)),
        sampling.exponentials(torch.arange(2000), torch.tensor([0])),
        sampling.exponentials(torch.arange(2000) << 32, torch.tensor([0])),
    ):
        fractions = (1 - (-found.double()).exp()).flatten().sort().values
        distance = (fractions - (torch.arange(2000) + 0.5) / 2000).abs().max()
        assert distance < 2.2 / 2000**0.5  # Kolmogorov and Smirnov's, p = 1e-4


def test_improbable_tokens_keep_their_probability() -> None:
    """Small numbers decide which they are: these must be finer than the fractions of float32."""
    number = sampling.exponentials(torch.arange(4000), torch.arange(1000))  # of 4 million

    for bound in (2.0**-14, 2.0**-18):
        count = int((number < bound).sum())
        mean = number.numel() * bound
        assert abs(count - mean) < 5 * mean**0.5
    assert float(number.min()) < 2.0**-20


def test_draws_follow_the_distribution(kernels: SamplingKernels) -> None:
    probs = np.array([0.02, 0.3, 0.08, 0.2, 0.15, 0.05, 0.1, 0.1])
    num_draws = 40_000
    keys = np.random.default_rng(7).integers(-(2**63), 2**63, num_draws)
    logits = torch.from_numpy(np.log(probs)).float().repeat(num_draws, 1)

    counts = np.bincount(choose(kernels, logits, keys), minlength=8)

    chi_square = ((counts - num_draws * probs) ** 2 / (num_draws * probs)).sum()
    assert chi_square < 29.9  # 7 degrees of freedom, p = 1e-4


@settings(max_examples=12)
@given(seed=st.integers(0, 2**32), vocab_size=st.sampled_from([100, 5000, 40_001]))
def test_a_row_draws_the_same_alone_and_in_any_company(
    kernels: SamplingKernels, seed: int, vocab_size: int
) -> None:
    rng = np.random.default_rng(seed)
    num_rows = 9
    logits = torch.from_numpy(rng.normal(size=(num_rows, vocab_size)).astype(np.float32)) * 3
    keys = rng.integers(-(2**63), 2**63, num_rows)
    params = {
        "temperature": rng.choice([0.0, 0.3, 1.0, 2.5], num_rows),
        "top_k": rng.choice([0, 5, 64, 700], num_rows),
        "top_p": rng.choice([0.3, 0.95, 1.0], num_rows),
        "min_p": rng.choice([0.0, 0.1], num_rows),
    }
    order = rng.permutation(num_rows)

    def choose_some(index: npt.NDArray[Any]) -> list[int]:
        some = {name: values[index] for name, values in params.items()}
        return choose(kernels, logits[index], keys[index], **some)

    together = choose(kernels, logits, keys, **params)
    shuffled = choose_some(order)
    alone = [choose_some(np.array([row]))[0] for row in range(num_rows)]

    assert np.array(together)[order].tolist() == shuffled
    assert together == alone


@given(seed=st.integers(0, 2**32), vocab_size=VOCAB_SIZES)
def test_greedy_rows_take_the_lowest_id_among_equals(
    kernels: SamplingKernels, seed: int, vocab_size: int
) -> None:
    logits = np.random.default_rng(seed).integers(-3, 3, (4, vocab_size)).astype(np.float32)

    assert choose(kernels, torch.from_numpy(logits), temperature=0) == logits.argmax(1).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocab_size", [300, 384])
def test_rows_that_are_not_finite_are_told_apart(
    kernels: SamplingKernels, temperature: float, vocab_size: int
) -> None:
    logits = torch.zeros(5, vocab_size)
    logits[1, 7] = torch.nan
    logits[2, vocab_size - 1] = torch.inf
    logits[3] = -torch.inf
    logits[4] = -torch.inf
    logits[4, vocab_size - 1] = -3.0

    token_ids, is_good = kernels.choose(
        logits,
        np.full(5, temperature, np.float32),
        np.zeros(5, np.int64),
        top_k=np.full(5, 2),
        top_p=np.full(5, 0.9),
        min_p=np.full(5, 0.1, np.float32),
    )

    assert is_good.tolist() == [True, False, False, False, True]
    assert token_ids[[0, 4]].tolist() == [0, vocab_size - 1]


def test_banning_keeps_a_nan_visible() -> None:
    logits = torch.tensor([[1.0, torch.nan]])

    sampling.add_at(
        logits,
        torch.tensor([0, 0]),
        torch.tensor([0, 1]),
        torch.tensor([-torch.inf, -torch.inf]),
    )

    assert logits[0, 0] == -torch.inf
    assert logits[0, 1].isnan()


@given(seed=st.integers(0, 2**32), vocab_size=VOCAB_SIZES, num_top=st.integers(0, 70))
def test_token_logprobs_equal_a_stable_sort_of_log_softmax(
    kernels: SamplingKernels, seed: int, vocab_size: int, num_top: int
) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.integers(-4, 4, (3, vocab_size)).astype(np.float32))
    token_ids = rng.integers(0, vocab_size, 3)

    chosen, ranks, top_ids, top = kernels.token_logprobs(logits, token_ids, num_top)

    expected = torch.log_softmax(logits.double(), 1).numpy()
    own = np.take_along_axis(expected, token_ids[:, None], 1)
    order = (-expected).argsort(axis=1, kind="stable")[:, :num_top]
    np.testing.assert_allclose(chosen[:, None], own, atol=LOGPROB_TOLERANCE)
    assert ranks.tolist() == (1 + (expected > own).sum(1)).tolist()
    assert top_ids.tolist() == order.tolist()
    np.testing.assert_allclose(top, np.take_along_axis(expected, order, 1), atol=LOGPROB_TOLERANCE)


def test_log_probabilities_of_a_broken_row_are_nan_and_harm_no_other(
    kernels: SamplingKernels,
) -> None:
    logits = torch.zeros(2, 300)
    logits[0, 5] = torch.nan

    chosen, _, top_ids, top = kernels.token_logprobs(logits, np.array([1, 2]), 4)

    assert np.isnan(chosen[0])
    assert np.isnan(top[0]).all()
    assert ((top_ids >= 0) & (top_ids < 300)).all()
    assert top_ids[1].tolist() == [0, 1, 2, 3]
    np.testing.assert_allclose(chosen[1], -np.log(300), rtol=1e-6)
