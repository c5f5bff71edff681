"""The seam between checkpoint formats and weights: what a reader of a format provides.

A reader finds the quantised weights in the shapes of a checkpoint's tensors and says how each is
decoded to a kind; nothing but settings and shapes is needed for that, so a checkpoint is checked
before its weights are read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from remora.configs.errors import ConfigError
from remora.engine.protocols import QuantisedTensor, WeightSource
from remora.kernels.quantised.weight_kinds import WeightKind

Settings = Mapping[str, Any]
Parts = Mapping[str, Tensor]
NEVER = re.compile(r"(?!)")
# Scales of activations, which are computed in 16 bits, and of K and V (`models/kv_scales.py`).
ACTIVATION_SCALES = re.compile(
    r".*\.(?:(?:input|output|k|v|kv|q|prob)_scale(?:_ub)?|(?:input|output|k|v)_zero_point"
    r"|[kv]_proj\.output_scale)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeight:
    """One weight as a checkpoint stores it.

    name, shape:    of the weight, dequantised
    parts:          names of the tensors that it is read from, by the keys that `decode` uses
    decode:         makes the weight from its parts; raises ValueError if they are damaged
    label:          the format in a few words
    is_transposed:  the model's tensor is the transpose of the decoded weight
    """

    name: str
    shape: tuple[int, ...]
    parts: Mapping[str, str]
    decode: Callable[[Parts], WeightKind]
    label: str
    is_transposed: bool = False

    @property
    def module(self) -> str:
        """The module that has the weight."""
        return self.name.removesuffix(".weight")

    def as_tensor(self) -> QuantisedTensor:
        """Return what the tensor is as a quantised one."""
        *leading, rows, columns = self.shape
        last = (columns, rows) if self.is_transposed else (rows, columns)
        shape = (*leading, *last)
        return QuantisedTensor(label=self.label, shape=shape, is_transposed=self.is_transposed)


class Inventory:
    """The tensors of a checkpoint as readers see them: names and shapes."""

    def __init__(self, source: WeightSource) -> None:
        self.label = source.label
        self.shapes = source.shapes()
        self._source = source

    def having(self, ending: str) -> list[str]:
        """Return what precedes `ending` in the names of tensors."""
        return [name.removesuffix(ending) for name in self.shapes if name.endswith(ending)]

    def part(self, prefix: str, ending: str, *, of: str) -> str:
        """Return the name of a tensor. Raises ConfigError if the checkpoint lacks it.

        of:  ending of the tensor that needs it
        """
        if prefix + ending not in self.shapes:
            raise ConfigError(
                f"{prefix} in {self.label} has {of.lstrip('.')} and no {ending.lstrip('._')}. "
                "Is the checkpoint complete?"
            )
        return prefix + ending

    def matrix(self, name: str) -> tuple[int, int]:
        """Return the shape of a tensor. Raises ConfigError unless it has two dimensions."""
        shape = self.shapes[name]
        if len(shape) != 2:
            raise self.unfit(name, "two dimensions", "for a matrix")
        return shape[0], shape[1]

    def expect(self, name: str, *shapes: tuple[int, ...], why: str) -> None:
        """Raise ConfigError unless a tensor has one of these shapes."""
        if self.shapes[name] not in shapes:
            raise self.unfit(name, " or ".join(str(list(shape)) for shape in shapes), why)

    def unfit(self, name: str, expected: str, why: str) -> ConfigError:
        """Return the error of a tensor of a wrong shape."""
        found = list(self.shapes[name])
        return ConfigError(f"{name} in {self.label} is {found}; expected {expected} {why}.")

    def read(self, names: Collection[str]) -> dict[str, Tensor]:
        """Read small tensors that say what others are."""
        return dict(self._source.read(names)) if names else {}


def whole(settings: Settings, key: str, default: int, *, least: int = 1) -> int:
    """Return a setting that is a whole number. Raises ConfigError for other values.

    default:  for a setting that is missing or null
    least:    -1 where it has a meaning
    """
    value = settings.get(key)
    if value is None:
        return default
    if type(value) is not int or value < least or value == 0:
        raise ConfigError(f"config.json: {key} is {value!r}; expected a whole number above 0.")
    return value


def matches(entry: str, module: str) -> bool:
    """Return whether a list's entry names a module: by its name, or by a pattern after `re:`."""
    if entry.startswith("re:"):
        return re.match(entry.removeprefix("re:"), module) is not None
    return entry == module


def declared_kv_dtype(settings: Settings) -> Literal["", "int8", "fp8_e4m3"]:
    """Return the 8-bit format in which a checkpoint says to cache K and V, or "".

    Names are those of engine.kv_dtype. compressed-tensors and ModelOpt have a setting for it; other
    formats may have scales, which are for e4m3.
    """
    if str(settings.get("kv_cache_quant_algo")).upper() == "FP8":
        return "fp8_e4m3"
    scheme = settings.get("kv_cache_scheme")
    if not isinstance(scheme, Mapping) or scheme.get("num_bits") != 8:
        return ""
    if scheme.get("type") == "float":
        return "fp8_e4m3"
    is_symmetric = scheme.get("type") == "int" and scheme.get("symmetric") is not False
    return "int8" if is_symmetric else ""


def no_demands(settings: Settings) -> None:
    """Accept all settings."""


def no_list(settings: Settings) -> Iterable[str]:
    """Return that no module is listed as unquantised."""
    return ()


def same_settings(content: Settings) -> Settings:
    """Return a file's content as settings."""
    return content


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A checkpoint format.

    methods:    values of quant_method, in lower case with hyphens
    find:       yields the quantised weights; raises ConfigError if tensors do not fit together
    check:      raises ConfigError for settings that cannot be read
    kept:       returns modules that the settings list as unquantised; `re:` begins a pattern
    unused:     tensors that are not read
    key:        a setting that identifies the format where quant_method is missing
    file:       of settings, for checkpoints with none in config.json
    from_file:  returns the settings in that file's content
    """

    methods: tuple[str, ...]
    find: Callable[[Settings, Inventory], Iterator[StoredWeight]]
    check: Callable[[Settings], None] = no_demands
    kept: Callable[[Settings], Iterable[str]] = no_list
    unused: re.Pattern[str] = NEVER
    key: str = ""
    file: str = ""
    from_file: Callable[[Settings], Settings] = same_settings

    @property
    def name(self) -> str:
        """The usual name."""
        return self.methods[0]
