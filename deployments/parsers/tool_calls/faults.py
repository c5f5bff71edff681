"""Faults in the tool calls that a model writes.

Parsers report each fault to a callback and continue. The parser decides what a fault means for the
reply; how often faults occur tells an operator whether the configured format is the model's own.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum


class CallFault(StrEnum):
    """A kind of fault.

    MALFORMED:     a supposed call is not a call; or its arguments break off or are not an object
    UNFINISHED:    the text ended within a call
    UNKNOWN_TOOL:  the tool was not offered; the client receives the call all the same
    """

    MALFORMED = "malformed"
    UNFINISHED = "unfinished"
    UNKNOWN_TOOL = "unknown_tool"


FaultCallback = Callable[[CallFault], object]
"""Takes each fault of one reply."""


def ignore_fault(fault: CallFault) -> None:
    """Ignore a fault."""
