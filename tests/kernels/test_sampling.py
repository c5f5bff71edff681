"""Filters and draws against brute-force references written with a full sort."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from remora.kernels import sampling

# Vocabulary sizes around the block width, the first prefilters and several blocks.
VOCAB_SIZES = st.sampled_from([1, 2, 63, 64, 65, 127, 128, 129, 300, 512, 640, 1500])


def make_logits(seed: int, vocab_size: int, step: float, spread: float) -> npt.NDArray[np.float32]:
    """Normal logits on a grid of `step`, so that equal values are common."""
    values = np.random.default_rng(seed).normal(size=vocab_size) * spread
    return (np.round(values / step) * step).astype(np.float32)


def make_kept_probs(
    logits: npt.NDArray[np.float32], temperature: float, top_k: int, top_p: float, min_p: float
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


def draw_truncated(
    logits: torch.Tensor,
    uniforms: torch.Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> torch.Tensor:
    num_rows = len(logits)
    return sampling.draw_truncated(
        logits.clone(),
        torch.full((num_rows,), temperature),
        uniforms,
        top_k=torch.full((num_rows,), top_k),
        top_p=torch.full((num_rows,), top_p, dtype=torch.float64),
        min_p=torch.full((num_rows,), min_p),
    )


@settings(max_examples=150, deadline=None)
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
@example(
    seed=0, vocab_size=300, step=1.0, spread=1.0, temperature=1.0, top_k=0, top_p=0.5, min_p=0.0
)
@example(
    seed=0, vocab_size=300, step=1.0, spread=1.0, temperature=1.0, top_k=63, top_p=0.5, min_p=0.0
)
@example(
    seed=0, vocab_size=300, step=1.0, spread=1.0, temperature=1.0, top_k=63, top_p=1.0, min_p=0.0
)
def test_every_kept_token_and_no_other_can_be_drawn(
    seed: int,
    vocab_size: int,
    step: float,
    spread: float,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> None:
    logits = make_logits(seed, vocab_size, step, spread)
    probs = make_kept_probs(logits, temperature, top_k, top_p, min_p if min_p < 1 else 0.0)
    if min_p == 1.0:
        probs = (logits == logits.max()) / (logits == logits.max()).sum()
    kept = np.flatnonzero(probs > 1e-5)[:: max(1, vocab_size // 60)]
    middles = (np.cumsum(probs) - probs / 2)[kept]
    rows = torch.from_numpy(logits).expand(len(kept), -1)

    drawn = draw_truncated(rows, torch.from_numpy(middles), temperature, top_k, top_p, min_p)

    assert drawn.tolist() == kept.tolist()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    vocab_size=VOCAB_SIZES,
    step=st.sampled_from([1e-3, 1.0]),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
)
def test_untruncated_draw_inverts_the_running_sum(
    seed: int, vocab_size: int, step: float, temperature: float
) -> None:
    logits = make_logits(seed, vocab_size, step, 2.0)
    probs = make_kept_probs(logits, temperature, 0, 1.0, 0.0)
    likely = np.flatnonzero(probs > 1e-5)
    middles = (np.cumsum(probs) - probs / 2)[likely]
    rows = torch.from_numpy(logits).repeat(len(likely), 1)

    drawn = sampling.draw(rows, torch.full((len(likely),), temperature), torch.from_numpy(middles))

    assert drawn.tolist() == likely.tolist()


@pytest.mark.parametrize("uniform", [0.0, np.nextafter(1.0, 0.0)])
@pytest.mark.parametrize("vocab_size", [3, 64, 1000])
def test_extreme_numbers_draw_a_token_that_has_probability(uniform: float, vocab_size: int) -> None:
    logits = torch.full((1, vocab_size), -torch.inf)
    logits[0, 1] = 3.0
    fraction = torch.tensor([uniform], dtype=torch.float64)

    whole = sampling.draw(logits.clone(), torch.ones(1), fraction)
    cut = draw_truncated(logits, fraction, 1.0, 2, 0.9, 0.1)

    assert whole.tolist() == cut.tolist() == [1]


def test_draws_follow_the_distribution() -> None:
    probs = torch.tensor([0.02, 0.3, 0.08, 0.2, 0.15, 0.05, 0.1, 0.1], dtype=torch.float64)
    num_draws = 40_000
    uniforms = torch.rand(
        num_draws, dtype=torch.float64, generator=torch.Generator().manual_seed(7)
    )
    logits = probs.log().float().repeat(num_draws, 1)

    counts = torch.bincount(sampling.draw(logits, torch.ones(num_draws), uniforms), minlength=8)

    chi_square = ((counts - num_draws * probs) ** 2 / (num_draws * probs)).sum()
    assert chi_square < 29.9  # 7 degrees of freedom, p = 1e-4


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32), vocab_size=st.sampled_from([100, 5000, 40_001]))
def test_a_row_draws_the_same_alone_and_in_any_company(seed: int, vocab_size: int) -> None:
    rng = np.random.default_rng(seed)
    num_rows = 9
    logits = torch.from_numpy(rng.normal(size=(num_rows, vocab_size)).astype(np.float32)) * 3
    temperature = torch.from_numpy(rng.uniform(0.2, 3, num_rows).astype(np.float32))
    uniforms = torch.from_numpy(rng.random(num_rows))
    filters = {
        "top_k": torch.from_numpy(rng.choice([0, 5, 64, 700], num_rows)),
        "top_p": torch.from_numpy(rng.choice([0.3, 0.95, 1.0], num_rows)),
        "min_p": torch.from_numpy(rng.choice([0.0, 0.1], num_rows).astype(np.float32)),
    }
    order = torch.from_numpy(rng.permutation(num_rows))

    together = sampling.draw_truncated(logits.clone(), temperature, uniforms, **filters)
    shuffled = sampling.draw_truncated(
        logits[order],
        temperature[order],
        uniforms[order],
        **{name: values[order] for name, values in filters.items()},
    )
    alone = [
        sampling.draw_truncated(
            logits[row : row + 1].clone(),
            temperature[row : row + 1],
            uniforms[row : row + 1],
            **{name: values[row : row + 1] for name, values in filters.items()},
        ).item()
        for row in range(num_rows)
    ]
    whole = sampling.draw(logits.clone(), temperature, uniforms)
    whole_alone = [
        sampling.draw(
            logits[row : row + 1].clone(), temperature[row : row + 1], uniforms[row : row + 1]
        ).item()
        for row in range(num_rows)
    ]

    assert together[order].tolist() == shuffled.tolist()
    assert together.tolist() == alone
    assert whole.tolist() == whole_alone


@settings(deadline=None)
@given(seed=st.integers(0, 2**32), vocab_size=VOCAB_SIZES)
def test_argmax_takes_the_lowest_id_among_equals(seed: int, vocab_size: int) -> None:
    logits = np.random.default_rng(seed).integers(-3, 3, (4, vocab_size)).astype(np.float32)

    values, ids = sampling.argmax(torch.from_numpy(logits))

    assert ids.tolist() == logits.argmax(1).tolist()
    assert values.tolist() == logits.max(1).tolist()


def test_argmax_shows_which_rows_are_not_finite() -> None:
    logits = torch.zeros(4, 300)
    logits[1, 7] = torch.nan
    logits[2, 299] = torch.inf
    logits[3] = -torch.inf

    values, _ = sampling.argmax(logits)

    assert values.isfinite().tolist() == [True, False, False, False]


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


@settings(deadline=None)
@given(seed=st.integers(0, 2**32), vocab_size=VOCAB_SIZES, num_top=st.integers(0, 70))
def test_token_logprobs_equal_a_stable_sort_of_log_softmax(
    seed: int, vocab_size: int, num_top: int
) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.integers(-4, 4, (3, vocab_size)).astype(np.float32))
    token_ids = torch.from_numpy(rng.integers(0, vocab_size, 3))

    chosen, ranks, top_ids, top = sampling.token_logprobs(logits, token_ids, num_top)

    expected = torch.log_softmax(logits, 1)
    own = expected.gather(1, token_ids[:, None])
    order = expected.argsort(dim=1, descending=True, stable=True)[:, :num_top]
    assert torch.equal(chosen[:, None], own)
    assert ranks.tolist() == (1 + (expected > own).sum(1)).tolist()
    assert top_ids.tolist() == order.tolist()
    assert torch.equal(top, expected.gather(1, order))
