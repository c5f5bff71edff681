"""Tokenizers of files that hold nothing else."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
from tokenizers import pre_tokenizers

from remora.configs.errors import ConfigError
from remora.engine.weights.gguf.tokenizer import load_gguf_tokenizer
from tests.engine.weights.gguf.converter import writing

NORMAL, USER_DEFINED = gguf.TokenType.NORMAL, gguf.TokenType.USER_DEFINED


def write_tokenizer(file: Path, pre: str, model: str = "gpt2") -> Path:
    """Write every byte, the merged `ab`, `abc` that no merges reach, and `<call>`."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "abc", "<call>"]
    with writing(file, "llama") as writer:
        writer.add_tokenizer_model(model)
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([*[NORMAL] * (len(tokens) - 1), USER_DEFINED])
        writer.add_token_merges(["a b"])
    return file


def test_tokens_that_a_user_defined_are_found_whole_and_are_no_control(tmp_path: Path) -> None:
    file = write_tokenizer(tmp_path / "model.gguf", "gpt-2")

    tokenizer = load_gguf_tokenizer(file).backend_tokenizer

    found = tokenizer.encode("x<call>ab")
    assert found.tokens == ["x", "<call>", "ab"]
    assert tokenizer.decode(found.ids, skip_special_tokens=True) == "x<call>ab"


@pytest.mark.parametrize(
    ("pre", "tokens"), [("gpt-2", ["ab", "c"]), ("llama-bpe", ["abc"]), ("tekken", ["abc"])]
)
def test_some_kinds_take_a_word_that_is_a_token_whatever_merges_say(
    pre: str, tokens: list[str], tmp_path: Path
) -> None:
    file = write_tokenizer(tmp_path / "model.gguf", pre)

    assert load_gguf_tokenizer(file).backend_tokenizer.encode("abc").tokens == tokens


@pytest.mark.parametrize(
    ("model", "pre", "message"),
    [
        ("gpt2", "default", "pre-tokenizer 'default'; known are gpt-2"),
        ("llama", "chatglm-spm", "'chatglm-spm', whose texts begin with tokens"),
        ("t5", "default", "kind 't5'; known are gpt2 and llama"),
        ("gpt2", "some-bpe", "pre-tokenizer 'some-bpe'; known are gpt-2, olmo"),
    ],
)
def test_what_is_not_known_is_refused(model: str, pre: str, message: str, tmp_path: Path) -> None:
    file = write_tokenizer(tmp_path / "model.gguf", pre, model)

    with pytest.raises(ConfigError, match=message):
        load_gguf_tokenizer(file)
