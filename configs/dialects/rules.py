"""Rules for other servers' parameters: set keys, have no effect, or are refused.

A rule reads a value into settings (remora's keys), and writes settings as a value, so that a
configuration can be converted from one dialect to another. A dialect is a table of rules.

Every rule has `keys`, which it may set (tests observe the effect of the first), and `how`, the
difference from the original server; "" = none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

Settings = Mapping[str, Any]  # by dotted key of remora, such as engine.page_size


class Refusal(Exception):
    """A value is not supported; the message says why, and names the nearest alternative."""


@dataclass(frozen=True, slots=True)
class Effect:
    """Settings for a value. how: the difference from the original server; "" = none."""

    settings: Settings
    how: str = ""


@dataclass(frozen=True, slots=True)
class Harmless:
    """Why a value needs no settings."""

    why: str


class Unsaid:
    """Returned by `writes` functions if no value expresses the settings."""


UNSAID = Unsaid()


def never(_settings: Settings) -> Any:
    """Write no value, whatever the settings."""
    return UNSAID


@dataclass(frozen=True, slots=True, kw_only=True)
class Sets:
    """One key gets the value.

    table:      their value -> remora's value, where they differ
    strict:     whether only the values of `table` are allowed
    unset:      value -> why it sets nothing
    refuse:     value -> why it is refused
    hows:       value -> difference, instead of `how`
    otherwise:  with `strict`, the beginning of the message for other values
    scale:      remora's value = their value * scale
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
        """The key."""
        return (self.key,)

    def read(self, value: Any, given: Mapping[str, Any]) -> Effect | Harmless:
        """Return the key with remora's value."""
        if _in(value, self.refuse):
            raise Refusal(self.refuse[value])
        if _in(value, self.unset):
            return Harmless(self.unset[value])
        how = self.hows[value] if _in(value, self.hows) else self.how
        if _in(value, self.table):
            value = self.table[value]
        elif self.strict:
            known = ", ".join(str(choice) for choice in self.table)
            raise Refusal(f"{self.otherwise}; supported: {known}")
        elif self.invert:
            value = not value
        elif self.scale != 1:
            value = round(value * self.scale, 12)  # 41 * 0.01 is not 0.41
        return Effect({self.key: value}, how)

    def write(self, settings: Settings) -> list[Any]:
        """Return their values for the key's value."""
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
    """A rule made of functions, for several keys or for values that depend on other parameters.

    writes:     None = the value of the first key
    why:        the reason, if it has no effect or is refused
    """

    keys: tuple[str, ...]
    reads: Callable[[Any, Mapping[str, Any]], Effect | Harmless | Settings]
    writes: Callable[[Settings], Any] | None = None
    how: str = ""
    why: str = ""

    def read(self, value: Any, given: Mapping[str, Any]) -> Effect | Harmless:
        """Call `reads`; plain settings are an effect."""
        meant = self.reads(value, given)
        return meant if isinstance(meant, Effect | Harmless) else Effect(meant, self.how)

    def write(self, settings: Settings) -> list[Any]:
        """Call `writes`, or return the value of the first key."""
        if self.writes is not None:
            value = self.writes(settings)
        else:
            value = settings.get(self.keys[0], UNSAID) if self.keys else UNSAID
        return [] if value is UNSAID else [value]


@dataclass(frozen=True, slots=True)
class NoEffect:
    """A parameter without effect, for any value or for those in `only`."""

    keys: ClassVar[tuple[str, ...]] = ()
    how: ClassVar[str] = ""

    why: str
    only: tuple[Any, ...] = ()
    otherwise: str = ""

    def read(self, value: Any, given: Mapping[str, Any]) -> Effect | Harmless:
        """Return the reason. Raises Refusal for values not in `only`."""
        if self.only and value not in self.only:
            raise Refusal(self.otherwise)
        return Harmless(self.why)

    def write(self, settings: Settings) -> list[Any]:
        """Return nothing."""
        return []


@dataclass(frozen=True, slots=True)
class Refused:
    """A feature that remora does not have. Values that turn it off have no effect.

    off:     such values, in addition to the parameter's default, None, False, 0 and empty values
    keys:    that the feature would change there, so that `writes` must turn it off
    writes:  the value for settings of `keys`
    """

    how: ClassVar[str] = ""

    why: str
    off: tuple[Any, ...] = ()
    keys: tuple[str, ...] = ()
    writes: Callable[[Settings], Any] = never

    def read(self, value: Any, given: Mapping[str, Any]) -> Effect | Harmless:
        """Raise Refusal unless the value turns the feature off."""
        if not value or value in self.off or value in ("none", "null", "auto", "off"):
            return Harmless(f"it is off here too ({self.why})")
        raise Refusal(self.why)

    def write(self, settings: Settings) -> list[Any]:
        """Call `writes`."""
        value = self.writes(settings)
        return [] if value is UNSAID else [value]


Rule = Sets | Means | NoEffect | Refused


def not_yet(capability: str, near: str = "") -> Refused:
    """Return the refusal of a feature that is planned."""
    return Refused(f"not yet: {capability}" + (f"; {near}" if near else ""))


def _in(value: Any, table: Mapping[Any, Any]) -> bool:
    """Return whether `value` is a key of `table`; 1 and True are different."""
    return isinstance(value, str | int | float | bool) and any(
        key == value and type(key) is type(value) for key in table
    )
