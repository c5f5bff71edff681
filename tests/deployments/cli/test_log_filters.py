"""Who is heard while Ray is taken down, and who is not. Lines look as Ray 2.60 prints them."""

from __future__ import annotations

import sys

import pytest

from remora.deployments.cli.log_filters import hushed

CYAN, YELLOW, PLAIN = "\x1b[36m", "\x1b[33m", "\x1b[0m"


@pytest.mark.parametrize(
    "line",
    [
        f"{YELLOW}(raylet){PLAIN} Task ServeController.graceful_shutdown failed.\nError: killed.",
        f"{CYAN}(HAProxyManager pid=7){PLAIN} Traceback (most recent call last):",
        f"{CYAN}(ServeController pid=7, ip=10.0.0.2){PLAIN} WARNING",
        "(ProxyActor pid=7) WARNING",
    ],
)
def test_rays_own_processes_are_not_heard(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with hushed():
        print("before")
        print(line)
        print(line, file=sys.stderr)
        print("after", file=sys.stderr)

    assert capsys.readouterr() == ("before\n", "after\n")


@pytest.mark.parametrize(
    "line",
    [
        f"{CYAN}(ServeReplica:remora:LLMServer pid=7){PLAIN} stopping; requests have 120 s",
        f"{CYAN}(remora:m:replica:rank1 pid=7){PLAIN} lost",
        "Traceback (most recent call last):",
        "error: (raylet) is not known",
        "",
    ],
)
def test_everybody_else_is_heard(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with hushed():
        print(line)

    assert capsys.readouterr().out == f"{line}\n"


def test_afterwards_all_are_heard_again(capsys: pytest.CaptureFixture[str]) -> None:
    with hushed():
        pass
    print("(raylet) heard")

    assert capsys.readouterr().out == "(raylet) heard\n"
