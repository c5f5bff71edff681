"""The order of the waiting queue, and the choice of sequences to preempt. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable

from remora.engine.scheduler.sequence import Sequence


def waiting_key(seq: Sequence) -> tuple[int, int]:
    """Return the sort key of the waiting queue: highest priority first, then by arrival.

    A preempted sequence keeps its arrival, so it returns to the front of its priority.
    """
    return (-seq.priority, seq.order)


def preemption_victim(running: Iterable[Sequence]) -> Sequence:
    """Return the sequence to preempt: the lowest priority, then the fewest output tokens.

    Among equals the longest, whose pages help most, then the youngest. So, of equal priority, the
    sequence with most output continues to its end.
    """
    return min(
        running, key=lambda seq: (seq.priority, seq.num_output_tokens, -seq.num_tokens, -seq.order)
    )


def lower_priority(running: Iterable[Sequence], than: Sequence, gap: int) -> list[Sequence]:
    """Return the sequences that `than` may preempt, in the order of preemption."""
    weaker = [seq for seq in running if than.priority - seq.priority > gap]
    return sorted(weaker, key=lambda seq: (seq.priority, seq.num_output_tokens, -seq.order))
