"""The forms of a prompt."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from remora.configs.errors import InvalidRequest
from remora.engine.offline.prompts import as_batch, read_prompt
from remora.engine.tokens.tokenizer import Tokenizer
from tests.conftest import TinyCheckpoints

ROWS = np.zeros((3, 8), np.float32)


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoints: TinyCheckpoints) -> Tokenizer:
    return Tokenizer.load(tiny_checkpoints("llama"))


@pytest.mark.parametrize(
    ("prompts", "count"),
    [
        ("a", 1),
        (["a", "b"], 2),
        ([1, 2, 3], 1),
        ([[1, 2], [3]], 2),
        ({"prompt": "a"}, 1),
        ([{"prompt": "a"}, "b", [1]], 3),
        (ROWS, 1),
        ([], 0),
    ],
)
def test_one_prompt_is_told_from_several(prompts: Any, count: int) -> None:
    assert len(as_batch(prompts)) == count


def test_a_mapping_means_what_its_value_alone_means(tokenizer: Tokenizer) -> None:
    text = read_prompt("Hello", tokenizer)
    ids = list(text.ids)

    assert read_prompt({"prompt": "Hello"}, tokenizer) == text
    assert read_prompt({"prompt_token_ids": ids}, tokenizer).ids == ids
    both = read_prompt({"prompt": "x", "prompt_token_ids": ids, "cache_salt": "s"}, tokenizer)
    assert (both.text, both.ids, both.cache_salt) == ("x", ids, "s")
    rows = read_prompt({"prompt_embeds": ROWS.tolist()}, tokenizer).embeddings
    assert rows is not None
    assert rows.rows.shape == ROWS.shape


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ({}, "must have one"),
        ({"prompt": 3}, "must be text"),
        ({"promt": "a"}, "did you mean prompt"),
        (
            {"prompt": "a", "multi_modal_data": {}},
            "'multi_modal_data' of a prompt is not supported",
        ),
        ({"prompt": "a", "prompt_embeds": ROWS}, "not both"),
    ],
)
def test_what_a_prompt_lacks_is_named(
    prompt: dict[str, Any], says: str, tokenizer: Tokenizer
) -> None:
    with pytest.raises(InvalidRequest, match=says):
        read_prompt(prompt, tokenizer)
