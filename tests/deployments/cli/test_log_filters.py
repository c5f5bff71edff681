"""Which output is dropped while Ray shuts down. Lines look as Ray 2.60 prints them."""

from __future__ import annotations

import sys

import pytest

from remora.deployments.cli.log_filters import drop_ray_output

CYAN, YELLOW, PLAIN = "\x1b[36m", "\x1b[33m", "\x1b[0m"


@pytest.mark.parametrize(
    ("line", "is_kept"),
    [
        (f"{YELLOW}(raylet){PLAIN} Task ServeController.graceful_shutdown failed.\nkilled.", False),
        (f"{CYAN}(HAProxyManager pid=7){PLAIN} Traceback (most recent call last):", False),
        (f"{CYAN}(ServeController pid=7, ip=10.0.0.2){PLAIN} WARNING", False),
        ("(ProxyActor pid=7) WARNING", False),
        (f"{CYAN}(ServeReplica:remora:LLMServer pid=7){PLAIN} stopping; requests have 120 s", True),
        (f"{CYAN}(remora:m:replica:rank1 pid=7){PLAIN} lost", True),
        ("Traceback (most recent call last):", True),
        ("error: (raylet) is not known", True),
        ("", True),
    ],
)
def test_only_output_of_rays_own_processes_is_dropped(
    line: str, is_kept: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with drop_ray_output():
        print("before")
        print(line)
        print(line, file=sys.stderr)
        print("after", file=sys.stderr)
    print("(raylet) afterwards")

    kept = f"{line}\n" if is_kept else ""
    assert capsys.readouterr() == (f"before\n{kept}(raylet) afterwards\n", f"{kept}after\n")
