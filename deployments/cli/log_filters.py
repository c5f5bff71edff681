"""Filter for the output of Ray's own processes during shutdown.

Ray prefixes each forwarded line with the name of its process. A regular shutdown makes Serve's own
processes print tracebacks: the controller is killed during a call, and HAProxy's manager updates a
HAProxy that has stopped. The filter drops these lines. Output of replicas and ranks is kept.
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
def drop_ray_output() -> Iterator[None]:
    """Drop the output of Serve's own actors and of the raylet within the block."""
    out, err = (cast("IO[str]", _Filter(stream)) for stream in (sys.stdout, sys.stderr))
    with redirect_stdout(out), redirect_stderr(err):
        yield


class _Filter:
    """A text stream to which Ray writes a message and its line end separately."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._drops_line_end = False

    def write(self, text: str) -> int:
        """Write `text`, or drop it if it comes from Ray's own processes."""
        if _RAYS_OWN.match(text):
            self._drops_line_end = not text.endswith("\n")
        elif self._drops_line_end and text == "\n":
            self._drops_line_end = False
        else:
            self._stream.write(text)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
