"""Keys that a model run by transformers' code does not support."""

from __future__ import annotations

from remora.configs.errors import ConfigError
from remora.configs.facts import ModelFacts
from remora.configs.schema import ServeConfig

REASON = "the model is run by transformers' code"


def check_fallback(config: ServeConfig, facts: ModelFacts) -> None:
    """Raise ConfigError for keys that only remora's own models support, if it is none."""
    if facts.implementation != "transformers":
        return
    model, engine, lora = config.model, config.engine, config.lora
    weights = "whose weights cannot change while it serves"
    for key, is_asked, reason, instead in (
        ("parallel.pp_size", config.parallel.pp_size > 1, "which has no pipeline stages", "1"),
        ("engine.deterministic", engine.deterministic, "which is not deterministic", "false"),
        ("engine.compile", engine.compile, "which is not compiled", "false"),
        ("engine.cpu_kernels", engine.cpu_kernels == "native", "without native kernels", "auto"),
        ("model.quantization", model.quantization != "none", "without quantised kernels", "none"),
        (
            "model.quantization_overrides",
            bool(model.quantization_overrides),
            "without quantised kernels",
            "[]",
        ),
        (
            "debug.tensor_dump_dir",
            config.debug.tensor_dump_dir is not None,
            "whose layers cannot be dumped",
            "null",
        ),
        ("model.weight_roots", model.weight_roots, weights, "[]"),
        ("model.weight_loaders", model.weight_loaders, weights, "[]"),
        ("model.weight_upload_limit", model.weight_upload_limit is not None, weights, "null"),
        ("model.weight_instances", model.weight_instances, weights, "[]"),
        ("model.share_weights", model.share_weights, "whose weights are not read again", "false"),
        ("engine.sleep_mode", engine.sleep_mode, weights, "false"),
        ("offload.host_memory", config.offload.host_memory, "whose weights stay", "null"),
        ("offload.group_size", config.offload.group_size, "whose weights stay", "null"),
        (
            "api.prompt_embeddings",
            config.api.prompt_embeddings,
            "which is given token ids",
            "false",
        ),
        ("lora.adapters", lora.adapters, "without adapters", "[]"),
        ("lora.dynamic", lora.dynamic, "without adapters", "false"),
    ):
        if is_asked:
            raise ConfigError(f"{key}: {REASON}, {reason}; set {key} to {instead}")
