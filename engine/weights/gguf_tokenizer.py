"""The tokenizer inside a GGUF file, built anew.

GGUF stores vocabulary, merges and special ids, but of the pre-tokenizer (how text is cut before
merging) only a name: each name we know has its rule here, and others are refused, because a wrong
rule gives a tokenizer that is right on most texts and wrong on some.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

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
# Words end where a capital follows a small letter.
_HEAD, _TAIL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
TEKKEN_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_HEAD}*{_TAIL}+|[^\r\n\p{{L}}\p{{N}}]?{_HEAD}+{_TAIL}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_HEAD}*{_TAIL}+{_CONTRACTION}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_HEAD}+{_TAIL}*{_CONTRACTION}|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


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
    **dict.fromkeys(("gpt-2", "olmo", "phi-2", "jais"), _byte_level),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _digits_apart),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "glm4", "chatglm-bpe", "dbrx", "smaug-bpe"),
        lambda: _byte_level(LLAMA3_SPLIT),
    ),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen"), lambda: _byte_level(QWEN2_SPLIT)),
    "tekken": lambda: _byte_level(TEKKEN_SPLIT),
    **dict.fromkeys(("gpt-4o", "llama4"), lambda: _byte_level(GPT4O_SPLIT)),
}
# Kinds whose texts begin with the first token where the file does not say.
BEGINS = ("llama-bpe", "llama3", "llama-v3", "tekken")
ENDS = ("eos", "eot", "eom")
TEMPLATE = "tokenizer.chat_template"


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
    _add_ends_of_texts(tokenizer, file, special)
    return FastTokenizer(
        backend_tokenizer=tokenizer,
        special_tokens_map=special,
        chat_template=_templates(file),
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
    """Have texts begin and end with the special tokens that the file says."""
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
