from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from remora.engine.attention.torch_backend import TorchAttention
from remora.engine.runner.batch import AttentionSpec, ForwardBatch, QKNormRope
from tests.kernels.naive_attention import attend_naively

PAGE_SIZE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 4, 2, 16


def make_attention() -> TorchAttention:
    return TorchAttention(
        num_layers=2,
        num_pages=12,
        page_size=PAGE_SIZE,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=torch.float32,
        device="cpu",
    )


def attend(
    attention: TorchAttention,
    layer: int,
    parts: tuple[Tensor, ...],
    batch: ForwardBatch,
    *,
    window: int | None,
) -> Tensor:
    """Attend q, k and v, which are turned by no angle."""
    ones = torch.ones(len(parts[0]), HEAD_DIM // 2)
    rope = QKNormRope(cos=ones, sin=torch.zeros_like(ones))
    heads = torch.cat(parts, dim=1)
    return attention.attend(layer, heads, rope, batch, AttentionSpec(scale=0.25, window=window))


def ints(values: Sequence[Sequence[int] | int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def make_mixed_batch() -> ForwardBatch:
    """Decode rows at positions 0 and 9, an extend row [0, 6) and one [2, 5)."""
    tables = [[1], [2, 3, 4], [5, 6], [7, 8]]
    places = [(0, 0), (1, 9), *((2, at) for at in range(6)), *((3, at) for at in range(2, 5))]
    return ForwardBatch(
        token_ids=torch.zeros(11, dtype=torch.int64),
        positions=torch.tensor([at for _, at in places]),
        slots=torch.tensor(
            [tables[row][at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE for row, at in places]
        ),
        num_decodes=2,
        tables=ints([[1, 0, 0], [2, 3, 4], [5, 6, 0], [7, 8, 0]]),
        starts=ints([0, 1, 2, 8, 11]),
        lengths=ints([1, 10, 6, 5]),
        extend_starts=(2, 8, 11),
        extend_lens=(6, 5),
        logit_index=torch.tensor([0, 1, 7, 10]),
    )


@pytest.mark.parametrize("window", [None, 3])
def test_each_row_of_a_mixed_batch_attends_to_its_own_pages(window: int | None) -> None:
    torch.manual_seed(0)
    attention, batch = make_attention(), make_mixed_batch()
    attention.kv_pages.normal_()
    query = torch.randn(11, NUM_HEADS, HEAD_DIM)
    key, value = torch.randn(2, 11, NUM_KV_HEADS, HEAD_DIM)

    attended = attend(attention, 1, (query, key, value), batch, window=window)

    tables = [[1], [2, 3, 4], *([5, 6] for _ in range(6)), *([7, 8] for _ in range(3))]
    for token, (table, at) in enumerate(zip(tables, batch.positions.tolist(), strict=True)):
        expected = attend_naively(
            query[token], attention.kv_pages[1], table, at, scale=0.25, window=window
        )
        torch.testing.assert_close(attended[token].double(), expected, atol=1e-5, rtol=1e-5)


def test_layers_with_and_without_a_window_do_not_mix_their_plans() -> None:
    torch.manual_seed(0)
    attention, batch = make_attention(), make_mixed_batch()
    query = torch.randn(11, NUM_HEADS, HEAD_DIM)
    kv = torch.randn(2, 11, NUM_KV_HEADS, HEAD_DIM)
    attention.kv_pages.normal_()

    full = attend(attention, 0, (query, *kv), batch, window=None)
    narrow = attend(attention, 0, (query, *kv), batch, window=2)
    again = attend(attention, 0, (query, *kv), batch, window=None)

    assert torch.equal(full, again)
    assert not torch.equal(full[1], narrow[1])


def make_decode_batch(slots: list[int], tables: list[list[int]], lens: list[int]) -> ForwardBatch:
    return ForwardBatch(
        token_ids=torch.zeros(len(slots), dtype=torch.int64),
        positions=torch.tensor(lens) - 1,
        slots=torch.tensor(slots),
        num_decodes=len(slots),
        tables=ints(tables),
        starts=ints([*range(len(slots) + 1)]),
        lengths=ints(lens),
        extend_starts=(len(slots),),
        extend_lens=(),
        logit_index=torch.arange(len(slots)),
    )


def test_a_broken_sequence_does_not_spoil_the_next_owner_of_its_page() -> None:
    attention = make_attention()
    broken = make_decode_batch([PAGE_SIZE + 2], [[1]], [3])
    query, nan = torch.zeros(1, 4, 16), torch.full((1, 2, 16), float("nan"))
    attend(attention, 0, (query, nan, nan), broken, window=None)

    # The first row is shorter than its bucket mate, so its empty slots take part with weight 0.
    sound = make_decode_batch([PAGE_SIZE, 2 * PAGE_SIZE + 3], [[1], [2]], [1, 4])
    query, kv = torch.randn(2, 4, 16), torch.randn(2, 2, 16)
    attended = attend(attention, 0, (query, kv, kv), sound, window=None)

    assert attended.isfinite().all()


def test_there_is_a_dump_page_beside_the_pages_asked_for() -> None:
    assert make_attention().kv_pages.shape == (2, 2, 13, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM)
