"""Reads the facts of a checkpoint that planning needs, without loading its weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import torch

from remora.configs.errors import ConfigError
from remora.configs.facts import ModelFacts, StoredFormat
from remora.configs.planning.loading import PLAIN_LOADING, Loading
from remora.engine.models.checkpoint import QUANTIZATION, is_gguf, read_raw_config
from remora.engine.models.config import DecoderConfig, ExpertsConfig, MLPConfig
from remora.engine.models.decoder import DecoderModel
from remora.engine.models.families.config_values import RawConfig
from remora.engine.models.implementation import Theirs, implementation_of
from remora.engine.models.load import open_weights
from remora.engine.parallel.shard import Shard
from remora.engine.weights.fingerprint import fingerprint
from remora.engine.weights.formats.registry import check_format
from remora.engine.weights.formats.stored import declared_kv_dtype
from remora.engine.weights.rename_tensors import module_words
from remora.engine.weights.safetensors import stored_dtype
from remora.engine.weights.stored_formats import survey

DTYPES = ("bfloat16", "float16", "float32")


def read_model_facts(path: Path, loading: Loading = PLAIN_LOADING) -> ModelFacts:
    """Gather the facts of a model folder or a GGUF file.

    The dtype is that of config.json, or else of the safetensors headers. GGUF weights are
    dequantised on loading, to bfloat16 by default.
    Raises ConfigError for a missing path or config and for unsupported models.
    """
    raw = read_raw_config(path, loading.config_overrides)
    check_format(path, raw.get(QUANTIZATION) or {}, loading.formats)
    dtype = "bfloat16" if is_gguf(path) else dtype_of(path, raw)
    chosen = implementation_of(path, loading)
    if isinstance(chosen, Theirs):
        from remora.engine.fallback.load import fallback_facts

        return fallback_facts(chosen.structure, dtype=dtype, fingerprint=fingerprint(path, raw))
    config = chosen.config
    experts = _experts_of(config)
    shape = DecoderModel(config, dtype=torch.bfloat16, device="meta")
    return ModelFacts(
        architecture=config.architecture,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        max_position=config.max_position,
        dtype=dtype,
        num_parameters=sum(_numbers_of(shape.tensors().items())),
        layer_parameters=tuple(sum(_numbers_of(block.tensors(""))) for block in shape.blocks),
        linear_weights=_linear_weights(shape),
        copied_parameters=_copied_parameters(config),
        gated=any(not isinstance(each.mlp, MLPConfig) or each.mlp.gated for each in config.layers),
        experts_per_token=max(each.routing.top_k for each in experts) if experts else 0,
        kv_vectors=1 if config.attention.latent is not None else 2,
        tied_embeddings=config.head.tied,
        fingerprint=fingerprint(path, raw),
        module_words=module_words(config.rules),
        windows=config.windows if any(config.windows) else (),
        stored=_stored_formats(path, raw, config, loading),
        kv_dtype=declared_kv_dtype(raw.get(QUANTIZATION) or {}),
    )


def _stored_formats(
    path: Path, raw: RawConfig, config: DecoderConfig, loading: Loading
) -> tuple[StoredFormat, ...]:
    """Return the formats of quantised weights; none if files are missing, which loading reports."""
    if is_gguf(path) or raw.get(QUANTIZATION):
        with suppress(ConfigError):
            return survey(open_weights(path, "auto", loading=loading), tied=config.head.tied)
    return ()


def _numbers_of(tensors: Iterable[tuple[str, Shard]]) -> Iterator[int]:
    return (shard.memory.numel() for _, shard in tensors)


def _linear_weights(model: DecoderModel) -> Mapping[str, int]:
    """Return the numbers in the weights of layers, by part, without routers and latents' heads."""
    numbers: Counter[str] = Counter()
    for block in model.blocks:
        for _, linear in block.linears(""):
            for part, outputs in linear.parts.items():
                numbers[part] += len(outputs.held) * len(linear.inputs.held)
    for _, experts in model.experts():
        for of_one in experts.weights(""):
            for name, (outputs, inputs) in of_one.items():
                numbers[name.split(".")[-2]] += len(outputs.held) * len(inputs.held)
    return numbers


def _copied_parameters(config: DecoderConfig) -> int:
    """Return a layer's parameters that every rank holds: router and low-rank query projection."""
    latent = config.attention.latent
    rows = 0 if latent is None or latent.query_rank is None else latent.query_rank
    most = max((each.num_experts for each in _experts_of(config)), default=0)
    return (rows + most) * config.hidden_size


def _experts_of(config: DecoderConfig) -> list[ExpertsConfig]:
    return [layer.mlp for layer in config.layers if isinstance(layer.mlp, ExpertsConfig)]


def dtype_of(path: Path, raw: RawConfig) -> str:
    """Return the weights' dtype from config.json, or else from the files.

    Quantised checkpoints that say float16 count as bfloat16: most are of models made in bfloat16,
    whose activations can exceed the range of float16.
    """
    named = raw.get("dtype") or raw.get("torch_dtype")
    if raw.get(QUANTIZATION) and named in ("float16", None):
        return "bfloat16"
    if named is None:
        return stored_dtype(path)
    if named not in DTYPES:
        raise ConfigError(f"dtype in config.json is {named!r}; known are {', '.join(DTYPES)}.")
    return str(named)
