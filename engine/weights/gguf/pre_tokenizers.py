"""Pre-tokenizers (how text is split before merging), by their names in GGUF files.

A file holds only the name. Unknown names are refused: a wrong rule gives a tokenizer that is right
for most texts and wrong for some.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import Regex, pre_tokenizers

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

# DeepSeek cuts in steps: at lines, letters, signs (which its first tokenizer counts Latin letters
# among), East Asian characters. Of letters it lists capitals and small ones but for some scripts.
_LISTED_LETTERS = (
    r"[[\p{Lu}\p{Ll}\p{Lt}]&&[^\x{560}-\x{588}\x{10c7}-\x{10ff}\x{1c80}-\x{1c8f}"
    r"\x{2d00}-\x{2d2d}\x{a790}-\x{a7ff}\x{ab30}-\x{ab68}\x{10570}-\x{105bf}"
    r"\x{10d50}-\x{10d8f}\x{16e40}-\x{16eff}\x{1d400}-\x{1d7cb}\x{1df00}-\x{1dfff}]]"
)
_LISTED_SIGNS = r"[!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3000}-\x{3002}]"
_EAST_ASIAN = r"[\x{4e00}-\x{9fa5}\x{800}-\x{4e00}\x{ac00}-\x{d7ff}]+"
DEEPSEEK_SPLITS = (
    r"[\r\n]",
    rf"\s?{_LISTED_LETTERS}+",
    rf"\s?{_LISTED_SIGNS}+",
    r"\s+$",
    _EAST_ASIAN,
)
DEEPSEEK_CODER_SPLITS = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN)
DEEPSEEK3_SPLITS = (
    r"\p{N}{1,3}",
    r"[\x{4e00}-\x{9fa5}\x{3040}-\x{309f}\x{30a0}-\x{30ff}]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


def _byte_level(*splits: str, further: tuple[Any, ...] = ()) -> Any:
    """Return a pre-tokenizer that splits in steps and then maps bytes to characters."""
    if not splits:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    steps = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in splits]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*steps, *further, last])


def _each_digit() -> Any:
    return pre_tokenizers.Digits(individual_digits=True)


def _digits_apart() -> Any:
    return pre_tokenizers.Sequence([_each_digit(), _byte_level()])


def _falcon() -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Punctuation(behavior="contiguous"),
            _byte_level(),
            pre_tokenizers.Digits(individual_digits=False),
            pre_tokenizers.Split(Regex(r"[0-9][0-9][0-9]"), behavior="isolated"),
        ]
    )


PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    **dict.fromkeys(("gpt-2", "olmo", "mpt", "phi-2", "jais"), _byte_level),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _digits_apart),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "glm4", "chatglm-bpe", "dbrx", "smaug-bpe"),
        lambda: _byte_level(LLAMA3_SPLIT),
    ),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen"), lambda: _byte_level(QWEN2_SPLIT)),
    "tekken": lambda: _byte_level(TEKKEN_SPLIT),
    **dict.fromkeys(("gpt-4o", "llama4"), lambda: _byte_level(GPT4O_SPLIT)),
    "deepseek-llm": lambda: _byte_level(*DEEPSEEK_SPLITS, further=(_each_digit(),)),
    "deepseek-coder": lambda: _byte_level(*DEEPSEEK_CODER_SPLITS, further=(_each_digit(),)),
    "deepseek-v3": lambda: _byte_level(*DEEPSEEK3_SPLITS),
    "falcon": _falcon,
}
