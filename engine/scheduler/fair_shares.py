"""Fair shares of tenants: whose work is next, and whose sequences give way.

Each tenant has a count of the tokens computed for it, divided by its weight. The tenant with the
lowest count is served next, so tenants that always have work share tokens by their weights. A
tenant whose work arrives starts at the lowest count of tenants with work: idle time saves
nothing up. Priorities order sequences within a tenant only.

Knows sequences and counts; nothing of pages, budgets or time. Idle until a tenant has a name.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping

from remora.engine.scheduler.priority import lower_priority, preemption_victim
from remora.engine.scheduler.sequence import Sequence
from remora.engine.tenants import Tenant, TenantStats

# Prompt tokens of a step whose log-probabilities are computed, while tenants share the engine: such
# a token costs as much as the sampling of an output token, and a step is not interrupted.
MAX_SCORED_TOKENS = 64
# A tenant's sequence takes the row of another tenant that has this many times its rows, by weight.
# A lower factor would preempt sequences for differences that ends of sequences level by themselves.
_PREEMPTING_FACTOR = 2.0


class FairShares:
    """Tokens that tenants were served, by weight."""

    def __init__(self) -> None:
        self.is_on = False  # until a tenant has a name
        # Requests without a tenant that arrived before are of one with the name "".
        self._served: defaultdict[str, float] = defaultdict(float)
        self._weights: defaultdict[str, float] = defaultdict(lambda: 1.0)
        self._tokens: Counter[str] = Counter()

    def stats(
        self, running: Iterable[Sequence], waiting: Iterable[Sequence]
    ) -> tuple[TenantStats, ...]:
        """Return the counters of each tenant; none without tenants."""
        if not self.is_on:
            return ()
        num_running, num_pages = Counter[str](), Counter[str]()
        for seq in running:
            num_running[seq.request.tenant.name] += 1
            num_pages[seq.request.tenant.name] += len(seq.table.pages)
        num_waiting = Counter(seq.request.tenant.name for seq in waiting)
        return tuple(
            TenantStats(
                name, num_running[name], num_waiting[name], num_pages[name], self._tokens[name]
            )
            for name in sorted(self._served)
        )

    def arrive(
        self, tenant: Tenant, backlogged: Iterable[str], running: Iterable[Sequence]
    ) -> None:
        """Let a tenant compete from now on.

        backlogged:  tenants that have prompts to compute; if it is one of them, nothing changes
        """
        name, served = tenant.name, self._served
        self.is_on = True
        self._weights[name] = tenant.weight
        competing = set(backlogged)
        if name in competing:
            return
        if competing:
            floor = min(served[other] for other in competing)
        else:
            active = {seq.request.tenant.name for seq in running} or set(served)
            floor = max((served[other] for other in active), default=0.0)
        served[name] = max(served.get(name, 0.0), floor)

    def charge(self, tenant: Tenant, num_tokens: int) -> None:
        """Count tokens that a step computes for a tenant; negative = it will not."""
        self._tokens[tenant.name] += num_tokens
        self._served[tenant.name] += num_tokens / self._weights[tenant.name]

    def charge_each(self, sequences: Iterable[Sequence]) -> None:
        """Count one token for each of these sequences."""
        if self.is_on:
            for seq in sequences:
                self.charge(seq.request.tenant, 1)

    def yield_turn(self, tenant: Tenant, backlogged: Iterable[str]) -> None:
        """Take the credit of a tenant that waits for a limit of its own, so others lose nothing."""
        others = [self._served[name] for name in set(backlogged) if name != tenant.name]
        if others:
            self._served[tenant.name] = max(self._served[tenant.name], min(others))

    def in_turn(self, work: Iterable[Sequence], running: Iterable[Sequence]) -> Turns:
        """Return sequences with prompts to compute, the next one of the tenant served least.

        work:  of a tenant in the order in which they are computed
        """
        rows = Counter(seq.request.tenant.name for seq in running)
        queues: dict[str, deque[Sequence]] = {}
        for seq in work:
            queues.setdefault(seq.request.tenant.name, deque()).append(seq)
        return Turns(queues, self._served, {n: rows[n] / self._weights[n] for n in queues})

    def victim(self, running: Iterable[Sequence]) -> Sequence:
        """Return the sequence to preempt for memory: of the tenant that holds most, by weight."""
        if not self.is_on:
            return preemption_victim(running)
        by_tenant: dict[str, list[Sequence]] = {}
        for seq in running:
            by_tenant.setdefault(seq.request.tenant.name, []).append(seq)

        def held(name: str) -> float:
            return sum(len(s.table.pages) for s in by_tenant[name]) / self._weights[name]

        return preemption_victim(by_tenant[max(by_tenant, key=held)])

    def giving_way(
        self, running: Iterable[Sequence], than: Sequence, gap: int | None
    ) -> list[Sequence]:
        """Return the sequences that `than` may preempt, in the order of preemption.

        gap:  as engine.priority_preemption_gap; None = priorities preempt nothing
        """
        if not self.is_on:
            return [] if gap is None else lower_priority(running, than, gap)
        own = than.request.tenant
        mine = [seq for seq in running if seq.request.tenant.name == own.name]
        chosen = [] if gap is None else lower_priority(mine, than, gap)
        rows = Counter(seq.request.tenant.name for seq in running)
        least = _PREEMPTING_FACTOR * (rows[own.name] + 1) / own.weight
        others = [seq for seq in running if seq.request.tenant.name != own.name]
        for seq in sorted(others, key=_loss):
            name = seq.request.tenant.name
            is_ahead = self._served[name] >= self._served[own.name]
            if is_ahead and rows[name] / self._weights[name] >= least:
                chosen.append(seq)
                rows[name] -= 1
        return chosen


class Turns:
    """An iterator over sequences, each of the tenant that has been served least when it is taken.

    Ties go to the tenant with fewer running sequences by weight.
    """

    def __init__(
        self,
        queues: dict[str, deque[Sequence]],
        served: Mapping[str, float],
        rows: dict[str, float],
    ) -> None:
        self._queues = queues
        self._served = served
        self._rows = rows

    @property
    def backlogged(self) -> list[str]:
        """Tenants that have sequences left, or had when they were blocked."""
        return list(self._rows)

    def block(self, tenant: Tenant) -> None:
        """Leave out the rest of a tenant's sequences."""
        self._queues.pop(tenant.name, None)

    def __iter__(self) -> Iterator[Sequence]:
        """Yield until no tenant has sequences left."""
        queues = self._queues
        while queues:
            name = min(queues, key=lambda other: (self._served[other], self._rows[other]))
            seq = queues[name].popleft()
            if not queues[name]:
                del queues[name]
            yield seq


def _loss(seq: Sequence) -> tuple[bool, int, int, int]:
    """Sort by what preemption loses: whole prompts last, then by priority and output."""
    return (seq.computes_prompt, seq.priority, seq.num_output_tokens, -seq.order)
