"""Results of a batch on disk: appended as they come, read again by whoever takes the batch up.

A line that was begun and never answered is begun anew, but not for ever: a request that ends the
server each time must not do so a fourth time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from remora.deployments.http.batches_input import Line
from remora.deployments.http.wire import dumps

MAX_STARTS = 3


@dataclass(frozen=True, slots=True)
class Result:
    """The answer to one line, as it stands in the output file, or in that of the errors."""

    record: Mapping[str, Any]
    is_error: bool


class Results:
    """The files of one batch's results. Methods block."""

    def __init__(self, output: Path, error: Path, starts: Path) -> None:
        self._output, self._error, self._starts = output, error, starts
        self.num_completed = self.num_failed = 0

    def resume(self) -> frozenset[str]:
        """Mend what a dead process left half written; return the custom ids already answered."""
        completed, failed = _whole_lines(self._output), _whole_lines(self._error)
        self.num_completed, self.num_failed = len(completed), len(failed)
        return frozenset(orjson.loads(raw)["custom_id"] for raw in (*completed, *failed))

    def starts(self) -> Counter[int]:
        """Return how often each line was begun, by its number."""
        return Counter(int(raw) for raw in _whole_lines(self._starts))

    def note_starts(self, lines: Iterable[Line]) -> None:
        """Note that lines are begun now."""
        with self._starts.open("a", encoding="ascii") as file:
            file.writelines(f"{line.number}\n" for line in lines)

    def append(self, results: Iterable[Result]) -> None:
        """Write results behind the others."""
        for is_error, path in ((False, self._output), (True, self._error)):
            chosen = [result.record for result in results if result.is_error is is_error]
            if not chosen:
                continue
            with path.open("ab") as file:
                file.write(b"".join(dumps(record) + b"\n" for record in chosen))
            if is_error:
                self.num_failed += len(chosen)
            else:
                self.num_completed += len(chosen)


def _whole_lines(path: Path) -> list[bytes]:
    """Return the lines of a file that may not exist, and cut off what follows the last of them."""
    if not path.exists():
        return []
    with path.open("r+b") as file:
        lines = file.readlines()
        if lines and not lines[-1].endswith(b"\n"):
            file.truncate(sum(map(len, lines[:-1])))
            lines.pop()
    return lines
