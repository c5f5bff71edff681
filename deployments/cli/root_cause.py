"""The cause of a failed start within what Ray and Serve say: one line instead of a traceback.

Ray passes errors of actors on as text: the tracebacks of all processes that the error went
through, in one another, whose last lines name the error that came first. Knows the forms of
Python's tracebacks and of Ray's messages about dead actors, nothing else.
"""

from __future__ import annotations

import re

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_FRAME = re.compile(r'^\s*File ".*", line \d+')
# `ValueError: text`, `remora.configs.errors.ConfigError: text`, `StopIteration`.
_ERROR = re.compile(r"^(?P<module>(?:\w+\.)*)(?P<name>[A-Za-z_]\w*)(?:: (?P<text>.*))?$")
_OURS = "remora."
# In Ray's message about an actor whose process has died, after its class, id and address.
_DEAD_ACTOR = "The actor is dead because"


def root_cause(message: str) -> str:
    """Return the lines of a message that say why: of a traceback the error that ends it.

    An error of remora is its text, which may have several lines; another one is its type and the
    first line of its text.
    """
    lines = _COLOUR.sub("", message).strip().splitlines()
    frames = [number for number, line in enumerate(lines) if _FRAME.match(line)]
    if frames:
        return _error_after(lines[frames[-1] + 1 :]) or lines[-1].strip()
    for line in lines:
        if line.strip().startswith(_DEAD_ACTOR):
            return line.strip()
    # Serve introduces an error by a line of its own.
    named = [line.strip() for line in lines if line.strip() and not line.rstrip().endswith(":")]
    return (named or lines or [""])[0]


def _error_after(lines: list[str]) -> str | None:
    """Return the error that follows the last frame, after the frame's own indented lines."""
    for number, line in enumerate(lines):
        found = None if line[:1].isspace() else _ERROR.match(line)
        if found is None:
            continue
        text = found["text"]
        if not text:
            return found["name"]
        if found["module"].startswith(_OURS):
            rest = [more.rstrip() for more in lines[number + 1 :] if more.strip()]
            return "\n".join([text, *rest])
        return f"{found['name']}: {text}"
    return None
