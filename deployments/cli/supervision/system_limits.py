"""Limits of the system that a server needs, checked before Ray starts."""

from __future__ import annotations

import resource

from remora.deployments.cli.terminal import Failure

# Ray raises the soft limit to the hard one. Its processes have some hundred files each; HAProxy
# refuses to start unless it may have two for each of 4,096 connections, and some more.
RAY_FILES = 1024
HAPROXY_FILES = 8400


def check_open_files(*, has_haproxy: bool) -> None:
    """Raise Failure if processes may not open enough files."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        return
    if hard < RAY_FILES:
        raise Failure(
            f"a process may open only {hard} files, and Ray needs {RAY_FILES}; raise the limit "
            "with `ulimit -Hn 65536` as root, or LimitNOFILE= of a systemd unit"
        )
    if has_haproxy and hard < HAPROXY_FILES:
        raise Failure(
            f"a process may open only {hard} files, and HAProxy needs {HAPROXY_FILES}; raise the "
            "limit with `ulimit -Hn 65536` as root, or choose --proxy python"
        )
