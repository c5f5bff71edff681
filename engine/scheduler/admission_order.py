"""Admission order for cache- and length-aware policies.

Under every policy, higher priority starts first, then preempted sequences, then sequences that were
passed over too often. Policies that look prefixes up do so once per round of admission, for at most
MAX_LOOKUPS sequences; with more waiting, arrival decides.

Knows sequences and the prefix cache; nothing of rows, budgets or time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from random import Random

from remora.configs.sections.engine import SchedulePolicy
from remora.engine.kv.cache import KVCache
from remora.engine.kv.radix import RadixNode
from remora.engine.scheduler.priority import waiting_key
from remora.engine.scheduler.sequence import Sequence

MAX_PASSED = 64
MAX_LOOKUPS = 128

Key = tuple[int, ...]
Ranking = Callable[[list[Sequence], KVCache], dict[Sequence, int]]


class WaitingOrder:
    """Sorts the waiting queue, which is kept by priority and arrival."""

    def __init__(self, policy: SchedulePolicy, *, seed: int = 0) -> None:
        self._is_looked_up = policy in ("lpm", "dfs-weight")
        self._random = Random(seed)
        rankings: dict[SchedulePolicy, Ranking] = {
            "lpm": _by_prefix,
            "dfs-weight": _by_shared_prefixes,
            "lof": _by_output,
            "random": self._drawn,
        }
        self._rank = rankings.get(policy)  # None = by arrival

    def arrange(self, waiting: list[Sequence], kv: KVCache) -> list[Sequence]:
        """Return the sequences in the order of admission."""
        if self._rank is None or len(waiting) < 2:
            return list(waiting)
        if self._is_looked_up and len(waiting) > MAX_LOOKUPS:
            return list(waiting)
        ranks = self._rank(waiting, kv)

        def key(seq: Sequence) -> Key:
            is_next = seq.num_starts > 0 or seq.num_passed >= MAX_PASSED
            return (-seq.priority, not is_next, 0 if is_next else ranks[seq], seq.order)

        return sorted(waiting, key=key)

    def on_start(self, seq: Sequence, waiting: Iterable[Sequence]) -> None:
        """Count the sequences that `seq` has passed."""
        if self._rank is not None:
            for other in waiting:
                is_mate = other.request.tenant.name == seq.request.tenant.name
                other.num_passed += is_mate and waiting_key(other) < waiting_key(seq)

    def _drawn(self, waiting: list[Sequence], kv: KVCache) -> dict[Sequence, int]:
        order = self._random.sample(waiting, len(waiting))
        return {seq: place for place, seq in enumerate(order)}


def _by_output(waiting: list[Sequence], kv: KVCache) -> dict[Sequence, int]:
    return {seq: -seq.num_remaining for seq in waiting}


def _by_prefix(waiting: list[Sequence], kv: KVCache) -> dict[Sequence, int]:
    return {seq: -kv.count_cached(seq.namespace, seq.token_ids) for seq in waiting}


def _by_shared_prefixes(waiting: list[Sequence], kv: KVCache) -> dict[Sequence, int]:
    """Rank by a depth-first walk of the cached prefixes, into the most requested child first.

    Sequences that share a prefix start one after the other, the longest shared prefixes first.
    """
    ends = {seq: kv.cached_end(seq.namespace, seq.token_ids) for seq in waiting}
    paths = {seq: _path(node) for seq, node in ends.items()}
    weights = Counter(node for path in paths.values() for node in path)
    below: dict[RadixNode | None, dict[RadixNode, None]] = {}
    for path in paths.values():
        for parent, node in zip([None, *path[:-1]], path, strict=True):
            below.setdefault(parent, {})[node] = None

    def children(node: RadixNode | None) -> list[RadixNode]:
        heaviest_first = sorted(below.get(node, {}), key=lambda n: weights[n], reverse=True)
        return heaviest_first[::-1]

    walked = _children_first(children)
    places = {node: place for place, node in enumerate(walked)}
    return {seq: places[node] for seq, node in ends.items()}


def _children_first(
    children: Callable[[RadixNode | None], list[RadixNode]],
) -> Iterator[RadixNode]:
    """Yield each node after its descendants; of several children the last one first."""
    stack, opened = children(None), set[RadixNode]()
    while stack:
        node = stack[-1]
        if node in opened:
            yield stack.pop()
        else:
            opened.add(node)
            stack += children(node)


def _path(node: RadixNode) -> list[RadixNode]:
    """Return the path from the root to a node."""
    path = [node]
    while path[-1].parent is not None:
        path.append(path[-1].parent)
    return path[::-1]
