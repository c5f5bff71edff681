"""Tiny random encoders, saved as published checkpoints are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers.processors import TemplateProcessing
from transformers import (
    AlbertConfig,
    AlbertForSequenceClassification,
    AlbertModel,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    DebertaV2Model,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    DistilBertModel,
    ElectraConfig,
    ElectraForSequenceClassification,
    ElectraModel,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    ModernBertModel,
    MPNetConfig,
    MPNetForSequenceClassification,
    MPNetModel,
    NomicBertConfig,
    NomicBertModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForSequenceClassification,
    RobertaModel,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
    XLMRobertaModel,
)

from tests.tiny_models import VOCAB_SIZE, make_tiny_tokenizer

HAS_GTE = hasattr(transformers, "GteModel")  # not in older versions


def _gte(name: str, **settings: Any) -> dict[str, tuple[type, type, Mapping[str, Any]]]:
    if not HAS_GTE:
        return {}
    return {"gte": (transformers.GteConfig, getattr(transformers, name), settings)}


COMMON: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 640,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODERN = {"local_attention": 16, "cls_token_id": 1, "sep_token_id": 2, "norm_eps": 1e-5}
ROBERTA = {"pad_token_id": 1, "type_vocab_size": 1}
DISTILBERT = {"dim": 48, "hidden_dim": 80, "n_layers": 4, "n_heads": 4}
DEBERTA = {
    "relative_attention": True,
    "position_buckets": 16,
    "max_relative_positions": -1,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": "p2c|c2p",
    "position_biased_input": False,
    "type_vocab_size": 0,
}
ENCODERS: Mapping[str, tuple[type, type, Mapping[str, Any]]] = {
    "bert": (BertConfig, BertModel, {}),
    "roberta": (RobertaConfig, RobertaModel, ROBERTA),
    "xlm-roberta": (XLMRobertaConfig, XLMRobertaModel, ROBERTA),
    "mpnet": (MPNetConfig, MPNetModel, {"pad_token_id": 1}),
    "distilbert": (DistilBertConfig, DistilBertModel, DISTILBERT),
    "electra": (ElectraConfig, ElectraModel, {"embedding_size": 48}),
    "electra-small": (ElectraConfig, ElectraModel, {"embedding_size": 16}),
    "albert": (AlbertConfig, AlbertModel, {"embedding_size": 16}),
    "deberta": (DebertaV2Config, DebertaV2Model, DEBERTA),
    "deberta-early": (
        DebertaV2Config,
        DebertaV2Model,
        {
            **DEBERTA,
            "position_buckets": -1,
            "max_relative_positions": 20,
            "norm_rel_ebd": "none",
            "position_biased_input": True,
            "type_vocab_size": 2,
        },
    ),
    **_gte("GteModel", type_vocab_size=1),
    "nomic": (NomicBertConfig, NomicBertModel, {}),
    "modernbert": (ModernBertConfig, ModernBertModel, MODERN),
}
CLASSIFIERS: Mapping[str, tuple[type, type, Mapping[str, Any]]] = {
    "bert": (BertConfig, BertForSequenceClassification, {}),
    "roberta": (RobertaConfig, RobertaForSequenceClassification, ROBERTA),
    "xlm-roberta": (XLMRobertaConfig, XLMRobertaForSequenceClassification, ROBERTA),
    "mpnet": (MPNetConfig, MPNetForSequenceClassification, {"pad_token_id": 1}),
    "distilbert": (DistilBertConfig, DistilBertForSequenceClassification, DISTILBERT),
    "electra": (ElectraConfig, ElectraForSequenceClassification, {"embedding_size": 16}),
    "albert": (AlbertConfig, AlbertForSequenceClassification, {"embedding_size": 16}),
    "deberta": (DebertaV2Config, DebertaV2ForSequenceClassification, DEBERTA),
    **_gte("GteForSequenceClassification", type_vocab_size=0),
    "modernbert": (ModernBertConfig, ModernBertForSequenceClassification, MODERN),
    "modernbert-mean": (
        ModernBertConfig,
        ModernBertForSequenceClassification,
        {**MODERN, "classifier_pooling": "mean", "classifier_bias": True, "norm_bias": True},
    ),
}


def make_tiny_encoder(
    folder: Path,
    family: str,
    *,
    classifies: bool = False,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> PreTrainedModel:
    """Write an encoder with its tokenizer; returns it. `overrides`: settings of its config."""
    config_class, model_class, settings = (CLASSIFIERS if classifies else ENCODERS)[family]
    model = model_class(config_class(**{**COMMON, **settings, **overrides})).eval()
    randomise(model)
    model.to(dtype).save_pretrained(folder)
    make_framing_tokenizer().save_pretrained(folder)
    found: PreTrainedModel = model
    return found


def randomise(model: torch.nn.Module) -> None:
    """Set weights large enough that outputs depend on inputs."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            is_norm = "norm" in name.lower() and name.endswith("weight")
            parameter.normal_(float(is_norm), 0.2, generator=generator)


def make_framing_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer that adds special tokens around texts and between those of a pair."""
    tokenizer = make_tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A <|im_end|>",
        pair="<|im_start|> $A <|im_end|> $B:1 <|im_end|>:1",
        special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)],
    )
    return tokenizer
