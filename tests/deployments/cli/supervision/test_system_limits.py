"""Limits that a server could not work with."""

from __future__ import annotations

import resource

import pytest

from remora.deployments.cli.supervision.system_limits import check_open_files
from remora.deployments.cli.terminal import Failure


@pytest.mark.parametrize(
    ("hard", "has_haproxy", "reason"),
    [
        (256, False, r"only 256 files, and Ray needs"),
        (4096, False, None),
        (4096, True, r"HAProxy needs \d+.*--proxy python"),
        (65_536, True, None),
        (resource.RLIM_INFINITY, True, None),
    ],
)
def test_a_low_limit_of_open_files_is_refused_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, hard: int, has_haproxy: bool, reason: str | None
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (64, hard))

    if reason is None:
        check_open_files(has_haproxy=has_haproxy)
    else:
        with pytest.raises(Failure, match=reason):
            check_open_files(has_haproxy=has_haproxy)
