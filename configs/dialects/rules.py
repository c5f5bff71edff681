"""What a foreign parameter can mean here: it sets keys, it is harmless, or it is refused.

A rule reads a value into settings of ours, and writes settings of ours as a value, so that a
configuration can be turned from one dialect into another. Tables of rules are the dialects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

Settings = Mapping[str, Any]  # by dotted key of ours, such as engine.page_size


class Refusal(Exception):
    """A value cannot be honoured; the message says why and what comes nearest."""


@dataclass(frozen=True, slots=True)
class Effect:
    """What a value means here. how: what differs from the original; "" = nothing."""

    settings: Settings
    how: str = ""


@dataclass(frozen=True, slots=True)
class Harmless:
    """Why a value needs nothing done here."""

    why: str


class Unsaid:
    """What a function that writes returns where there is nothing to say."""


UNSAID = Unsaid()


class Rule(Protocol):
    """What one parameter means.

    keys:  keys of ours that it may set; the first is the one whose effect counts
    how:   what differs from the original; "" = nothing
    why:   of what has no effect or is refused
    """

    @property
    def keys(self) -> tuple[str, ...]:
        """Return them."""
        ...

    @property
    def how(self) -> str:
        """Return it."""
        ...

    def read(self, value: Any, given: Mapping[str, Any]) -> Effect | Harmless:
        """Return what `value` means; `given`: all parameters. Raises Refusal."""
        ...

    def write(self, settings: Settings) -> list[Any]:
        """Return values that say what `settings` hold, the plainest first; none: nothing to say."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Sets:
    """One key takes the value.

    table:   values that are called otherwise here
    strict:  whether no other values than those of `table` are taken
    unset:   value -> why it means that nothing is set
    refuse:  value -> why it is refused
    hows:    value -> what differs, beside `how` of the others
    otherwise:  with `strict`, what to say of other values in front of those of `table`
    scale:   our unit in theirs: ours = theirs * scale
    """

    key: str
    table: Mapping[Any, Any] = field(default_factory=dict)
    strict: bool = False
    unset: Mapping[Any, str] = field(default_factory=dict)
    refuse: Mapping[Any, str] = field(default_factory=dict)
    hows: Mapping[Any, str] = field(default_factory=dict)
    otherwise: str = "not offered"
    invert: bool = False
    scale: float = 1
    how: str = ""

    @property
    def keys(self) -> tuple[str, ...]:
        """The one key."""
        return (self.key,)

    def read(self, value: Any, given: Mapping[str, Any]) -> Effect | Harmless:
        """Return the key with the value in our words."""
        if _in(value, self.refuse):
            raise Refusal(self.refuse[value])
        if _in(value, self.unset):
            return Harmless(self.unset[value])
        how = self.hows[value] if _in(value, self.hows) else self.how
        if _in(value, self.table):
            value = self.table[value]
        elif self.strict:
            known = ", ".join(str(choice) for choice in self.table)
            raise Refusal(f"{self.otherwise}; what works here: {known}")
        elif self.invert:
            value = not value
        elif self.scale != 1:
            value = round(value * self.scale, 12)  # 41 * 0.01 is not 0.41
        return Effect({self.key: value}, how)

    def write(self, settings: Settings) -> list[Any]:
        """Return the key's value in their words."""
        value = settings.get(self.key)
        if value is None:
            return []
        called = [
            t for t, ours in self.table.items() if ours == value and type(ours) is type(value)
        ]
        if self.strict:
            return called
        if self.invert:
            return [not value]
        if self.scale != 1:
            theirs = round(value / self.scale)
            return [theirs] if round(theirs * self.scale, 12) == value else []
        return called if _in(value, self.table) else [value, *called]


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """Several keys, or other parameters, decide what a value means.

    effective:  whether any value has an effect
    """

    keys: tuple[str, ...]
    reads: Callable[[Any, Mapping[str, Any]], Effect | Harmless | Settings]
    writes: Callable[[Settings], Any] = lambda _settings: UNSAID
    how: str = ""
    effective: bool = True
    why: str = ""

    def read(self, value: Any, given: Mapping[str, Any]) -> Effect | Harmless:
        """Ask the function; plain settings are an effect."""
        meant = self.reads(value, given)
        return meant if isinstance(meant, Effect | Harmless) else Effect(meant, self.how)

    def write(self, settings: Settings) -> list[Any]:
        """Ask the other function."""
        value = self.writes(settings)
        return [] if value is UNSAID else [value]


@dataclass(frozen=True, slots=True)
class NoEffect:
    """Every value is harmless, or those of `only`."""

    why: str
    only: tuple[Any, ...] = ()
    otherwise: str = ""
    keys: tuple[str, ...] = ()
    how: str = ""

    def read(self, value: Any, given: Mapping[str, Any]) -> Effect | Harmless:
        """Return why. Raises Refusal for values that are not harmless."""
        if self.only and value not in self.only:
            raise Refusal(self.otherwise)
        return Harmless(self.why)

    def write(self, settings: Settings) -> list[Any]:
        """Say nothing."""
        return []


@dataclass(frozen=True, slots=True)
class Refused:
    """What remora does not do. Values that leave it off are harmless.

    off:  such values, beside the parameter's default, None, False, 0 and the empty ones
    """

    why: str
    off: tuple[Any, ...] = ()
    keys: tuple[str, ...] = ()
    how: str = ""

    def read(self, value: Any, given: Mapping[str, Any]) -> Effect | Harmless:
        """Raise Refusal unless the value leaves it off."""
        if not value or value in self.off or value in ("none", "null", "auto", "off"):
            return Harmless(f"it is off here too ({self.why})")
        raise Refusal(self.why)

    def write(self, settings: Settings) -> list[Any]:
        """Say nothing."""
        return []


def not_yet(capability: str, near: str = "") -> Refused:
    """Return the refusal of something that is still to come."""
    return Refused(f"not yet: {capability}" + (f"; {near}" if near else ""))


def _in(value: Any, table: Mapping[Any, Any]) -> bool:
    """Return whether `value` is a key of `table`, 1 and True apart."""
    return isinstance(value, str | int | float | bool) and any(
        key == value and type(key) is type(value) for key in table
    )
