"""What is wrong with calls that a model wrote, for whoever counts it.

Parsers say it to a function that they are given, as they find it, and read on. What a fault means
for the reply is the parser's matter; how often there are any tells an operator whether the format
is the model's own.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum


class CallFault(StrEnum):
    """What is wrong.

    MALFORMED:     what opened as a call is none; or its arguments break off, or are no object
    UNFINISHED:    the text ended within a call
    UNKNOWN_TOOL:  the tool was not offered; the call is given to the client all the same
    """

    MALFORMED = "malformed"
    UNFINISHED = "unfinished"
    UNKNOWN_TOOL = "unknown_tool"


FaultCallback = Callable[[CallFault], object]
"""Takes each fault of one reply."""


def ignore_fault(fault: CallFault) -> None:
    """Forget a fault."""
