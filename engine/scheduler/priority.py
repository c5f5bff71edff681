"""Who goes first, and who gives way.

Pure functions of a sequence: the waiting queue's order, and the choice of whom to preempt.
"""

from __future__ import annotations

from collections.abc import Iterable

from remora.engine.scheduler.sequence import Sequence


def waiting_key(seq: Sequence) -> tuple[int, int]:
    """Order of the waiting queue: urgent first, then by arrival.

    A preempted sequence keeps its arrival, so it returns to the front of its priority.
    """
    return (-seq.priority, seq.order)


def preemption_victim(running: Iterable[Sequence]) -> Sequence:
    """Choose who gives up its pages: the least urgent; of these, who loses least work.

    Fewest output tokens first; among equals the longest, whose pages help most, and the youngest.
    So, of equal priority, whoever is furthest along goes on and ends.
    """
    return min(
        running, key=lambda seq: (seq.priority, seq.num_output_tokens, -seq.num_tokens, -seq.order)
    )


def lower_priority(running: Iterable[Sequence], than: Sequence, gap: int) -> list[Sequence]:
    """Return those that `than` may preempt, the first to go first."""
    weaker = [seq for seq in running if than.priority - seq.priority > gap]
    return sorted(weaker, key=lambda seq: (seq.priority, seq.num_output_tokens, -seq.order))
