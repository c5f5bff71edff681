"""A tiny checkpoint as a GGUF file, with its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf

from tests.engine.weights.gguf.converter import (
    Encode,
    Kind,
    add_settings,
    convert,
    permuted,
    unchanged,
)

KINDS = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}


def make_gguf(
    checkpoint: Path,
    file: Path,
    *,
    stored_as: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    encode: Encode = gguf.quantize,
    pre: str = "gpt-2",
    metadata: dict[str, Any] | None = None,
    divisors: list[float] | None = None,
    has_tokenizer: bool = True,
    general: dict[str, Any] | None = None,
    max_tensors: int = 0,
) -> Path:
    """Convert a Hugging Face folder.

    stored_as, encode, max_tensors:  as for `convert`
    pre:       the pre-tokenizer's name
    metadata:  further settings of the model; `general`: others, by their whole names
    divisors:  of rotary frequencies
    """
    model = json.loads((checkpoint / "config.json").read_text())["model_type"]
    kind = Kind(
        KINDS[model],
        model,
        metadata=metadata or {},
        extra={"rope_freqs.weight": divisors} if divisors else {},
        change=permuted if KINDS[model] == "llama" else unchanged,
    )

    def add(writer: gguf.GGUFWriter) -> None:
        add_settings(writer, general or {})
        if has_tokenizer:
            _add_tokenizer(writer, checkpoint, pre)

    convert(
        kind,
        checkpoint,
        file,
        stored_as=stored_as,
        encode=encode,
        max_tensors=max_tensors,
        add=add,
    )
    return min(file.parent.glob(f"{file.stem}-00001-of-*.gguf")) if max_tensors else file


def _add_tokenizer(writer: gguf.GGUFWriter, checkpoint: Path, pre: str) -> None:
    stored = json.loads((checkpoint / "tokenizer.json").read_text())
    vocabulary = stored["model"]["vocab"]
    special = {entry["content"] for entry in stored["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(
        [gguf.TokenType.CONTROL if t in special else gguf.TokenType.NORMAL for t in tokens]
    )
    writer.add_token_merges([" ".join(pair) for pair in stored["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template((checkpoint / "chat_template.jinja").read_text())
