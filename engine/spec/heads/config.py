"""Which draft heads are read, as data: EAGLE 1 to 3 checkpoints, and a model's own MTP layers.

A draft head is one decoder layer that continues the target's hidden states: at position i it reads
the target's state of token i and the embedding of token i + 1, and predicts token i + 2. Formats:
EAGLE (arXiv 2401.15077, 2406.16858), EAGLE-3 (2503.01840), multi-token prediction (2412.19437, and
MiMo's in 2505.07608). Opens no weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from remora.configs.errors import ConfigError
from remora.engine.models.architectures import parse_config
from remora.engine.models.checkpoint import read_raw_config
from remora.engine.models.config import DecoderConfig, TensorRule

Kind = Literal["eagle", "eagle3", "mtp"]

_EAGLE = ("LlamaForCausalLMEagle", "EagleLlamaForCausalLM", "LlamaForCausalLM")
_EAGLE_3 = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator")
_LAYER = r"(?:model\.)?(?:midlayer|layers\.0)"
_OURS = "model.layers.0."
EMBEDDING_NORM, HIDDEN_NORM, FC = "embedding_norm", "hidden_norm", "fc"
DRAFT_IDS = "d2t"  # [draft vocabulary] target id minus draft id


@dataclass(frozen=True, slots=True)
class _MTPNames:
    """Patterns of the tensors of a family's first MTP layer, within `layer` but for its own.

    layer:         `{count}` = the model's layers
    states_first:  as of DraftHeadConfig
    """

    layer: str = r"model\.layers\.{count}"
    embedding_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    fc: str = "eh_proj"
    last_norm: str = r"shared_head\.norm"
    states_first: bool = False


_MTP_NAMES = {
    "DeepseekV3ForCausalLM": _MTPNames(),
    "Glm4MoeForCausalLM": _MTPNames(),
    "Glm4MoeLiteForCausalLM": _MTPNames(),
    "MiMoForCausalLM": _MTPNames(
        layer=r"model\.mtp_layers\.0",
        embedding_norm="token_layernorm",
        hidden_norm="hidden_layernorm",
        fc="input_proj",
        last_norm="final_layernorm",
        states_first=True,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftHeadConfig:
    """A draft head.

    decoder:      its layer and, unless it uses the target's, its output head
    rules:        from the checkpoint's names to those of `DraftHead.tensors`
    state_size:   of what it reads of the target for each token
    captures:     target layers whose inputs these states are; () = the last hidden states
    fc_bias:      whether the projection of its inputs has a bias
    own_head:     whether it has an output head, of a vocabulary that may be smaller
    own_norm:     whether its output passes a norm before the head
    states_first: whether the states come before the embeddings in its joined inputs
    """

    kind: Kind
    path: Path
    decoder: DecoderConfig
    rules: tuple[TensorRule, ...]
    state_size: int
    captures: tuple[int, ...] = ()
    fc_bias: bool = False
    own_head: bool = False
    own_norm: bool = True
    states_first: bool = False


def read_eagle(path: Path, target: DecoderConfig, shapes: Mapping[str, Any]) -> DraftHeadConfig:
    """Read the config of an EAGLE checkpoint. Raises ConfigError.

    shapes:  of its tensors, by name
    """
    raw = read_raw_config(path)
    names = [str(name) for name in raw.get("architectures") or ()]
    is_third = any(name in _EAGLE_3 for name in names) or _is_third(shapes)
    if not is_third and not any(name in _EAGLE for name in names):
        raise ConfigError(
            f"speculation.draft_model: {path} has the architecture {', '.join(names) or 'none'}; "
            f"known draft heads are {', '.join((*_EAGLE[:2], *_EAGLE_3))}"
        )
    if "fc.weight" not in shapes:
        raise ConfigError(
            f"speculation.draft_model: {path} is a whole model and no draft head (it has no "
            "fc.weight): set speculation.method to draft"
        )
    nested = raw.get("transformer_layer_config") or {}
    raw = {**nested, **raw, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    draft_vocab = int(raw.get("draft_vocab_size") or target.vocab_size)
    raw |= {"num_hidden_layers": 1, "tie_word_embeddings": False}
    raw |= {"vocab_size": draft_vocab if is_third else target.vocab_size}
    decoder = parse_config(raw)
    wanted = int(raw.get("target_hidden_size") or target.hidden_size)
    if wanted != target.hidden_size or (not is_third and decoder.hidden_size != wanted):
        raise ConfigError(
            f"speculation.draft_model: {path} reads hidden states of {wanted} numbers, and the "
            f"model's have {target.hidden_size}: it was trained for another model"
        )
    if not is_third:
        block = replace(decoder.block, attention_norm=None)
        return DraftHeadConfig(
            kind="eagle",
            path=path,
            decoder=replace(decoder, block=block),
            rules=(
                TensorRule(rf"{_LAYER}\.(.*)", (rf"{_OURS}\1",)),
                TensorRule(r"(?:model\.)?(?:embed_tokens|lm_head)\..*", ()),
            ),
            state_size=target.hidden_size,
            fc_bias="fc.bias" in shapes,
            own_norm=False,
        )
    return DraftHeadConfig(
        kind="eagle3",
        path=path,
        decoder=replace(decoder, block=replace(decoder.block, attention_norm=None)),
        rules=(
            TensorRule(rf"{_LAYER}\.input_layernorm\.(.*)", (rf"{EMBEDDING_NORM}.\1",)),
            TensorRule(rf"{_LAYER}\.hidden_norm\.(.*)", (rf"{HIDDEN_NORM}.\1",)),
            TensorRule(rf"{_LAYER}\.(.*)", (rf"{_OURS}\1",)),
            TensorRule(r"(?:model\.)?norm\.(.*)", (r"model.norm.\1",)),
            TensorRule(r"(?:model\.)?embed_tokens\..*|d2t|t2d", ()),
        ),
        state_size=3 * target.hidden_size,
        captures=_captures(path, raw, target),
        fc_bias="fc.bias" in shapes,
        own_head=True,
    )


def read_mtp(path: Path, target: DecoderConfig, raw: Mapping[str, Any]) -> DraftHeadConfig:
    """Read the config of a model's first MTP layer. Raises ConfigError if it has none.

    raw:  the model's config.json
    """
    names = _MTP_NAMES.get(target.architecture)
    if names is None or int(raw.get("num_nextn_predict_layers") or 0) < 1:
        raise ConfigError(
            "speculation.method = mtp: the checkpoint has no MTP layers that remora reads "
            f"({', '.join(_MTP_NAMES)} with num_nextn_predict_layers); speculation.method ngram "
            "works with any model"
        )
    layer = names.layer.format(count=target.num_layers)
    return DraftHeadConfig(
        kind="mtp",
        path=path,
        decoder=replace(target, layers=target.layers[-1:]),
        rules=(
            TensorRule(rf"{layer}\.{names.embedding_norm}\.(.*)", (rf"{EMBEDDING_NORM}.\1",)),
            TensorRule(rf"{layer}\.{names.hidden_norm}\.(.*)", (rf"{HIDDEN_NORM}.\1",)),
            TensorRule(rf"{layer}\.{names.fc}\.(.*)", (rf"{FC}.\1",)),
            TensorRule(rf"{layer}\.{names.last_norm}\.(.*)", (r"model.norm.\1",)),
            TensorRule(rf"{layer}\.(?:shared_head\.head|embed_tokens)\..*", ()),
            TensorRule(rf"{layer}\.(.*)", (rf"{_OURS}\1",)),
            TensorRule(r".*", ()),
        ),
        state_size=target.hidden_size,
        states_first=names.states_first,
    )


def _is_third(shapes: Mapping[str, Any]) -> bool:
    outputs, inputs = shapes.get("fc.weight", (1, 1))
    return bool(inputs == 3 * outputs)


def _captures(path: Path, raw: Mapping[str, Any], target: DecoderConfig) -> tuple[int, ...]:
    """Return the layers whose inputs the head reads: its own, or EAGLE-3's usual ones.

    Ids of layers whose *outputs* are meant, which begin with 1 by SGLang's convention, are one
    less than those of the layers that read them.
    """
    settings = raw.get("eagle_config") or {}
    ids = settings.get("eagle_aux_hidden_state_layer_ids") or raw.get(
        "eagle_aux_hidden_state_layer_ids"
    )
    count = target.num_layers
    if ids is None:
        return 2, count // 2, count - 3
    captures = tuple(int(each) + (int(ids[0]) == 1) for each in ids)
    if len(captures) != 3 or not all(0 <= each < count for each in captures):
        raise ConfigError(
            f"speculation.draft_model: {path} reads the layers {ids}; expected three of the "
            f"model's {count}"
        )
    return captures
