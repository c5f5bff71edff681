"""The faults of a run: a function of the seed and the topology, so that a run can be repeated."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from tests.endurance.cut_proxy import Cut
from tests.endurance.oracle import Reach
from tests.endurance.topologies import HANG_S, Target, Topology


class Kind(StrEnum):
    """What a fault does."""

    KILL = "kill"
    PAUSE = "pause"  # SIGSTOP, and SIGCONT before anything gives the process up
    STOP = "stop"  # SIGSTOP for so long that it may be given up
    CUT = "cut"  # connections of clients
    STALL = "stall"  # connections of clients, for some time
    SEVER = "sever"  # sockets between a process and other processes of the server
    FILES = "fill files"  # no file of the process can grow
    DESCRIPTORS = "fill descriptors"  # the process can open none


# Python reports a full disk as an error; a process of C++ would be ended by SIGXFSZ.
FILLED = frozenset({"replica", "gateway", "rank", "manager"})
SEVERED = frozenset({"replica", "gateway", "rank"})
WEIGHTS = {Kind.KILL: 6, Kind.PAUSE: 2, Kind.STOP: 2, Kind.SEVER: 2, Kind.CUT: 3, Kind.STALL: 1}
WEIGHTS |= {Kind.FILES: 1, Kind.DESCRIPTORS: 1}


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    pick:       selects among the processes of the target's kind, or among connections
    seconds:    how long it lasts; 0 for what is done at once
    gap_s:      time before it
    """

    number: int
    kind: Kind
    target: Target | None
    pick: int
    seconds: float
    gap_s: float
    how: Cut | None = None

    @property
    def name(self) -> str:
        where = f" {self.target.kind}" if self.target is not None else ""
        how = f" ({self.how})" if self.how is not None else ""
        time = f" for {self.seconds} s" if self.seconds else ""
        return f"{self.kind}{where}{how}{time}"

    @property
    def reach(self) -> Reach:
        """Which requests it may end."""
        if self.kind in (Kind.PAUSE, Kind.STALL, Kind.FILES):
            return Reach.NOTHING
        if self.target is None:
            return Reach.CUT
        return self.target.reach


def faults(seed: int, topology: Topology) -> Iterator[Fault]:
    """Yield faults without end."""
    chance = random.Random(f"{seed} {topology.name}")
    number = 0
    while True:
        kind = chance.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        target = chance.choice(list(topology.targets))
        seconds = {
            Kind.PAUSE: round(chance.uniform(0.2, HANG_S / 4), 2),
            Kind.STOP: round(chance.uniform(2 * HANG_S, 3 * HANG_S), 2),
        }.get(kind, round(chance.uniform(0.5, 2.0), 2))
        pick, gap_s = chance.randrange(1000), round(chance.uniform(0.3, 2.0), 2)
        how = chance.choice(list(Cut))
        if (kind is Kind.SEVER and target.kind not in SEVERED) or (
            kind in (Kind.FILES, Kind.DESCRIPTORS) and target.kind not in FILLED
        ):
            continue
        if kind in (Kind.KILL, Kind.SEVER, Kind.CUT):
            seconds = 0.0
        is_of_clients = kind in (Kind.CUT, Kind.STALL)
        yield Fault(
            number,
            kind,
            None if is_of_clients else target,
            pick,
            seconds,
            gap_s,
            how if kind is Kind.CUT else None,
        )
        number += 1
