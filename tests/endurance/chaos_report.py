"""The report of a run under faults: a table, and JSON with all that is needed to look into it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.endurance.client import Seen
from tests.endurance.oracle import Finding, count
from tests.endurance.schedule import Fault
from tests.endurance.statistics import percentile

MAX_RECOVERY_S = 20.0  # p99, asked of a server on two cores
MAX_SHOWN = 20
LAST_LINES = 12  # of the output of a server that did not start


@dataclass(slots=True)
class Trial:
    """A fault and its effects. Seconds count from the fault; None = never.

    pid:         the process that it was done to
    began_at:    by the clock of `Seen`
    is_void:     it did nothing, because there was nothing that it could be done to
    answered_s:  until a request that began after it had a good answer
    healed_s:    until all processes of before ran again
    """

    fault: Fault
    pid: int | None
    num_running: int
    began_at: float
    is_void: bool = False
    answered_s: float | None = None
    healed_s: float | None = None
    note: str = ""


@dataclass(slots=True, kw_only=True)
class Report:
    """What a topology did under faults.

    bodies:     of the requests, by name
    held:       what replicas held at idle
    leftovers:  what was left after the stop
    others:     wrong things that are no request's
    """

    topology: str
    seed: int
    trials: list[Trial]
    findings: Sequence[tuple[Seen, Finding]]
    bodies: Mapping[str, Mapping[str, Any]]
    held: Mapping[str, float]
    leftovers: Sequence[str]
    output: str
    others: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> list[tuple[Seen, Finding]]:
        return [(seen, finding) for seen, finding in self.findings if not finding.is_right]

    @property
    def faults(self) -> list[str]:
        """One line for everything that is wrong."""
        lines = [f"{f.verdict}: {seen.name} {seen.rid}: {f.reason}" for seen, f in self.wrong]
        lines += [
            f"fault {trial.fault.number} ({trial.fault.name}): no recovery"
            for trial in self.trials
            if not trial.is_void and (trial.answered_s is None or trial.healed_s is None)
        ]
        lines += [f"at idle {name} is {value:g}, not 0" for name, value in self.held.items()]
        lines += [f"left after the stop: {name}" for name in self.leftovers]
        answered = self.recovery_s
        if answered and percentile(answered, 99) > MAX_RECOVERY_S:
            lines.append(f"recovery p99 {percentile(answered, 99):.1f} s > {MAX_RECOVERY_S:g} s")
        if self.trials and not self.findings:
            lines.append("no request was made")
        return lines + self.others

    @property
    def recovery_s(self) -> list[float]:
        """Seconds to the first good answer, of each fault that did something."""
        return [
            trial.answered_s
            for trial in self.trials
            if not trial.is_void and trial.answered_s is not None
        ]

    @classmethod
    def of_failure(cls, topology: str, seed: int, error: Exception, output: str) -> Report:
        """Return the report of a run that ended with an exception, as when no server starts."""
        first, *_ = str(error).splitlines() or [""]
        last = [line for line in output.splitlines() if line.strip()][-LAST_LINES:]
        return cls(
            topology=topology,
            seed=seed,
            trials=[],
            findings=[],
            bodies={},
            held={},
            leftovers=[],
            output=output,
            others=[f"did not run: {type(error).__name__}: {first}", *last],
        )


def as_text(report: Report) -> str:
    """Return the table of a report."""
    lines = [f"== {report.topology}, seed {report.seed}", ""]
    lines.append(f"{'fault':>5}  {'what':50} {'running':>7} {'answer s':>8} {'healed s':>8}  note")
    lines += [
        f"{trial.fault.number:5}  {trial.fault.name:50} {trial.num_running:7}"
        f" {_times(trial)}  {trial.note}"
        for trial in report.trials
    ]
    found = count(finding for _, finding in report.findings)
    verdicts = ", ".join(f"{name} {number}" for name, number in sorted(found.items()))
    lines += ["", f"requests: {len(report.findings)} ({verdicts})"]
    if report.recovery_s:
        p50, p99 = (percentile(report.recovery_s, share) for share in (50, 99))
        lines.append(f"recovery (first good answer): p50 {p50:.2f} s, p99 {p99:.2f} s")
    faults = report.faults
    lines += [f"WRONG: {line[:300]}" for line in faults[:MAX_SHOWN]]
    if len(faults) > MAX_SHOWN:
        lines.append(f"... and {len(faults) - MAX_SHOWN} more: see the JSON file")
    lines.append(f"{'FAILED' if faults else 'passed'}: {report.topology}, seed {report.seed}")
    return "\n".join(lines) + "\n"


def _times(trial: Trial) -> str:
    if trial.is_void:
        return f"{'did nothing':>17}"
    return f"{_seconds(trial.answered_s)} {_seconds(trial.healed_s)}"


def _seconds(value: float | None) -> str:
    return "   never" if value is None else f"{value:8.2f}"


def write_json(path: Path, reports: Sequence[Report]) -> None:
    """Write reports with the full record of each wrong request."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([_as_data(report) for report in reports], indent=1, default=str))


def _as_data(report: Report) -> dict[str, Any]:
    return {
        "topology": report.topology,
        "seed": report.seed,
        "repeat": f"make chaos MINUTES=... SEED={report.seed} TOPOLOGY={report.topology}",
        "faults": [asdict(trial) | {"name": trial.fault.name} for trial in report.trials],
        "verdicts": count(finding for _, finding in report.findings),
        "recovery_s": report.recovery_s,
        "wrong": report.faults,
        "wrong_requests": [
            {
                "body": report.bodies.get(seen.name),
                "verdict": finding.verdict,
                "reason": finding.reason,
                "seen": asdict(seen),
            }
            for seen, finding in report.wrong
        ],
        "output": report.output[-20_000:] if report.faults else "",
    }
