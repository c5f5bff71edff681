"""The tokenizer inside a GGUF file, built anew.

GGUF stores vocabulary, merges and special ids, but of the pre-tokenizer (how text is cut before
merging) only a name: each name we know has its rule here, and others are refused, because a wrong
rule gives a tokenizer that is right on most texts and wrong on some.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from remora.configs.errors import ConfigError
from remora.engine.tokens.fast_tokenizer import FastTokenizer
from remora.engine.weights.gguf_file import GGUFFile, read_gguf

CONTROL = 3  # the kind of a control token, in `token_type`
SPECIAL_ROLES = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
}
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def _byte_level(split: str | None = None) -> Any:
    if split is None:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _digits_apart() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])


PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "gpt-2": _byte_level,
    "smollm": _digits_apart,
    "llama-bpe": lambda: _byte_level(LLAMA3_SPLIT),
    "qwen2": lambda: _byte_level(QWEN2_SPLIT),
}


def load_gguf_tokenizer(path: Path) -> FastTokenizer:
    """Build the tokenizer of a GGUF file. Raises ConfigError for a kind that we do not know."""
    file = read_gguf(path)
    tokens: list[str] = file.token_setting("tokens", [])
    kind = file.token_setting("model")
    match kind:
        case "gpt2":
            tokenizer = _byte_level_bpe(file, tokens)
        case "llama":
            tokenizer = _sentencepiece_bpe(file, tokens)
        case _:
            raise ConfigError(f"{path} has a tokenizer of kind {kind!r}; known are gpt2 and llama.")
    ids = {role: file.token_setting(f"{name}_token_id") for role, name in SPECIAL_ROLES.items()}
    special = {role: tokens[token_id] for role, token_id in ids.items() if token_id is not None}
    kinds = file.token_setting("token_type", [])
    controls = [token for token, kind in zip(tokens, kinds, strict=False) if kind == CONTROL]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token in dict.fromkeys((*controls, *special.values()))
        ]
    )
    return FastTokenizer(
        backend_tokenizer=tokenizer,
        special_tokens_map=special,
        chat_template=file.metadata.get("tokenizer.chat_template"),
    )


def _byte_level_bpe(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    name = file.token_setting("pre", "gpt-2")
    if name not in PRE_TOKENIZERS:
        raise ConfigError(
            f"{file.path} has the pre-tokenizer {name!r}; known are {', '.join(PRE_TOKENIZERS)}. "
            "Use the model's Hugging Face folder instead."
        )
    merges = [tuple(merge.split(" ")) for merge in file.token_setting("merges", [])]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False))
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[name]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece_bpe(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    """Llama 2's kind: pieces with scores, spaces as U+2581, unknown characters as bytes."""
    scores = file.token_setting("scores")
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    # A merge's rank is its result's score, best first.
    merges = sorted(
        (
            (-scores[token_id], cut, (token[:cut], token[cut:]))
            for token, token_id in vocabulary.items()
            for cut in range(1, len(token))
            if token[:cut] in vocabulary and token[cut:] in vocabulary
        ),
    )
    unknown = file.token_setting("unknown_token_id", 0)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=[pair for _, _, pair in merges],
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = file.token_setting("add_space_prefix", True)
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefix else replace
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(
        [*steps, decoders.Strip(content=" ", left=1)] if prefix else steps
    )
    return tokenizer
