"""Tokenizers of other kinds than the tiny checkpoints' byte-level one."""

from __future__ import annotations

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from remora.engine.tokens.tokenizer import Tokenizer


def make_sentencepiece() -> Tokenizer:
    """Spell every byte as <0xAB>, and a few words with U+2581 in front, as Llama 2 does."""
    entries = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁Hello", "▁world", "ing"]
    backend = Backend(
        models.BPE(
            vocab={entry: token_id for token_id, entry in enumerate(entries)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
