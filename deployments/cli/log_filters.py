"""What Ray's own processes say while they are taken down is not shown.

Ray prints what its processes say, each line after the name of who says it. At a regular end Serve's
are taken by surprise: its controller is killed in the middle of a call, and HAProxy's manager hears
of the last replicas' departure after its HAProxy was stopped. None of it concerns an operator, who
would read tracebacks after a Ctrl-C. Replicas and ranks, and we ourselves, are heard to the end.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import IO, Any, cast

_RAYS_OWN = re.compile(
    r"(\x1b\[\d+m)*\((raylet|ServeController|HAProxyManager|ProxyActor)(?![:\w])[^)]*\)"
)


@contextmanager
def hushed() -> Iterator[None]:
    """Leave out what Serve's own actors and the raylet say from here on."""
    out, err = (cast("IO[str]", _Filter(stream)) for stream in (sys.stdout, sys.stderr))
    with redirect_stdout(out), redirect_stderr(err):
        yield


class _Filter:
    """A text stream to which Ray writes a message, and then the end of its line."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._owes_end = False

    def write(self, text: str) -> int:
        """Write, or swallow the message and the end of its line."""
        if _RAYS_OWN.match(text):
            self._owes_end = not text.endswith("\n")
        elif self._owes_end and text == "\n":
            self._owes_end = False
        else:
            self._stream.write(text)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
