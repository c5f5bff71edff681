"""Load a pooling model from a checkpoint: an encoder or a decoder, and the head."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from remora.configs.errors import ConfigError
from remora.configs.facts import ModelFacts
from remora.configs.planning.loading import Loading
from remora.engine.encoders.architectures import CLASSIFIER, encoder_architecture, parse_encoder
from remora.engine.encoders.model import EncoderModel
from remora.engine.models.architectures import ARCHITECTURES, parse_states
from remora.engine.models.checkpoint import read_raw_config
from remora.engine.models.config import DecoderConfig, TensorRule
from remora.engine.models.facts import dtype_of
from remora.engine.models.families.config_values import RawConfig
from remora.engine.parallel.shard import Shard
from remora.engine.pooling.facts import BASE_HEADS, CAUSAL, YES_NO, PoolingFacts
from remora.engine.pooling.heads import Head
from remora.engine.pooling.model import DecoderStates, PoolingModel, States
from remora.engine.pooling.scoring import REWARD_HEADS, STEP_HEADS
from remora.engine.protocols import WeightSource
from remora.engine.weights.dummy import DummyWeights
from remora.engine.weights.files import check_hashes, weight_files
from remora.engine.weights.fingerprint import fingerprint
from remora.engine.weights.loader import fill, whole_shapes
from remora.engine.weights.pickled import PickledWeights
from remora.engine.weights.rename_tensors import RenamedWeights
from remora.engine.weights.safetensors import SafetensorsWeights

# Tensors that pooling does not use: heads of pretraining, and constant buffers.
UNUSED = re.compile(
    r"^(\w+\.)?(pooler\.|embeddings\.position_ids)"
    r"|^(cls|lm_head|decoder|head|predictions|sop_classifier)\."
    r"|^(lm|mask|generator_lm|generator|discriminator)_(predictions|head)\."
    r"|^vocab_(transform|layer_norm|projector)\."
)
OUTPUT = "lm_head.weight"
# Families whose headless models have another name.
BASES = {"Gemma3Text": "Gemma3"}
BARE_TABLE = "embed_tokens.weight"  # of checkpoints without a head


def pooling_model_facts(path: Path, overrides: Mapping[str, Any]) -> ModelFacts:
    """Return the facts of a checkpoint that is served for embeddings or scores."""
    raw = read_raw_config(path, overrides)
    states = _build_states(raw, torch.bfloat16, "meta")
    sizes = states.config
    num_kv_heads = sizes.num_kv_heads if isinstance(sizes, DecoderConfig) else sizes.num_heads
    return ModelFacts(
        architecture=str((raw.get("architectures") or [sizes.architecture])[0]),
        num_layers=sizes.num_layers,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_heads=sizes.num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=sizes.head_dim,
        vocab_size=sizes.vocab_size,
        max_position=sizes.max_position,
        dtype=dtype_of(path, raw),
        num_parameters=sum(shard.memory.numel() for shard in states.tensors().values()),
        tied_embeddings=True,
        fingerprint=fingerprint(path, dict(raw)),
    )


def parse_decoder(raw: RawConfig) -> DecoderConfig:
    """Parse the config of a decoder with any head, and omit its LM head. Raises ConfigError."""
    architecture = str((raw.get("architectures") or ["none"])[0])
    base = architecture
    for head in (*STEP_HEADS, *REWARD_HEADS, CLASSIFIER, *BASE_HEADS):
        base = base.removesuffix(head)
    base = BASES.get(base, base)
    known = base if base.endswith(CAUSAL) else base + CAUSAL
    if architecture in ARCHITECTURES:
        known = architecture
    if known not in ARCHITECTURES:
        raise ConfigError(
            f"config.json names the architecture {architecture}, which is neither a supported "
            "encoder nor a supported decoder."
        )
    config = parse_states({**raw, "architectures": [known]})
    return replace(config, head=replace(config.head, tied=True, bias=False))


def load_pooling_model(
    path: Path,
    facts: PoolingFacts,
    *,
    dtype: torch.dtype,
    device: str,
    load_format: str,
    loading: Loading,
    yes_no: tuple[int, int] | None = None,
    show_progress: bool = False,
) -> PoolingModel:
    """Load the encoder or decoder, and the head. Raises ConfigError.

    yes_no:  tokens whose logits a generating reranker compares
    """
    raw = read_raw_config(path, loading.config_overrides)
    head = Head(facts.methods, facts.stages, device=device)
    states = _build_states(raw, dtype, device)
    wanted = {**states.tensors(), **dict(head.tensors(None))}
    compared = wanted.pop(f"{YES_NO}.weight", None)
    encoder = states.config if isinstance(states, EncoderModel) else None
    if encoder is not None:
        wanted = {_bare(name, encoder.names.prefixes): shard for name, shard in wanted.items()}
    source = _open(path, load_format, loading, wanted, device)
    if encoder is not None:
        source = RenamedWeights(source, _current_names(encoder.names.prefixes))
    elif BARE_TABLE in source.shapes():
        source = RenamedWeights(source, [TensorRule("(.*)", (r"model.\1",))])
    if isinstance(states, DecoderStates) and states.config.rules:
        source = RenamedWeights(source, states.config.rules)
    unused = frozenset(name for name in source.shapes() if UNUSED.search(name))
    fill(
        wanted,
        source,
        unused=unused - wanted.keys(),
        show_progress=show_progress,
        num_threads=loading.num_threads,
    )
    for folder in dict.fromkeys(stage.folder for stage in facts.stages if stage.folder):
        own = dict(head.tensors(folder))
        fill(own, _open(path / folder, load_format, loading, own, device), show_progress=False)
    if compared is not None and yes_no is not None and isinstance(states, DecoderStates):
        rows = _output_rows(states, source, is_tied=bool(raw.get("tie_word_embeddings")))
        compared.fill((rows[yes_no[0]].float() - rows[yes_no[1]].float()).unsqueeze(0))
    states.pack()
    return PoolingModel(states, head, device=device, step_id=facts.step_id)


def _build_states(raw: RawConfig, dtype: torch.dtype, device: str) -> States:
    if encoder_architecture(raw):
        return EncoderModel(parse_encoder(raw), dtype=dtype, device=device)
    return DecoderStates(parse_decoder(raw), dtype=dtype, device=device)


def _bare(name: str, prefixes: tuple[str, ...]) -> str:
    for prefix in prefixes:
        name = name.removeprefix(prefix)
    return name


def _current_names(prefixes: tuple[str, ...]) -> list[TensorRule]:
    """Return the rules for names without prefix, and with the modern names of norm weights."""
    prefix = f"(?:{'|'.join(map(re.escape, prefixes))})?"
    names = {
        r"(.*LayerNorm)\.gamma": r"\1.weight",
        r"(.*LayerNorm)\.beta": r"\1.bias",
        "(.*)": r"\1",
    }
    return [TensorRule(prefix + theirs, (ours,)) for theirs, ours in names.items()]


def _output_rows(states: DecoderStates, source: WeightSource, *, is_tied: bool) -> Tensor:
    """Return the weights of the LM head [vocab_size, hidden_size]."""
    if is_tied or OUTPUT not in source.shapes():
        return states.model.embedding.weight
    ((_, rows),) = source.read([OUTPUT])
    return rows


def _open(
    path: Path, load_format: str, loading: Loading, tensors: Mapping[str, Shard], device: str
) -> WeightSource:
    if load_format == "dummy":
        return DummyWeights(whole_shapes(tensors), device=device)
    if load_format == "gguf":
        raise ConfigError(
            "model.load_format is gguf; embeddings and scores need a Hugging Face folder."
        )
    if loading.verify_checksums:
        check_hashes(weight_files(path, load_format))
    if load_format == "pt":
        return PickledWeights(path, mmap=loading.mmap)
    return SafetensorsWeights(path, mmap=loading.mmap)
