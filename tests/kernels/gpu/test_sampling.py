"""Tokens chosen by kernels against distributions made by a full sort in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from remora.kernels import sampling
from remora.kernels.device_sampling import SKIPPED, choose_on_device
from remora.kernels.sampling import ALL_BANNED, NO_FAULT, NOT_FINITE
from tests.kernels.gpu.devices import interpreted_only, on_gpu, poisoned_memory
from tests.kernels.test_sampling import CLOSE, make_logits
from tests.kernels.test_sampling import choose as choose_in_torch
from tests.sampling_kernels import racing_times

# Around blocks of 128 and segments of 2048, and beyond the candidates that a program holds of one.
VOCAB_SIZES = [1, 2, 127, 129, 2047, 2049, 4500]
# Of the mass: exponentials and sums of 128 or of a segment's in float32.
ROUNDING = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What a row asks for."""

    temperature: float = 1.0
    key: int = 0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def choose(logits: Tensor, rows: list[Row]) -> tuple[list[int], list[int]]:
    """Choose with kernels, and see that logits stay as they are."""
    before = logits.clone()

    def column(name: str, dtype: torch.dtype) -> Tensor:
        values = [getattr(row, name) for row in rows]
        return torch.tensor(values, dtype=dtype, device=logits.device)

    with poisoned_memory():
        ids, faults = choose_on_device(
            logits,
            column("temperature", torch.float32),
            column("key", torch.int64),
            top_k=column("top_k", torch.int64),
            top_p=column("top_p", torch.float64),
            min_p=column("min_p", torch.float32),
        )

    assert logits.equal(before) or bool(logits.isnan().any())
    assert ids.dtype == torch.int64
    return ids.tolist(), faults.tolist()


def kept_probs(
    logits: npt.NDArray[np.float32], row: Row, lenience: float
) -> npt.NDArray[np.float64]:
    """Probabilities after all filters; top-p and min-p keep so much more, as a fraction."""
    scaled = logits.astype(np.float64) / np.float32(row.temperature)
    probs = np.exp(scaled - scaled.max())
    if 0 < row.top_k < len(scaled):
        probs[scaled < np.sort(scaled)[::-1][row.top_k - 1]] = 0
    probs /= probs.sum()
    likely = probs >= row.min_p * (1 - lenience) * probs.max()
    if row.top_p < 1:
        falling = np.sort(probs)[::-1]
        last = int(np.searchsorted(np.cumsum(falling), row.top_p * (1 + lenience)))
        likely &= probs >= falling[min(last, len(falling) - 1)]
    kept: npt.NDArray[np.float64] = np.where(likely, probs, 0.0)
    kept /= kept.sum()
    return kept


def check_row(logits: npt.NDArray[np.float32], row: Row, token_id: int) -> None:
    """See that the token wins the race of those that the filters keep.

    Where a filter's boundary lies within rounding of a token, it may keep it or not.
    """
    if row.temperature == 0:
        assert token_id == int(logits.argmax())
        return
    found = []
    for lenience in (ROUNDING, -ROUNDING):
        probs = kept_probs(logits, row, lenience)
        times = racing_times(np.array([row.key]), probs)[0]
        found.append(times[token_id] <= times.min() * (1 + CLOSE))
    assert any(found)


rows = st.builds(
    Row,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.0, 2.0]),
    key=st.integers(-(2**63), 2**63 - 1),
    top_k=st.sampled_from([0, 0, 1, 2, 40, 600, 10**6]),
    top_p=st.sampled_from([0.01, 0.5, 0.9, 0.999, 1.0, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.011, 0.31, 1.0]),
)


@interpreted_only
@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**32),
    vocab_size=st.sampled_from(VOCAB_SIZES),
    step=st.sampled_from([1e-3, 0.25, 1.0]),
    spread=st.sampled_from([0.1, 1.0, 6.0]),
    rows=st.lists(rows, min_size=1, max_size=3),
)
def test_every_row_gets_the_token_of_its_own_key_and_filters(
    seed: int, vocab_size: int, step: float, spread: float, rows: list[Row]
) -> None:
    logits = np.stack(
        [make_logits(seed + place, vocab_size, step, spread) for place in range(len(rows))]
    )

    ids, faults = choose(torch.from_numpy(logits), rows)

    assert not any(faults)
    for line, row, token_id in zip(logits, rows, ids, strict=True):
        check_row(line, row, token_id)


EDGES = {
    "greedy": Row(temperature=0.0),
    "greedy whatever else is asked": Row(temperature=0.0, top_k=7, top_p=0.5, min_p=0.1),
    "all tokens": Row(key=3),
    "all tokens, all bits": Row(key=-1),
    "cold": Row(temperature=1e-5, key=4),
    "hot": Row(temperature=100.0, key=5),
    "hot and cut": Row(temperature=100.0, key=6, top_p=0.999),
    "one": Row(key=7, top_k=1),
    "as many as there are": Row(key=8, top_k=2500),
    "many": Row(key=9, top_k=2000),
    "few, last": Row(key=10, top_k=3),
    "little mass": Row(key=11, top_p=1e-9),
    "much mass": Row(key=12, top_p=0.9999),
    "as likely as the first": Row(key=13, min_p=1.0),
    "all filters": Row(key=14, top_k=50, top_p=0.7, min_p=0.01),
    "least probability decides": Row(key=15, top_k=2000, top_p=0.9999, min_p=0.5),
}


@pytest.mark.parametrize("kind", ["peaked", "flat", "equal"])
def test_edges_of_what_a_row_may_ask_for(device: str, kind: str) -> None:
    spread = {"peaked": 4.0, "flat": 0.05, "equal": 0.0}[kind]
    logits = np.stack([make_logits(3, 2500, 1e-4, spread)] * len(EDGES))

    ids, faults = choose(torch.from_numpy(logits).to(device), list(EDGES.values()))

    assert not any(faults)
    for line, row, token_id in zip(logits, EDGES.values(), ids, strict=True):
        check_row(line, row, token_id)


def test_tokens_are_those_of_the_torch_code(device: str) -> None:
    """Its own tests compare it with a full sort."""
    rng = np.random.default_rng(5)
    logits = (3 * rng.normal(size=(6, 3000))).astype(np.float32)
    filters: list[dict[str, Any]] = [
        {},
        {"top_k": 20},
        {"top_p": 0.9},
        {"min_p": 0.05},
        {"top_k": 50, "top_p": 0.8},
        {"top_k": 300, "min_p": 0.01},
    ]
    keys = rng.integers(-(2**63), 2**63, 6).tolist()
    rows = zip(logits, keys, filters, strict=True)
    expected = [
        choose_in_torch(sampling, torch.from_numpy(line[None]), key, temperature=0.8, **each)[0]
        for line, key, each in rows
    ]

    ids, _ = choose(
        torch.tensor(logits, device=device),
        [Row(temperature=0.8, key=key, **each) for key, each in zip(keys, filters, strict=True)],
    )

    assert ids == expected


def test_equals_of_the_last_token_stay(device: str) -> None:
    logits = torch.full((24, 2100), -9.0, device=device)
    logits[:, [5, 700, 2099]] = 2.0
    logits[:, 1300] = 3.0

    ids, _ = choose(logits, [Row(key=key, top_k=2) for key in range(24)])

    assert {*ids} == {5, 700, 1300, 2099}


@pytest.mark.parametrize("row", [Row(), Row(key=16, top_p=0.99), Row(temperature=0.0)])
def test_banned_tokens_are_never_drawn(device: str, row: Row) -> None:
    logits = torch.full((1, 5000), float("-inf"), device=device)
    logits[0, 4097] = -3.0

    assert choose(logits, [row]) == ([4097], [NO_FAULT])


@pytest.mark.parametrize("row", [Row(temperature=0.0), Row(key=17), Row(top_k=5, top_p=0.5)])
def test_rows_that_are_not_good_are_told_and_harm_no_others(device: str, row: Row) -> None:
    logits = torch.zeros(5, 2200, device=device)
    logits[:, 2100] = 50.0
    logits[0, 2150] = float("nan")
    logits[1, 3] = float("inf")
    logits[2] = float("-inf")
    logits[4] = float("nan")

    ids, faults = choose(logits, [row] * 5)

    assert faults == [NOT_FINITE, NOT_FINITE, ALL_BANNED, NO_FAULT, NOT_FINITE]
    assert ids[3] == 2100
    assert all(0 <= token_id < 2200 for token_id in ids)


def test_skipped_rows_are_not_read(device: str) -> None:
    logits = torch.full((3, 2200), float("nan"), device=device)
    logits[1] = 0
    logits[1, 2100] = 50.0

    skipped = Row(temperature=SKIPPED, key=18, top_k=5, top_p=0.5)

    assert choose(logits, [skipped, Row(key=19, top_k=3), skipped]) == (
        [0, 2100, 0],
        [NO_FAULT] * 3,
    )


def test_a_row_does_not_depend_on_the_rows_beside_it(device: str) -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, 2100).round(decimals=1).to(device)
    asked = [Row(key=key, top_p=top_p) for key, top_p in enumerate((1.0, 1.0, 1.0, 0.97, 0.97))]

    together, _ = choose(logits.expand(5, -1).contiguous(), asked)

    assert together == [choose(logits, [row])[0][0] for row in asked]


def test_rows_may_lie_in_a_wider_tensor(device: str) -> None:
    torch.manual_seed(0)
    wide = torch.randn(3, 2300, device=device)
    wide[:, 2200:] = 100.0
    asked = [Row(temperature=0.0), Row(key=20), Row(key=21, top_k=30)]

    ids, _ = choose(wide[:, :2200], asked)

    assert ids == choose(wide[:, :2200].contiguous(), asked)[0]


def test_no_rows_are_no_tokens(device: str) -> None:
    assert choose(torch.zeros(0, 100, device=device), []) == ([], [])


@on_gpu
def test_a_captured_choice_runs_again_with_other_rows() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 128256, device="cuda")
    temperature = torch.tensor([0.0, 1.0, 0.7, 1.0], device="cuda")
    keys = torch.randint(-(2**62), 2**62, (4,), device="cuda")
    top_k = torch.tensor([0, 0, 50, 0], device="cuda")
    top_p = torch.tensor([1.0, 1.0, 0.9, 0.95], dtype=torch.float64, device="cuda")
    min_p = torch.zeros(4, device="cuda")

    def run() -> Tensor:
        return choose_on_device(logits, temperature, keys, top_k=top_k, top_p=top_p, min_p=min_p)[0]

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids = run()
    logits.normal_()
    keys.random_()
    temperature.copy_(temperature.flip(0))
    graph.replay()

    assert torch.equal(ids, run())
