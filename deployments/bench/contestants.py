"""The sides of a comparison: a URL, a remora configuration, a written report, or any command.

A configuration runs in a new `remora bench` process in each round, so that it shares no threads,
caches or memory with the other side.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from remora.deployments.bench import online
from remora.deployments.bench.http_client import Endpoint, parse_url
from remora.deployments.bench.machine import microarchitecture
from remora.deployments.bench.server_process import STOP_S, own_command
from remora.deployments.bench.targets import read_target, split_spec
from remora.deployments.bench.workloads import Size, Workload
from remora.deployments.cli.terminal import Failure

Figures = dict[str, dict[str, float]]
URL_PREFIXES = ("http://", "https://")
COMMAND_PREFIX = "cmd:"


class Contestant(Protocol):
    """One side of a comparison, which can be measured repeatedly."""

    spec: str

    @property
    def microarchitecture(self) -> str:
        """Of the processor that measures or measured; empty if unknown."""
        ...

    def measure(self, workloads: Sequence[Workload], *, seed: int) -> Figures:
        """Return figures by workload, without unsupported workloads. Raises Failure."""
        ...


def read_contestant(
    spec: str, size: Size, *, model: str | None = None, api_key: str | None = None
) -> Contestant:
    """Parse one side of a comparison. Raises Failure, ConfigError.

    model, api_key:  for URLs
    """
    if spec.startswith(URL_PREFIXES):
        return UrlContestant(spec, size, parse_url(spec, api_key), model)
    if spec.startswith(COMMAND_PREFIX):
        return CommandContestant(spec, shlex.split(spec.removeprefix(COMMAND_PREFIX)))
    if spec.endswith(".json"):
        return ReportContestant(spec, *read_report(Path(spec)))
    name, settings = split_spec(spec)
    read_target(name, settings)  # report errors before the first round
    return ConfigContestant(spec, size, name, settings)


@dataclass(slots=True)
class UrlContestant:
    """A running server."""

    spec: str
    size: Size
    endpoint: Endpoint
    model: str | None
    microarchitecture: str = ""

    def measure(self, workloads: Sequence[Workload], *, seed: int) -> Figures:
        """Run the workloads on the server."""
        return asyncio.run(self._measure(workloads, seed))

    async def _measure(self, workloads: Sequence[Workload], seed: int) -> Figures:
        server = await online.Server.open(self.endpoint, self.model)
        found: Figures = {}
        for workload in workloads:
            result = await online.measure(server, self.size.of(workload), seed=seed)
            if result.skipped is None and not result.figures["failures"]:
                found[workload.name] = result.figures
        return found


@dataclass(slots=True)
class ConfigContestant:
    """A configuration: an engine in a new process; for online workloads, a whole server."""

    spec: str
    size: Size
    name: str
    settings: Sequence[str]
    microarchitecture: str = field(default_factory=microarchitecture)

    def measure(self, workloads: Sequence[Workload], *, seed: int) -> Figures:
        """Run the workloads in new processes."""
        sets = [text for setting in self.settings for text in ("--set", setting)]
        common = [*sets, "--json", "-", "--repeats", "1", "--seed", str(seed)]
        common += self.size.options()
        offline = [w.name for w in workloads if w.concurrency is None]
        streams = [str(w.concurrency) for w in workloads if w.concurrency is not None]
        found: Figures = {}
        if offline:
            names = ["--workload", ",".join(offline)]
            found |= run_command(own_command("bench", "offline", self.name, *names, *common))
        if streams:
            numbers = ["--concurrency", ",".join(streams)]
            found |= run_command(own_command("bench", "serve", self.name, *numbers, *common))
        return found


@dataclass(slots=True)
class CommandContestant:
    """A command that prints figures as JSON. {workloads} and {seed} in it are replaced."""

    spec: str
    command: Sequence[str]
    microarchitecture: str = field(default_factory=microarchitecture)

    def measure(self, workloads: Sequence[Workload], *, seed: int) -> Figures:
        """Run the command."""
        names = ",".join(workload.name for workload in workloads)
        filled = [
            part.replace("{workloads}", names).replace("{seed}", str(seed)) for part in self.command
        ]
        found = run_command(filled)
        wanted = {workload.name for workload in workloads}
        return {name: figures for name, figures in found.items() if name in wanted}


@dataclass(slots=True)
class ReportContestant:
    """A report that `remora bench --json` wrote earlier: every round has the same figures."""

    spec: str
    figures: Figures
    microarchitecture: str

    def measure(self, workloads: Sequence[Workload], *, seed: int) -> Figures:
        """Return the report's figures."""
        wanted = {workload.name for workload in workloads}
        return {name: figures for name, figures in self.figures.items() if name in wanted}


def read_report(path: Path) -> tuple[Figures, str]:
    """Read the figures and the microarchitecture of a report. Raises Failure."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Failure(f"cannot read {path}: {error}") from None
    figures = parse_figures(text, str(path))
    machine = json.loads(text[text.find("{") :]).get("machine")
    return figures, str(machine.get("microarchitecture", "")) if isinstance(machine, dict) else ""


def machine_warning(a: Contestant, b: Contestant) -> str | None:
    """Return a warning if both sides are known to come from different processors."""
    first, second = a.microarchitecture, b.microarchitecture
    if not first or not second or first == second:
        return None
    return (
        f"A was measured on {first}, B on {second}: ratios compare the processors as well; measure "
        "both on one machine"
    )


def run_command(command: Sequence[str]) -> Figures:
    """Run a command and parse the figures that it prints. Raises Failure.

    It runs in its own process group, so that Ctrl-C can stop all its processes.
    """
    with tempfile.TemporaryFile("w+") as errors:
        try:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
            )
        except OSError as error:
            raise Failure(f"{command[0]}: cannot run the command: {error.strerror}") from None
        try:
            output, _ = process.communicate()
        except BaseException:
            _stop(process)
            raise
        errors.seek(0)
        last = next(reversed(errors.read().strip().splitlines()), "no output on stderr")
    if process.returncode != 0:
        raise Failure(f"{shlex.join(command)} failed with exit code {process.returncode}: {last}")
    return parse_figures(output, shlex.join(command))


def _stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGINT)  # lets the command stop a server that it started
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def parse_figures(text: str, source: str) -> Figures:
    """Parse `{"workload": {"figure": number}}` or a report of `remora bench`. Raises Failure.

    source:  origin of the text, for error messages
    """
    try:
        # Libraries may print other text before the object.
        data: Any = json.loads(text[text.find("{") :])
    except ValueError:
        raise Failure(f"{source}: expected a JSON object, found {text.strip()[:80]!r}") from None
    data = data.get("figures", data)
    figures = {
        str(workload): {
            str(name): float(value)
            for name, value in values.items()
            if isinstance(value, int | float) and math.isfinite(value)
        }
        for workload, values in data.items()
        if isinstance(values, dict)
    }
    if not figures:
        raise Failure(f'{source}: expected {{"workload": {{"figure": number}}}}, found none')
    return figures
