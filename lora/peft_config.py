"""Parses `adapter_config.json` of a PEFT adapter and refuses what is not supported.

Each field is read here, concerns training only, or must be empty: unknown fields are refused, not
ignored. Opens no file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import re2

from remora.configs.errors import InvalidAdapter

# Larger ranks are not low-rank; memory is sized from the file before any tensor is read.
MAX_RANK = 4096
# Each module is compared with them, one after another.
MAX_PATTERNS = 1024
_READ = {
    "peft_type",
    "r",
    "lora_alpha",
    "use_rslora",
    "use_dora",
    "rank_pattern",
    "alpha_pattern",
    "base_model_name_or_path",
    "init_lora_weights",
}
# Fields about training. The tensors' names say which modules change, and the base model's rules
# say which weights are stored transposed (fan_in_fan_out).
_OF_TRAINING = {
    "task_type",
    "inference_mode",
    "revision",
    "peft_version",
    "auto_mapping",
    "target_modules",
    "exclude_modules",
    "modules_to_save",
    "layers_to_transform",
    "layers_pattern",
    "lora_dropout",
    "megatron_core",
    "qalora_group_size",
    "loftq_config",
    "eva_config",
    "lora_ga_config",
    "corda_config",
    "runtime_config",
    "ensure_weight_tying",
    "fan_in_fan_out",
}
# These initialisations change the base's weights, which then differ from the loaded ones.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """Ranks and scales.

    rank, alpha:                   of modules that no pattern matches
    rank_pattern, alpha_pattern:   by a regular expression that the end of a module's name matches
    base_model:                    the base model's name in the file
    """

    rank: int
    alpha: float
    use_rslora: bool
    use_dora: bool
    rank_pattern: Mapping[str, float]
    alpha_pattern: Mapping[str, float]
    base_model: str | None

    def rank_of(self, module: str) -> int:
        """Return the rank of a module's update."""
        return int(_look_up(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        """Return the factor on B A: alpha / r, or alpha / sqrt(r) (rsLoRA, arXiv:2312.03732)."""
        rank = self.rank_of(module)
        alpha = _look_up(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def parse_adapter_config(raw: Any) -> AdapterConfig:
    """Parse the content of `adapter_config.json`. Raises InvalidAdapter with all faults."""
    if not isinstance(raw, dict):
        raise InvalidAdapter(f"adapter_config.json holds {type(raw).__name__}; expected an object")
    if raw.get("peft_type") != "LORA":
        raise InvalidAdapter(
            f"adapter_config.json says peft_type {raw.get('peft_type')!r}; only LORA can be used"
        )
    faults = [*_unsupported(raw), *_malformed(raw)]
    if faults:
        raise InvalidAdapter(f"adapter_config.json: {'; '.join(faults)}")
    return AdapterConfig(
        rank=raw["r"],
        alpha=float(raw["lora_alpha"]),
        use_rslora=raw.get("use_rslora") or False,
        use_dora=raw.get("use_dora") or False,
        rank_pattern=raw.get("rank_pattern") or {},
        alpha_pattern=raw.get("alpha_pattern") or {},
        base_model=raw.get("base_model_name_or_path") or None,
    )


def _unsupported(raw: Mapping[str, Any]) -> list[str]:
    faults = [
        f"{name} = {_shown(value)} is not supported"
        for name, value in sorted(raw.items())
        if name not in _READ | _OF_TRAINING and value not in (None, False, "none", [], {})
    ]
    begun = raw.get("init_lora_weights", True)
    if isinstance(begun, str) and begun.lower().startswith(_CHANGES_BASE):
        faults.append(
            f"init_lora_weights = {_shown(begun)} changes the base's weights; save the adapter "
            "again with path_initial_model_for_weight_conversion, which converts it to plain LoRA"
        )
    return faults


def _malformed(raw: Mapping[str, Any]) -> list[str]:
    faults = []
    if not _is_rank(raw.get("r")):
        faults.append(f"r = {_shown(raw.get('r'))}; expected a number from 1 to {MAX_RANK}")
    if not _is_finite(raw.get("lora_alpha")):
        faults.append(f"lora_alpha = {_shown(raw.get('lora_alpha'))}; expected a number")
    faults += [
        f"{name} = {_shown(raw[name])}; expected true or false"
        for name in ("use_rslora", "use_dora")
        if not isinstance(raw.get(name), bool | None)
    ]
    if not isinstance(raw.get("base_model_name_or_path"), str | None):
        faults.append("base_model_name_or_path is not a string")
    for name, is_good in (("rank_pattern", _is_rank), ("alpha_pattern", _is_finite)):
        pattern = raw.get(name) or {}
        if not isinstance(pattern, dict) or not all(map(is_good, pattern.values())):
            faults.append(f"{name} = {_shown(pattern)}; expected an object of numbers")
        elif len(pattern) > MAX_PATTERNS:
            faults.append(f"{name} has {len(pattern)} entries; at most {MAX_PATTERNS} are read")
        else:
            faults += [
                f"{name}: {_shown(key)} is not a pattern" for key in pattern if not _ends(key)
            ]
    return faults


def _look_up(pattern: Mapping[str, float], module: str, otherwise: float) -> float:
    """Return the value of the first key that matches the end of the module's name, as PEFT does."""
    for key, value in pattern.items():
        ends = _ends(key)
        if ends is not None and ends.fullmatch(module):
            return value
    return otherwise


@lru_cache(maxsize=2 * MAX_PATTERNS)
def _ends(key: str) -> Any:
    """Return a pattern for names that end with the key; None if the key is not a pattern."""
    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(rf"(.*\.)?({key})", options)
    except re2.error:
        return None


def _is_rank(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MAX_RANK


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
