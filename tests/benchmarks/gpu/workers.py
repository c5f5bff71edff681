"""Measure in separate processes, so that a crash or a hang of one does not end the others.

An illegal address leaves a process without its GPU, and a kernel that waits for ever cannot be
stopped otherwise. A worker goes through a list of things in order. It writes a line of JSON when it
begins one, and one for each finding; should it die, the next worker starts behind what it was at.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any

Finding = Mapping[str, Any]
MAX_DEATHS = 4  # of workers, one after the other, which have found nothing


def begin(place: int, about: Finding, seconds: float | None = None) -> None:
    """Begin a measurement; `about` is reported if it never ends.

    seconds:  without a line, after which the worker is ended
    """
    _write({"begin": place, "about": dict(about), "seconds": seconds})


def announce(count: int) -> None:
    """Tell how many measurements there are in all."""
    _write({"count": count})


def tell(finding: Finding) -> None:
    """Tell a finding."""
    _write({"found": dict(finding)})


def findings(
    command: Callable[[int], Sequence[str]],
    *,
    silence_s: float,
    until: float,
    log: IO[str] | None = None,
) -> Iterator[Finding]:
    """Yield what workers find, and for each thing that ended one what it was about, and `failure`.

    command:    of a worker that begins with the thing of a number
    silence_s:  without a line after which a worker is ended, unless what it has begun has its own
    until:      when all ends, by `time.monotonic`
    log:        of what workers write besides; None = the standard error
    """
    first = deaths = count = 0
    while deaths < MAX_DEATHS and time.monotonic() < until:
        begun, about, is_told, wait_s = first, {}, False, silence_s
        with _started(command(first), log) as process:
            lines = _lines_of(process)
            reason = ""
            while True:
                try:
                    line = lines.get(timeout=max(0.0, min(wait_s, until - time.monotonic())))
                except queue.Empty:
                    is_late = time.monotonic() >= until
                    reason = _late(count - begun - 1) if is_late else f"nothing for {wait_s:.0f} s"
                    end(process)
                    break
                if line is None:
                    break
                said = _parsed(line, log)
                if "begin" in said:
                    begun, about, is_told = said["begin"], said["about"], False
                    wait_s = said["seconds"] or silence_s
                elif "count" in said:
                    count = said["count"]
                elif "found" in said:
                    is_told, deaths = True, 0
                    yield said["found"]
            status = process.wait()
        if status == 0:
            return
        if reason or not is_told:
            yield {**about, "failure": reason or f"the process ended with {status}"}
        first, deaths = begun + 1, deaths + 1


def _late(num_left: int) -> str:
    return "the time was up" + (f"; {num_left} later cases were not reached" * (num_left > 0))


@contextmanager
def _started(command: Sequence[str], log: IO[str] | None) -> Iterator[subprocess.Popen[str]]:
    """Start a process that does not outlive the block, nor do those that it starts."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            end(process)


def end(process: subprocess.Popen[str]) -> None:
    """Kill a process that leads a session, and all of the session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _write(said: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()


def _lines_of(process: subprocess.Popen[str]) -> queue.Queue[str | None]:
    """Return where a process's lines come, and None when there are no more."""
    lines: queue.Queue[str | None] = queue.Queue()
    assert process.stdout is not None

    def read(stream: IO[str]) -> None:
        for line in stream:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, args=(process.stdout,), daemon=True).start()
    return lines


def _parsed(line: str, log: IO[str] | None) -> dict[str, Any]:
    """Return what a line says; libraries write lines of their own, which say nothing."""
    try:
        said = json.loads(line)
    except json.JSONDecodeError:
        (log or sys.stderr).write(line)
        return {}
    return said if isinstance(said, dict) else {}
