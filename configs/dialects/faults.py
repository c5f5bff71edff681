"""Faults of another server's configuration, gathered so that all of them are reported at once."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from remora.configs.errors import ConfigError

_MISSING = "required key is missing"


class Faults:
    """The faults of one configuration, one line each.

    skips:  whether parameters that are not supported are left out, instead of being faults
    """

    def __init__(self, *, skips: bool = False) -> None:
        self.skips = skips
        self.lines: list[str] = []

    def add(self, line: str) -> None:
        """Add a fault, once."""
        if line not in self.lines:
            self.lines.append(line)

    @contextmanager
    def gathering(self) -> Generator[None]:
        """Add the faults of a ConfigError that the block raises.

        A key that is missing is no fault if there are others: its parameter may be one of these.
        """
        try:
            yield
        except ConfigError as error:
            has_others = bool(self.lines)
            for line in str(error).split("\n"):
                if not (has_others and _MISSING in line):
                    self.add(line)

    def check(self) -> None:
        """Raise ConfigError if there are faults."""
        if self.lines:
            raise ConfigError("\n".join(self.lines))
