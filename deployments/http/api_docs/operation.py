"""What the description says about one operation."""

from __future__ import annotations

from dataclasses import dataclass

from remora.deployments.http.api_docs.shapes import Answer

JSON = "application/json"
EVENTS = "text/event-stream"
LINES = "application/x-ndjson"
TEXT = "text/plain"
BYTES = "application/octet-stream"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation, or several that do the same at different addresses.

    summary:      a few words
    description:  what it does, and when it is refused
    at:           "METHOD path"; the first is the usual one, others are aliases
    answer:       the response with status 200; None = it is empty, or text
    media_types:  of this response, besides JSON for an `answer`
    is_refused:   whether every request gets 400
    """

    summary: str
    description: str
    at: tuple[str, ...]
    answer: Answer | None = None
    media_types: tuple[str, ...] = ()
    is_refused: bool = False


def op(
    at: str,
    summary: str,
    description: str,
    answer: Answer | None = None,
    *media_types: str,
    is_refused: bool = False,
) -> Operation:
    """Return an operation whose addresses are separated by commas."""
    return Operation(
        summary=summary,
        description=description,
        at=tuple(part.strip() for part in at.split(",")),
        answer=answer,
        media_types=media_types,
        is_refused=is_refused,
    )
