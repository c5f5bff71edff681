"""Tiny folders of sentence-transformers, as EmbeddingGemma is published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Gemma3TextConfig, Gemma3TextModel, PreTrainedModel

from tests.tiny_encoders import make_framing_tokenizer, randomise
from tests.tiny_models import COMMON

DENSE = (40, 24)  # sizes of the two dense layers
PROMPTS = {"query": "task: search result | query: ", "document": "title: none | text: "}
WINDOW = 16  # total of both sides


def make_tiny_embedding_gemma(
    folder: Path, **overrides: Any
) -> tuple[PreTrainedModel, tuple[Tensor, ...]]:
    """Write a bidirectional model with pooling, two dense layers and prompts.

    Returns the model of its hidden states, and the weights of the dense layers.
    """
    config = Gemma3TextConfig(
        **{
            **COMMON,
            "head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "num_hidden_layers": 3,
            "use_bidirectional_attention": True,
            **overrides,
        }
    )
    model = Gemma3TextModel(config).eval()
    randomise(model)
    model.save_pretrained(folder)
    make_framing_tokenizer().save_pretrained(folder)
    kinds = ("Transformer", "Pooling", "Dense", "Dense", "Normalize")
    paths = ["" if not index else f"{index}_{kind}" for index, kind in enumerate(kinds)]
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": path,
            "type": f"sentence_transformers.models.{k}",
        }
        for index, (path, k) in enumerate(zip(paths, kinds, strict=True))
    ]
    _write(folder / "modules.json", modules)
    _write(folder / "config_sentence_transformers.json", {"prompts": PROMPTS})
    _write(folder / "sentence_bert_config.json", {"max_seq_length": 128})
    size = config.hidden_size
    _write(
        folder / "1_Pooling" / "config.json",
        {"word_embedding_dimension": size, "pooling_mode_mean_tokens": True},
    )
    weights = []
    draw = torch.Generator().manual_seed(0)
    for path, outputs in zip(paths[2:4], DENSE, strict=True):
        settings = {"in_features": size, "out_features": outputs, "bias": False}
        act = "torch.nn.modules.linear.Identity"
        _write(folder / path / "config.json", {**settings, "activation_function": act})
        weights.append(torch.randn(outputs, size, generator=draw))
        save_file({"linear.weight": weights[-1]}, folder / path / "model.safetensors")
        size = outputs
    return model, tuple(weights)


def _write(file: Path, settings: object) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(settings))
