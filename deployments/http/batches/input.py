"""The input file of a batch: one request per line; all lines are checked before any runs.

Bodies stay in the file; a line is stored as its byte range.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from remora.configs.errors import InvalidRequest
from remora.deployments.http.core.fields import Body, Label, parse
from remora.deployments.http.core.wire import parse_json

BATCH_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
MESSAGES_PATH = "/v1/messages"  # of Anthropic's message batches
MAX_LINES = 50_000
MAX_SHOWN_FAULTS = 100


class LineBody(Body):
    """One line of the input file."""

    custom_id: Label
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BatchLine:
    """The location of a request in its file.

    number:      counted from 1
    start, end:  bytes [start, end)
    """

    number: int
    custom_id: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Input:
    """The requests of a file, and its faults as OpenAI's error objects."""

    path: Path
    lines: tuple[BatchLine, ...]
    faults: tuple[dict[str, Any], ...]

    def body(self, line: BatchLine) -> dict[str, Any]:
        """Read a request's body from the file."""
        with self.path.open("rb") as file:
            file.seek(line.start)
            body: dict[str, Any] = parse_json(file.read(line.end - line.start))["body"]
        return body


def read_input(path: Path, url: str, *, max_line_bytes: int) -> Input:
    """Check every line of a file. Blocks.

    url:  required url of all lines
    """
    lines: list[BatchLine] = []
    faults: list[dict[str, Any]] = []
    names: set[str] = set()
    start = number = 0
    with path.open("rb") as file:
        # One byte more than the limit suffices to find that a line is too long.
        while len(faults) < MAX_SHOWN_FAULTS and (raw := file.readline(max_line_bytes + 1)):
            number, start, first = number + 1, start + len(raw), start
            try:
                name = _check_line(raw, url, names, max_line_bytes) if raw.strip() else None
                if len(lines) == MAX_LINES:
                    raise InvalidRequest(f"A file holds {MAX_LINES} requests at most.")
            except InvalidRequest as error:
                faults.append(_fault(error, number))
                if len(raw) > max_line_bytes or len(lines) == MAX_LINES:
                    break  # the rest of a long line, or more than MAX_LINES
                continue
            if name is not None:
                names.add(name)
                lines.append(BatchLine(number, name, first, start))
    if not lines and not faults:
        faults.append(_fault(InvalidRequest("The file holds no request."), None))
    return Input(path, tuple(lines), tuple(faults))


def _check_line(raw: bytes, url: str, names: set[str], max_bytes: int) -> str:
    if len(raw) > max_bytes:
        raise InvalidRequest(f"The line is longer than {max_bytes} bytes.")
    line = parse(LineBody, parse_json(raw))
    if line.url != url:
        raise InvalidRequest(f"url must be that of the batch, {url}.", "url")
    if line.custom_id in names:
        raise InvalidRequest(f"custom_id {line.custom_id!r} is not unique.", "custom_id")
    if line.body.get("stream"):
        raise InvalidRequest("A batch cannot stream.", "body.stream")
    return line.custom_id


def _fault(error: InvalidRequest, number: int | None) -> dict[str, Any]:
    return {"code": error.code, "message": error.message, "param": error.param, "line": number}
