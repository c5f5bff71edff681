"""Rebuilds the tokenizer of a GGUF file.

GGUF stores vocabulary, merges and special ids, but only the name of the pre-tokenizer (how text is
split before merging); `pre_tokenizers.py` has the known ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    processors,
)

from remora.configs.errors import ConfigError
from remora.engine.tokens.fast_tokenizer import FastTokenizer
from remora.engine.weights.gguf.file import GGUFFile, read_gguf
from remora.engine.weights.gguf.pre_tokenizers import PRE_TOKENIZERS

# Kinds of tokens, in `token_type`: of control, and others that are found before anything is cut.
CONTROL, USER_DEFINED = 3, 4
SPECIAL_ROLES = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
}
# Kinds that add the first token by default, and that match whole words before they merge.
BEGINS = ("llama-bpe", "llama3", "llama-v3", "tekken")
ENDS = ("eos", "eot", "eom")
CHATGLM3 = "chatglm-spm"
TEMPLATE = "tokenizer.chat_template"


def load_gguf_tokenizer(path: Path) -> FastTokenizer:
    """Build the tokenizer of a GGUF file. Raises ConfigError for an unknown kind."""
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
    _add_whole_tokens(tokenizer, file, tokens, special)
    _add_ends_of_texts(tokenizer, file, special)
    return FastTokenizer(
        backend_tokenizer=tokenizer,
        special_tokens_map=special,
        chat_template=_templates(file),
    )


def _add_whole_tokens(
    tokenizer: Tokenizer, file: GGUFFile, tokens: list[str], special: Mapping[str, str]
) -> None:
    """Register control and user-defined tokens, which are matched before text is split."""
    of_kind: dict[int, list[str]] = {CONTROL: [], USER_DEFINED: []}
    for token, kind in zip(tokens, file.token_setting("token_type", []), strict=False):
        of_kind.setdefault(kind, []).append(token)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in of_kind[USER_DEFINED]])
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token in dict.fromkeys((*of_kind[CONTROL], *special.values()))
        ]
    )


def gguf_eos_token_ids(path: Path) -> tuple[int, ...]:
    """Return the ids that end an output: of a text, a turn or a message."""
    file = read_gguf(path)
    ids = (file.token_setting(f"{name}_token_id") for name in ENDS)
    return tuple(dict.fromkeys(token_id for token_id in ids if token_id is not None))


def _templates(file: GGUFFile) -> str | dict[str, str] | None:
    """Return the chat template, or several by name."""
    default: str | None = file.metadata.get(TEMPLATE)
    named = {
        key.removeprefix(f"{TEMPLATE}."): text
        for key, text in file.metadata.items()
        if key.startswith(f"{TEMPLATE}.")
    }
    if not named:
        return default
    return named if default is None else {"default": default, **named}


def _add_ends_of_texts(tokenizer: Tokenizer, file: GGUFFile, special: Mapping[str, str]) -> None:
    """Add the special tokens at the ends of texts that the file asks for."""
    begins = file.token_setting("model") == "llama" or file.token_setting("pre") in BEGINS
    ends = {
        "bos_token": file.token_setting("add_bos_token", begins),
        "eos_token": file.token_setting("add_eos_token", False),
    }
    added = [special[role] for role, is_added in ends.items() if is_added and role in special]
    if not added:
        return
    first = [special["bos_token"]] if ends["bos_token"] and "bos_token" in special else []
    last = added[len(first) :]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[*first, "$A", *last, *(f"{token}:1" for token in first), "$B:1", *last],
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(added)],
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
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False, ignore_merges=name in BEGINS)
    )
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[name]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece_bpe(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    """Llama 2's kind: pieces with scores, spaces as U+2581, unknown characters as bytes."""
    if file.token_setting("pre") == CHATGLM3:
        raise ConfigError(
            f"{file.path} has the pre-tokenizer {CHATGLM3!r}, whose texts begin with tokens that "
            "the file does not say. Use the model's Hugging Face folder instead."
        )
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
