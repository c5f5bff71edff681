"""A ring of pinned memory waits for exactly the copies whose memory it reuses."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from remora.kernels.memory import PinnedRing


class LateCopies:
    """A device that copies when it is waited for; until then the ring must not change."""

    def __init__(self) -> None:
        self.num_waits = 0

    def make_event(self) -> LateCopies:
        return self

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        self.num_waits += 1


@given(sizes=st.lists(st.integers(1, 16), max_size=40))
def test_parts_in_use_do_not_overlap(sizes: list[int]) -> None:
    ring = PinnedRing(torch.zeros(64 * 8, dtype=torch.uint8), LateCopies().make_event)

    for number, size in enumerate(sizes):
        source, target = torch.full((size,), number), torch.zeros(size, dtype=torch.int64)
        assert ring.fits(source.nbytes)
        ring.copy(source, target)

        assert target.tolist() == source.tolist()
        used = sorted((start, stop) for start, stop, _ in ring._used)
        assert all(first[1] <= second[0] for first, second in pairwise(used))


def test_the_ring_waits_when_it_comes_round() -> None:
    late = LateCopies()
    ring = PinnedRing(torch.zeros(256, dtype=torch.uint8), late.make_event)

    for _ in range(4):
        ring.copy(torch.ones(8, dtype=torch.int64), torch.zeros(8, dtype=torch.int64))
    waits_before = late.num_waits
    ring.copy(torch.ones(8, dtype=torch.int64), torch.zeros(8, dtype=torch.int64))

    assert (waits_before, late.num_waits) == (0, 1)
    assert not ring.fits(65)
