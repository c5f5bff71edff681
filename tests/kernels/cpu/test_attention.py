"""Paged attention in native code against attention over the whole sequence, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from remora.kernels.cpu.library import Library, Team
from remora.kernels.kv_store import GREATEST
from tests.kernels.cpu.attending import MOST, Attending, Heads, attend_densely, run_in_chunks

# float32: rounding of some hundred products; the same with K and V of float16, which are widened.
# bfloat16: scores lie within 5, so what rounding q (2^-8 of it) does to a weight stays below 1%,
# and to a sum of values of about 1 below that.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 1e-5}
DTYPES = list(TOLERANCE)
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES)
KV_DTYPES = [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2]
EVERY_KV_DTYPE = pytest.mark.parametrize("kv_dtype", [None, *KV_DTYPES])


@st.composite
def all_heads(draw: st.DrawFn) -> Heads:
    return Heads(
        num_kv_heads=draw(st.integers(1, 3)),
        heads_per_kv=draw(st.sampled_from([1, 2, 3, 8, 50])),
        head_dim=draw(st.sampled_from([8, 16, 64, 80, 96, 128])),
        page_size=draw(st.sampled_from([16, 32, 64])),
        window=draw(st.none() | st.integers(1, 200)),
        soft_cap=draw(st.none() | st.sampled_from([0.5, 50.0])),
        chunked=draw(st.booleans()),
        slope=draw(st.none() | st.sampled_from([0.01, 0.5])),
        sink=draw(st.none() | st.sampled_from([1.0, 60.0])),
        dtype=draw(st.sampled_from(DTYPES)),
        kv_dtype=draw(st.sampled_from([None, *KV_DTYPES])),
    )


def check(team: Team, heads: Heads, sequences: list[tuple[int, int]], seed: int = 0) -> None:
    """Run sequences of (tokens before, new tokens) in one step, after one that made the former."""
    attending = Attending(team, heads, num_sequences=len(sequences), seed=seed)
    qkv = [heads.draw(sum(lens), seed + i) for i, lens in enumerate(sequences)]
    before = {i: x[: sequences[i][0]] for i, x in enumerate(qkv) if sequences[i][0]}
    attending.step(before)

    attended = attending.step({i: x[sequences[i][0] :] for i, x in enumerate(qkv)})

    for i, x in enumerate(qkv):
        expected = attend_densely(heads, x)[sequences[i][0] :]
        assert attended[i].dtype == heads.work_dtype
        torch.testing.assert_close(
            attended[i].double(), expected, atol=TOLERANCE[heads.dtype], rtol=TOLERANCE[heads.dtype]
        )


@settings(max_examples=40)
@given(
    heads=all_heads(),
    sequences=st.lists(
        st.tuples(st.integers(0, 120), st.just(1) | st.integers(1, 40)), min_size=1, max_size=4
    ),
    seed=st.integers(0, 2**20),
)
def test_attention_is_that_over_the_whole_sequence(
    team: Team, heads: Heads, sequences: list[tuple[int, int]], seed: int
) -> None:
    check(team, heads, sequences, seed)


@EVERY_DTYPE
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 300])
def test_decoding_agrees_at_the_edges_of_groups_tiles_and_pages(
    team: Team, length: int, dtype: torch.dtype
) -> None:
    check(team, Heads(dtype=dtype, page_size=32), [(length - 1, 1), (0, length)])


@EVERY_DTYPE
@pytest.mark.parametrize(
    "rule",
    [
        *(
            {"head_dim": size, "window": window}
            for size in (16, 80)
            for window in (None, 1, 24, 64)
        ),
        {"window": 24, "chunked": True},
        {"sink": 1.0, "window": 24},
        {"slope": 0.1},
        {"soft_cap": 5},
        *({"kv_dtype": each, "head_dim": 80, "soft_cap": 5, "sink": 1.0} for each in KV_DTYPES),
        *({"kv_dtype": each, "window": 24, "slope": 0.1} for each in KV_DTYPES),
    ],
    ids=str,
)
def test_every_instruction_set_knows_every_rule(
    each_team: Team, rule: dict[str, Any], dtype: torch.dtype
) -> None:
    check(each_team, Heads(dtype=dtype, **rule), [(0, 1), (150, 1), (40, 77), (0, 20)])


@EVERY_DTYPE
@EVERY_KV_DTYPE
@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("heads_per_kv", [1, 3, 8])
def test_chunks_give_the_bits_of_the_whole(
    each_team: Team,
    heads_per_kv: int,
    window: int | None,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
) -> None:
    heads = Heads(heads_per_kv=heads_per_kv, window=window, dtype=dtype, kv_dtype=kv_dtype)
    qkv = heads.draw(150, seed=1)
    whole = run_in_chunks(each_team, heads, qkv, [150])

    decoded = run_in_chunks(each_team, heads, qkv, [64, *[1] * 86], seed=5)
    assert torch.equal(decoded, whole)
    assert torch.equal(run_in_chunks(each_team, heads, qkv, [1, 6, 64, 13, 17, 49], seed=9), whole)


@pytest.fixture(scope="module")
def teams(library: Library) -> Iterator[list[Team]]:
    teams = [Team(library, num_threads) for num_threads in (1, 2, 3, 7, 16)]
    yield teams
    for team in teams:
        team.close()


@settings(max_examples=25, deadline=None)
@given(
    heads=all_heads(),
    sequences=st.lists(
        st.tuples(st.integers(200, 900), st.just(1) | st.integers(1, 20)), min_size=1, max_size=3
    ),
)
def test_long_sequences_have_the_same_bits_with_any_number_of_threads(
    teams: list[Team], heads: Heads, sequences: list[tuple[int, int]]
) -> None:
    results = []
    for team in teams:
        attending = Attending(team, heads, num_sequences=len(sequences))
        qkv = [heads.draw(sum(lens), i) for i, lens in enumerate(sequences)]
        for i, x in enumerate(qkv):
            attending.step({i: x[: sequences[i][0]]})
        results.append(attending.step({i: x[sequences[i][0] :] for i, x in enumerate(qkv)}))

    for i, x in enumerate(qkv):
        for result in results:
            assert torch.equal(result[i], results[0][i])
        expected = attend_densely(heads, x)[sequences[i][0] :]
        tolerance = TOLERANCE[heads.dtype]
        torch.testing.assert_close(results[0][i].double(), expected, atol=tolerance, rtol=tolerance)


@EVERY_DTYPE
@pytest.mark.parametrize("window", [None, 30])
def test_company_and_threads_change_no_bit(
    library: Library, team: Team, window: int | None, dtype: torch.dtype
) -> None:
    heads = Heads(window=window, dtype=dtype)
    lens = [1, 90, 17, 200, 64, 33]
    qkv = {i: heads.draw(length + 1, seed=i) for i, length in enumerate(lens)}
    together = Attending(team, heads, num_sequences=len(lens))
    single = Team(library, 1)

    extended = together.step({i: x[:-1] for i, x in qkv.items()})
    decoded = together.step({i: x[-1:] for i, x in reversed(qkv.items())})

    for i, x in qkv.items():
        alone = run_in_chunks(single, heads, x, [lens[i], 1], seed=i + 3)
        assert torch.equal(alone[:-1], extended[i])
        assert torch.equal(alone[-1:], decoded[i])
    single.close()


@EVERY_DTYPE
@EVERY_KV_DTYPE
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("head_dim", [8, 80])
def test_what_earlier_owners_left_in_a_page_changes_nothing(
    each_team: Team,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
) -> None:
    heads = Heads(head_dim=head_dim, page_size=page_size, dtype=dtype, kv_dtype=kv_dtype)
    qkv = {0: heads.draw(70, seed=0), 1: heads.draw(3, seed=1)}
    clean = Attending(each_team, heads, num_sequences=2)
    used = Attending(each_team, heads, num_sequences=2, garbage=MOST[dtype])

    expected, attended = clean.step(qkv), used.step(qkv)

    for i in qkv:
        assert torch.equal(attended[i], expected[i])


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_heads_are_quantised_alone_and_stay_finite(each_team: Team, kv_dtype: torch.dtype) -> None:
    heads = Heads(kv_dtype=kv_dtype)
    qkv = heads.draw(20, seed=0)
    qkv[5, heads.num_heads :, 3::8] = torch.nan  # a rotation's pair
    qkv[6, heads.num_heads :, 3] = 3e38
    qkv[7, heads.num_heads :] = 1e-37
    attending = Attending(each_team, heads, num_sequences=1)

    attended = attending.step({0: qkv})[0]

    assert attended[:6].isfinite().all()
    for place, stored in enumerate(attending.stored(0)):
        first = heads.num_heads + place * heads.num_kv_heads
        assert torch.equal(stored, heads.read(qkv[:, first : first + heads.num_kv_heads], place))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("head_dim", [16, 20])
def test_static_scales_are_those_of_layer_and_head_and_clip(
    each_team: Team, kv_dtype: torch.dtype, head_dim: int
) -> None:
    heads = Heads(kv_dtype=kv_dtype, static=2.0, num_kv_heads=3, head_dim=head_dim)
    qkv = heads.draw(20, seed=0)
    qkv[5, heads.num_heads :, 3 :: head_dim // 2] = torch.nan  # a rotation's pair
    qkv[6, heads.num_heads :, 3] = 3e38
    qkv[7, heads.num_heads :] = 1e-37
    attending = Attending(each_team, heads, num_sequences=1)

    attending.step({0: qkv})

    scales = heads.static_scales
    assert scales is not None
    for place, stored in enumerate(attending.stored(0)):
        first = heads.num_heads + place * heads.num_kv_heads
        assert torch.equal(stored, heads.read(qkv[:, first : first + heads.num_kv_heads], place))
        most = GREATEST[kv_dtype] * scales[place].double()
        assert torch.equal(stored.abs().amax((0, 2)), most)


@pytest.mark.parametrize("kv_dtype", [None, *KV_DTYPES])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_bad_query_spoils_only_its_own_row(
    each_team: Team, bad: float, kv_dtype: torch.dtype | None
) -> None:
    heads = Heads(dtype=torch.bfloat16, kv_dtype=kv_dtype)
    qkv = heads.draw(20, seed=0)
    qkv[5, 1, 3] = bad

    attended = Attending(each_team, heads, num_sequences=1).step({0: qkv})[0]

    is_fine = attended.isfinite().all(-1)
    assert not is_fine[5, 1]
    assert is_fine.sum() == is_fine.numel() - 1


@EVERY_DTYPE
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_stored_is_finite(each_team: Team, bad: float, dtype: torch.dtype) -> None:
    heads = Heads(dtype=dtype)
    attending = Attending(each_team, heads, num_sequences=1)
    qkv = heads.draw(20, seed=0)
    qkv[5, heads.num_heads :, 3] = bad

    attending.step({0: qkv})

    for stored in attending.stored(0):
        assert stored.isfinite().all()
        assert (stored[5, :, 3].abs() > 0.99 * MOST[dtype]).all() == (bad == bad)


@EVERY_DTYPE
def test_a_page_that_held_nan_is_safe_for_its_next_owner(
    each_team: Team, dtype: torch.dtype
) -> None:
    heads = Heads(dtype=dtype)
    qkv, bad = heads.draw(20, seed=0), heads.draw(64, seed=1)
    bad[:, heads.num_heads :] = torch.nan
    bad[::2, heads.num_heads :] = torch.inf
    expected = run_in_chunks(each_team, heads, qkv, [20])
    attending = Attending(each_team, heads, num_sequences=2)
    attending.step({0: bad})
    attending.tables[1] = attending.tables[0]

    assert torch.equal(attending.step({1: qkv})[1], expected)


@EVERY_DTYPE
@EVERY_KV_DTYPE
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("head_dim", [8, 64, 80])
def test_keys_and_values_are_stored_where_the_table_says(
    each_team: Team,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
) -> None:
    heads = Heads(head_dim=head_dim, page_size=page_size, dtype=dtype, kv_dtype=kv_dtype)
    attending = Attending(each_team, heads, num_sequences=2)
    qkv = {0: heads.draw(75, seed=0), 1: heads.draw(31, seed=1)}

    attending.step({i: x[:20] for i, x in qkv.items()})
    attending.step({i: x[20:] for i, x in qkv.items()})

    for i, x in qkv.items():
        keys, values = attending.stored(i)
        expected = heads.read(x[:, heads.num_heads :])
        assert torch.equal(keys.double(), expected[:, :2])
        assert torch.equal(values.double(), expected[:, 2:])
    assert not attending.cache.data[0].any(), "another layer was written to"


def test_scores_too_large_for_bfloat16_sums_still_choose_the_best(team: Team) -> None:
    heads = Heads(heads_per_kv=1, num_kv_heads=1)
    qkv = heads.draw(100, seed=0)
    qkv[:, :2] *= 1e6  # weights are all 0 and 1

    torch.testing.assert_close(
        run_in_chunks(team, heads, qkv, [100]).double(), attend_densely(heads, qkv)
    )
