"""Results of a batch on disk: appended one by one, and read when a replica resumes the batch.

A line without a result is restarted; it starts at most three times, so that a request that crashes
the server does not do so forever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from remora.deployments.http.batches.input import BatchLine
from remora.deployments.http.core.wire import dumps

MAX_STARTS = 3
EXPIRED = "batch_expired"  # code of the error of a line that did not start in time


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one line, as a record of the output file or of the error file."""

    record: Mapping[str, Any]
    is_error: bool


@dataclass(slots=True, kw_only=True)
class Usage:
    """Token counts of a batch's answers."""

    input: int = 0
    cached: int = 0
    output: int = 0
    reasoning: int = 0

    def add(self, record: Mapping[str, Any]) -> None:
        """Add the usage of an answer, a record of the output file, of any endpoint."""
        usage = record["response"]["body"]["usage"]
        sides = ("input", "output") if "input_tokens" in usage else ("prompt", "completion")
        given, made = (usage[f"{side}_tokens"] for side in sides)
        details = [usage.get(f"{side}_tokens_details") or {} for side in sides]
        self.input += given
        self.cached += details[0].get("cached_tokens", 0)
        self.output += made
        self.reasoning += details[1].get("reasoning_tokens", 0)

    def show(self) -> dict[str, Any]:
        """Return OpenAI's object."""
        return {
            "input_tokens": self.input,
            "input_tokens_details": {"cached_tokens": self.cached},
            "output_tokens": self.output,
            "output_tokens_details": {"reasoning_tokens": self.reasoning},
            "total_tokens": self.input + self.output,
        }


class Results:
    """The result files of one batch, and their counts. Methods block."""

    def __init__(self, output: Path, error: Path, starts: Path) -> None:
        self._output, self._error, self._starts = output, error, starts
        self.num_completed = self.num_failed = 0
        self.usage = Usage()

    def resume(self) -> frozenset[str]:
        """Repair files of a crashed process; return the custom ids already answered."""
        completed, failed = _whole_lines(self._output), _whole_lines(self._error)
        self.num_completed, self.num_failed, self.usage = len(completed), len(failed), Usage()
        names = {orjson.loads(raw)["custom_id"] for raw in failed}
        for raw in completed:
            record = orjson.loads(raw)
            self.usage.add(record)
            names.add(record["custom_id"])
        return frozenset(names)

    def starts(self) -> Counter[int]:
        """Return the number of starts of each line, by line number."""
        return Counter(int(raw) for raw in _whole_lines(self._starts))

    def note_starts(self, lines: Iterable[BatchLine]) -> None:
        """Record that lines start now."""
        with self._starts.open("a", encoding="ascii") as file:
            file.writelines(f"{line.number}\n" for line in lines)

    def append(self, results: Iterable[Result]) -> None:
        """Append results."""
        for is_error, path in ((False, self._output), (True, self._error)):
            chosen = [result.record for result in results if result.is_error is is_error]
            if not chosen:
                continue
            with path.open("ab") as file:
                file.write(b"".join(dumps(record) + b"\n" for record in chosen))
            if is_error:
                self.num_failed += len(chosen)
                continue
            self.num_completed += len(chosen)
            for record in chosen:
                self.usage.add(record)


def _whole_lines(path: Path) -> list[bytes]:
    """Return the complete lines of a file, and truncate an incomplete last line.

    A missing file has no lines.
    """
    if not path.exists():
        return []
    with path.open("r+b") as file:
        lines = file.readlines()
        if lines and not lines[-1].endswith(b"\n"):
            file.truncate(sum(map(len, lines[:-1])))
            lines.pop()
    return lines
