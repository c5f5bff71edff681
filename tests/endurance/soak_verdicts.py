"""What a soak has shown: growth of processes, drift of latencies, and what is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.endurance.processes import OURS, Usage
from tests.endurance.statistics import percentile, slope

MAX_GROWTH_PER_HOUR = 2.0  # percent of anonymous memory, of each of our processes
MAX_DRIFT = 10.0  # percent of the canaries' p99
MAX_POINTS = 400  # of a process; the slope looks at all pairs of them
RAY_BOUND_MB = 4096.0  # anonymous memory of all of Ray's own processes
MB = 1e6


@dataclass(frozen=True, slots=True)
class Sample:
    """What all processes used at one time, in seconds since the start."""

    at_s: float
    usages: Sequence[Usage]


@dataclass(frozen=True, slots=True)
class Growth:
    """A process over the run. First and last are means of the first and last tenth.

    per_hour:  growth of anonymous memory in percent of its median, over the last two thirds
    """

    kind: str
    pid: int
    first_mb: float
    last_mb: float
    per_hour: float
    descriptors: tuple[int, int]
    threads: tuple[int, int]


@dataclass(slots=True, kw_only=True)
class Soak:
    """The result of a soak.

    latencies:  (seconds since the start, seconds) of each canary
    wrong:      one line for each wrong answer
    held:       what replicas held at idle
    """

    seed: int
    seconds: float
    samples: Sequence[Sample]
    latencies: Sequence[tuple[float, float]]
    verdicts: Mapping[str, int]
    num_canaries: int
    wrong: Sequence[str]
    held: Mapping[str, float]
    leftovers: Sequence[str]
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def growths(self) -> list[Growth]:
        """Each process that ran at the end, ours first."""
        alive = self.samples[-1].usages if self.samples else []
        found = [_growth(usage, self.samples) for usage in alive if usage.kind in OURS]
        return sorted(found, key=lambda growth: (growth.kind, growth.pid))

    @property
    def ray_mb(self) -> tuple[float, float]:
        """Anonymous memory of Ray's and Serve's own processes, at the start and at the end."""
        first, last = (
            sum(usage.anonymous_bytes for usage in sample.usages if usage.kind not in OURS) / MB
            for sample in (self.samples[0], self.samples[-1])
        )
        return first, last

    def latency(self, share: float) -> tuple[float, float]:
        """Return a percentile of the canaries in the first and in the last third."""
        first = [took for at, took in self.latencies if at < self.seconds / 3]
        last = [took for at, took in self.latencies if at >= 2 * self.seconds / 3]
        return percentile(first, share), percentile(last, share)

    @property
    def faults(self) -> list[str]:
        """One line for everything that is not allowed."""
        lines = [
            f"{growth.kind} {growth.pid} grows by {growth.per_hour:.1f} % an hour"
            f" (allowed: {MAX_GROWTH_PER_HOUR:g})"
            for growth in self.growths
            if growth.per_hour > MAX_GROWTH_PER_HOUR
        ]
        lines += self._ended()
        lines += [f"at idle {name} is {value:g}, not 0" for name, value in self.held.items()]
        lines += [f"wrong answer: {line}" for line in self.wrong]
        lines += [f"left after the stop: {name}" for name in self.leftovers]
        if self.ray_mb[1] > RAY_BOUND_MB:
            lines.append(f"Ray's own processes have {self.ray_mb[1]:.0f} MB > {RAY_BOUND_MB:g}")
        if not self._has_thirds():
            lines.append("too few canaries: run longer")
        elif (drift := self.drift) > MAX_DRIFT:
            lines.append(f"p99 of the canaries rose by {drift:.1f} % (allowed: {MAX_DRIFT:g})")
        return lines

    @property
    def drift(self) -> float:
        """By how many percent the canaries' p99 of the last third exceeds that of the first."""
        first, last = self.latency(99)
        return 100 * (last / first - 1)

    def _has_thirds(self) -> bool:
        times = [at for at, _ in self.latencies]
        return bool(times) and min(times) < self.seconds / 3 and max(times) >= 2 * self.seconds / 3

    def _ended(self) -> list[str]:
        """Return which of our processes of the first sample have ended."""
        first, last = (
            {(usage.kind, usage.pid) for usage in sample.usages if usage.kind in OURS}
            for sample in (self.samples[0], self.samples[-1])
        )
        return [f"{kind} {pid} has ended" for kind, pid in sorted(first - last)]


def _growth(usage: Usage, samples: Sequence[Sample]) -> Growth:
    own = [
        (sample.at_s, found)
        for sample in samples
        for found in sample.usages
        if found.pid == usage.pid
    ]
    tail = [(at, found.anonymous_bytes / MB) for at, found in own[len(own) // 3 :]]
    tail = tail[:: len(tail) // MAX_POINTS + 1]
    tenth = max(1, len(own) // 10)
    middle = percentile([megabytes for _, megabytes in tail], 50)
    return Growth(
        usage.kind,
        usage.pid,
        sum(found.anonymous_bytes for _, found in own[:tenth]) / tenth / MB,
        sum(found.anonymous_bytes for _, found in own[-tenth:]) / tenth / MB,
        100 * slope(tail) * 3600 / middle if middle else 0.0,
        (own[0][1].num_descriptors, own[-1][1].num_descriptors),
        (own[0][1].num_threads, own[-1][1].num_threads),
    )


def as_text(soak: Soak) -> str:
    """Return the tables of a soak."""
    lines = [f"== soak of {soak.seconds / 60:.1f} min, seed {soak.seed}", ""]
    lines.append(
        f"{'process':16} {'pid':>8} {'MB first':>9} {'MB last':>9} {'% / h':>7}"
        f" {'descriptors':>12} {'threads':>10}"
    )
    lines += [
        f"{g.kind:16} {g.pid:8} {g.first_mb:9.1f} {g.last_mb:9.1f} {g.per_hour:7.2f}"
        f" {g.descriptors[0]:5} {g.descriptors[1]:6} {g.threads[0]:5} {g.threads[1]:4}"
        for g in soak.growths
    ]
    first, last = soak.ray_mb
    lines.append(
        f"Ray's own processes: {first:.0f} MB, then {last:.0f} MB (bound {RAY_BOUND_MB:g})"
    )
    counts = ", ".join(f"{name} {number}" for name, number in sorted(soak.verdicts.items()))
    lines.append(f"requests: {sum(soak.verdicts.values())} ({counts})")
    if soak._has_thirds():
        for share in (50, 99):
            begun, ended = soak.latency(share)
            lines.append(
                f"canaries p{share}: {begun * 1000:.0f} ms in the first third,"
                f" {ended * 1000:.0f} ms in the last ({100 * (ended / begun - 1):+.1f} %)"
            )
    lines.append(f"canaries: {soak.num_canaries}; held at idle: {dict(soak.held) or 'nothing'}")
    faults = soak.faults
    lines += [f"WRONG: {line[:300]}" for line in faults]
    lines.append("FAILED" if faults else "passed")
    return "\n".join(lines) + "\n"


def as_data(soak: Soak) -> dict[str, Any]:
    """Return a soak as plain data."""
    return asdict(soak) | {"growths": [asdict(g) for g in soak.growths], "faults": soak.faults}
