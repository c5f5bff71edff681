"""What a driver reports to its supervisor: lines of JSON in a pipe."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from enum import StrEnum
from types import FrameType
from typing import Any


class Stopped(BaseException):
    """The supervisor asked the driver to stop. A BaseException: Ray catches Exception broadly."""


class Phase(StrEnum):
    """The driver's phases, by what a stop signal does in them."""

    PREPARING = "preparing"  # interrupts the driver, which removes its temporary files
    STARTING = "starting"  # kills it: an exception while Ray starts makes Ray crash
    READY = "ready"  # interrupts the driver, which drains the server


class DriverLink:
    """The driver's end. Its methods return at once."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._let_stop()

    def starting(self) -> None:
        """Report that Ray starts now."""
        self._report(phase=Phase.STARTING)

    def watch(self, pids: Mapping[str, int]) -> None:
        """Name processes without which the server cannot go on."""
        self._report(watch=dict(pids))

    def ready(self) -> None:
        """Report that the server answers; a stop signal raises Stopped from now on."""
        self._let_stop()
        self._report(phase=Phase.READY)

    def draining(self, timeout_s: float) -> None:
        """Report that a drain began, and the longest time that it takes."""
        self._report(drain_s=timeout_s)

    def ended(self) -> None:
        """Report that the driver ends on purpose, and has said why."""
        self._report(ended=True)

    def _let_stop(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):  # Ray installs handlers of its own
            signal.signal(number, _raise_stopped)

    def _report(self, **fields: Any) -> None:
        with suppress(BrokenPipeError):  # the supervisor has ended, and so will this process
            os.write(self._descriptor, json.dumps(fields).encode() + b"\n")


def _raise_stopped(_number: int, _frame: FrameType | None) -> None:
    raise Stopped


class Reports:
    """The supervisor's end: the reports of a driver so far.

    phase:     of the driver
    watched:   pids by name
    drain_s:   longest time of the drain that began; None = none did
    is_ended:  the driver ends on purpose
    """

    def __init__(self, descriptor: int) -> None:
        self.phase = Phase.PREPARING
        self.watched: dict[str, int] = {}
        self.drain_s: float | None = None
        self.is_ended = False
        self._descriptor = descriptor
        self._rest = b""
        os.set_blocking(descriptor, False)

    def read(self) -> None:
        """Take in what has arrived."""
        with suppress(BlockingIOError):
            while data := os.read(self._descriptor, 4096):
                self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            report = json.loads(line)
            self.phase = Phase(report.get("phase", self.phase))
            self.watched |= report.get("watch", {})
            self.drain_s = report.get("drain_s", self.drain_s)
            self.is_ended |= report.get("ended", False)
