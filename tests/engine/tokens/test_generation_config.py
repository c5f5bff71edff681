"""What is taken from a checkpoint's generation_config.json, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from remora.configs.errors import ConfigError
from remora.engine.tokens.generation_config import read_eos_token_ids, read_generation_defaults


def write(folder: Path, content: Any, name: str = "generation_config.json") -> Path:
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("content", "defaults"),
    [
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": None},
            {"temperature": 0.6, "top_p": 0.9, "top_k": 20},
        ),
        (
            {"repetition_penalty": 1.05, "max_new_tokens": 2048, "max_length": 20},
            {"repetition_penalty": 1.05, "max_tokens": 2048},
        ),
        ({"top_k": -1}, {"top_k": 0}),  # off
        ({"do_sample": False, "top_p": 0.9}, {"temperature": 0.0, "top_p": 0.9}),
    ],
)
def test_sampling_values_come_under_our_names(
    tmp_path: Path, content: dict[str, Any], defaults: dict[str, Any]
) -> None:
    assert read_generation_defaults(write(tmp_path, content)) == defaults


def test_a_checkpoint_may_say_nothing(tmp_path: Path) -> None:
    assert read_generation_defaults(tmp_path) == {}
    assert read_generation_defaults(tmp_path / "model.gguf") == {}
    assert read_eos_token_ids(tmp_path) == ()


@pytest.mark.parametrize(
    "content",
    [{"top_p": 1.5}, {"temperature": "warm"}, {"top_k": "20"}, {"min_p": True}, "[1]", "{"],
)
def test_values_that_make_no_sense_name_the_file(tmp_path: Path, content: Any) -> None:
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        read_generation_defaults(write(tmp_path, content))


@pytest.mark.parametrize(("value", "ids"), [(7, (7,)), ([7, 9], (7, 9)), (None, ())])
def test_end_ids_may_be_one_or_several(tmp_path: Path, value: Any, ids: tuple[int, ...]) -> None:
    assert read_eos_token_ids(write(tmp_path, {"eos_token_id": value})) == ids


def test_end_ids_of_the_model_config_count_only_without_a_generation_config(
    tmp_path: Path,
) -> None:
    write(tmp_path, {"eos_token_id": 3}, "config.json")
    assert read_eos_token_ids(tmp_path) == (3,)

    write(tmp_path, {"eos_token_id": 4})
    assert read_eos_token_ids(tmp_path) == (4,)
