"""Which output is dropped while Ray shuts down. Lines look as Ray 2.60 prints them."""

from __future__ import annotations

import sys

import pytest

from remora.deployments.cli.log_filters import drop_ray_output

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
def test_output_of_rays_own_processes_is_dropped(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with drop_ray_output():
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
def test_other_output_is_kept_and_all_of_it_afterwards(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with drop_ray_output():
        print(line)

    print("(raylet) afterwards")

    assert capsys.readouterr().out == f"{line}\n(raylet) afterwards\n"
