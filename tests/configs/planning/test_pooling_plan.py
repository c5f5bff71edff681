"""What models for embeddings and scores do not support is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from remora.configs.errors import ConfigError
from remora.configs.load import parse_args
from remora.configs.planning.pooling_plan import make_pooling_plan
from tests.configs.planning.test_plan import make_machine, make_model


def plan(sections: dict[str, dict[str, Any]]) -> None:
    model = {"path": "a-model", **sections.get("model", {})}
    make_pooling_plan(
        parse_args({**sections, "model": model}),
        make_model(),
        make_machine(),
        Path("a-model"),
        task="embed",
        max_tokens=None,
        head_parameters=0,
    )


def test_a_bare_config_is_planned() -> None:
    plan({})


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("model", "quantization", "int8"),
        ("engine", "kv_dtype", "int8"),
        ("speculation", "method", "ngram"),
    ],
)
def test_keys_of_generation_are_refused(section: str, key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{section}\.{key} is not available for embeddings"):
        plan({section: {key: value}})
