"""What cannot be had where transformers' code runs the model. Pure, like `plan.py`."""

from __future__ import annotations

from remora.configs.errors import ConfigError
from remora.configs.schema import ServeConfig

WHY = "the model is run by transformers' code"


def check_fallback(config: ServeConfig) -> None:
    """Raise ConfigError for keys that only our own models can follow."""
    engine, lora = config.engine, config.lora
    faults = {
        "parallel.pp_size": (
            config.parallel.pp_size > 1,
            "whose layers are not cut into stages",
            "1",
        ),
        "engine.deterministic": (engine.deterministic, "whose kernels promise no order", "false"),
        "engine.compile": (engine.compile, "which is not traced", "false"),
        "engine.cpu_kernels": (
            engine.cpu_kernels == "native",
            "and native kernels know our families only",
            "auto",
        ),
        "model.quantization": (
            config.model.quantization != "none",
            "and our kernels alone compute with rounded weights",
            "none",
        ),
        "debug.tensor_dump_dir": (
            config.debug.tensor_dump_dir is not None,
            "whose layers are not listened at",
            "null",
        ),
        "model.weight_roots": (
            bool(config.model.weight_roots),
            "whose weights do not change while it serves",
            "[]",
        ),
        "model.weight_loaders": (
            bool(config.model.weight_loaders),
            "whose weights do not change while it serves",
            "[]",
        ),
        "lora.adapters": (bool(lora.adapters), "whose layers have no room for adapters", "[]"),
        "lora.dynamic": (lora.dynamic, "whose layers have no room for adapters", "false"),
    }
    for key, (is_asked, reason, instead) in faults.items():
        if is_asked:
            raise ConfigError(f"{key}: {WHY}, {reason}; set {key} to {instead}")
