"""The line of a starting server, on terminals and elsewhere."""

from __future__ import annotations

import io
import sys
import time

import pytest

from remora.deployments.cli.startup.progress import Progress


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


def until_shown(stream: io.StringIO, text: str) -> None:
    deadline = time.monotonic() + 10
    while text not in stream.getvalue():
        assert time.monotonic() < deadline, stream.getvalue()
        time.sleep(0.005)


def test_elsewhere_a_plain_line_names_a_phase_that_lasts() -> None:
    stream = io.StringIO()
    with Progress(stream, clock=lambda: 12.0, period_s=0.01) as progress:
        progress.phase("starting Ray")
        assert stream.getvalue() == "" or "starting Ray" in stream.getvalue()
        until_shown(stream, "starting: starting Ray, 0 s\n")
    shown = stream.getvalue()

    assert "\x1b" not in shown
    assert "\r" not in shown


def test_a_short_start_writes_nothing_but_on_a_terminal() -> None:
    stream = io.StringIO()
    with Progress(stream) as progress:
        progress.phase("starting Ray")

    assert stream.getvalue() == ""


def test_output_appears_above_the_line_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    with Progress(terminal, clock=lambda: 1.0, period_s=100) as progress:
        progress.phase("loading the model")
        sys.stdout.write("a line\n")
    sys.stdout.write("ready\n")

    line = "\x1b[2Kstarting: loading the model, 0 s\r"
    assert terminal.getvalue() == f"{line}\x1b[2Ka line\n\x1b[2Kready\n"
