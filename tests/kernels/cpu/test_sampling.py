"""Native sampling against the torch reference, row by row, for every instruction set."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from remora.kernels import sampling as reference
from remora.kernels.cpu.build import InstructionSet
from remora.kernels.cpu.sampling import NativeSampling
from tests.kernels.test_sampling import CLOSE, choose
from tests.sampling_kernels import native_sampling, racing_times

# Both weigh tokens with float32 exponentials, so their running sums part by a few 1e-7 of the mass.
ROUNDING = 2e-6


@pytest.fixture(scope="module", params=[None, *InstructionSet], ids=str)
def native(request: pytest.FixtureRequest) -> NativeSampling:
    return native_sampling(request.param)


def make_rows(seed: int, num_rows: int) -> dict[str, npt.NDArray[Any]]:
    rng = np.random.default_rng(seed)
    return {
        "temperature": rng.choice([0, 0.3, 0.8, 1, 2.5], num_rows).astype(np.float32),
        "top_k": rng.choice([0, 0, 1, 5, 64, 700, 10**6], num_rows),
        "top_p": rng.choice([0.01, 0.5, 0.9, 0.999, 1.0, 1.0], num_rows),
        "min_p": rng.choice([0, 0, 0.02, 0.5, 1], num_rows).astype(np.float32),
    }


def make_logits(seed: int, shape: tuple[int, int], spread: float, step: float) -> torch.Tensor:
    """Normal logits; with a `step`, on a grid, so that equal values are common."""
    values = np.random.default_rng(seed).normal(size=shape) * spread
    if step:
        values = np.round(values / step) * step
    return torch.from_numpy(values.astype(np.float32))


def top_p_is_clear(logits: npt.NDArray[np.float32], row: dict[str, Any]) -> bool:
    """Whether no border between two tokens is so close to top_p that rounding decides."""
    if row["top_p"] == 1 or row["temperature"] == 0:
        return True
    falling = np.sort(logits / row["temperature"])[::-1].astype(np.float64)
    if 0 < row["top_k"] < len(falling):
        falling = falling[falling >= falling[row["top_k"] - 1]]
    mass = np.exp(falling - falling[0]).cumsum()
    return bool(np.abs(mass / mass[-1] - row["top_p"]).min() > ROUNDING)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    vocab_size=st.sampled_from([1, 5, 127, 128, 129, 1000, 5000, 49_152]),
    spread=st.sampled_from([1.0, 3.0, 8.0]),
    step=st.sampled_from([0.0, 0.5]),
)
def test_the_token_is_the_references_unless_rounding_at_a_border_decides(
    native: NativeSampling, seed: int, vocab_size: int, spread: float, step: float
) -> None:
    num_rows = 6
    logits = make_logits(seed, (num_rows, vocab_size), spread, step)
    params = make_rows(seed, num_rows)
    keys = np.random.default_rng(seed).integers(-(2**63), 2**63, num_rows)
    clear = np.array(
        [
            top_p_is_clear(logits[row].numpy(), {name: each[row] for name, each in params.items()})
            for row in range(num_rows)
        ]
    )

    before = logits.clone()

    token_ids, is_good = native.choose(logits, keys=keys, **params)

    assert torch.equal(logits, before)
    expected, _ = reference.choose(logits.clone(), keys=keys, **params)
    assert is_good.all()
    for row in clear.nonzero()[0]:
        if token_ids[row] != expected[row]:
            heat = params["temperature"][row]
            assert heat > 0
            weights = np.exp(logits[row].double().numpy() / heat)
            times = racing_times(keys[row : row + 1], weights)[0]
            assert times[token_ids[row]] == pytest.approx(times[expected[row]], rel=CLOSE)


@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**32),
    vocab_size=st.sampled_from([5, 129, 5000, 49_152]),
    spread=st.sampled_from([1.0, 8.0]),
    step=st.sampled_from([0.0, 0.5]),
    num_top=st.sampled_from([0, 1, 20, 1024]),
)
def test_log_probabilities_are_exact_and_ranks_the_references(
    native: NativeSampling, seed: int, vocab_size: int, spread: float, step: float, num_top: int
) -> None:
    logits = make_logits(seed, (4, vocab_size), spread, step)
    token_ids = np.random.default_rng(seed).integers(0, vocab_size, 4)

    chosen, ranks, top_ids, top = native.token_logprobs(logits, token_ids, num_top)

    expected = reference.token_logprobs(logits, token_ids, num_top)
    # Numbers up to 70, of which float32 holds 7 digits. The reference sums in float32 as well, and
    # of 49,152 numbers in another order.
    exact = logits.double().log_softmax(-1).numpy()
    np.testing.assert_allclose(chosen, exact[range(4), token_ids], rtol=1e-6, atol=1e-5)
    assert ranks.tolist() == expected[1].tolist()
    assert top_ids.tolist() == expected[2].tolist()
    np.testing.assert_allclose(top, np.take_along_axis(exact, top_ids, 1), rtol=1e-6, atol=1e-5)
    assert [each.dtype for each in (chosen, ranks, top_ids, top)] == [
        each.dtype for each in expected
    ]


@pytest.mark.parametrize("filters", [{"top_k": 700}, {"top_p": 0.9}, {"min_p": 1e-3}])
def test_any_number_of_threads_chooses_the_same(filters: dict[str, float]) -> None:
    num_rows = 33
    logits = make_logits(1, (num_rows, 5000), 2.0, 0.0)
    keys = np.random.default_rng(2).integers(-(2**63), 2**63, num_rows)

    first, *others = (
        choose(native_sampling(num_threads=num_threads), logits, keys, **filters)
        for num_threads in (1, 2, 3)
    )

    assert others == [first, first]


def test_rows_may_lie_apart_and_what_is_between_them_is_not_read() -> None:
    apart = torch.full((3, 400), torch.nan)
    apart[:, :300] = make_logits(3, (3, 300), 2.0, 0.0)
    params = make_rows(5, 3)
    keys = np.arange(3)

    chosen, is_good = native_sampling().choose(apart[:, :300], keys=keys, **params)

    together, _ = native_sampling().choose(apart[:, :300].contiguous(), keys=keys, **params)
    assert is_good.all()
    assert chosen.tolist() == together.tolist()


@pytest.mark.parametrize(
    ("logits", "name", "values", "message"),
    [
        (torch.zeros(2, 9, dtype=torch.bfloat16), "top_k", np.zeros(2, np.int64), "float32 logits"),
        (torch.zeros(9, 2).T, "top_k", np.zeros(2, np.int64), "contiguous"),
        (torch.zeros(2, 9), "top_k", np.zeros(2, np.int32), "expected 2 int64"),
        (torch.zeros(2, 9), "top_p", np.zeros(3), "expected 2 float64"),
        (torch.zeros(2, 9), "min_p", np.zeros(4, np.float32)[::2], "expected 2 float32"),
    ],
)
def test_what_native_code_would_misread_is_refused(
    logits: torch.Tensor, name: str, values: npt.NDArray[Any], message: str
) -> None:
    params = {"keys": np.zeros(2, np.int64), **make_rows(5, 2), name: values}

    with pytest.raises(TypeError, match=message):
        native_sampling().choose(logits, **params)
