"""Limits of the fields by which tokens are chosen; each is tested at its border."""

from __future__ import annotations

from typing import Any

import pytest

from remora.configs.errors import InvalidSampling
from remora.engine.types import SamplingParams


@pytest.mark.parametrize(
    "fields",
    [
        {"bad_words_ids": ((1,) * 32,) * 128},
        {"stop_regex": ("a{256}",) * 16},
        {"stop_regex": ("x" * 256,)},
        {"stop": ("x" * 256,) * 16},
        {"min_tokens": 4, "max_tokens": 4},
        {"allowed_token_ids": tuple(range(100_000))},
    ],
)
def test_values_up_to_the_limits_are_taken(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)

    assert all(getattr(params, name) == value for name, value in fields.items())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"bad_words_ids": ((1,),) * 129}, "bad_words"),
        ({"bad_words_ids": ((1,) * 33,)}, "bad_words"),
        ({"bad_words_ids": ((),)}, "bad_words"),
        ({"stop_regex": ("a",) * 17}, "stop_regex"),
        ({"stop_regex": ("x" * 257,)}, "stop_regex"),
        ({"stop_regex": ("",)}, "stop_regex"),
        ({"stop_regex": ("a{257}",)}, "stop_regex"),
        ({"stop_regex": ("a.*",)}, "stop_regex"),
        ({"stop": ("x" * 257,)}, "stop"),
        ({"stop": ("x",) * 17}, "stop"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias"),
    ],
)
def test_values_beyond_the_limits_are_refused_and_the_field_named(
    fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidSampling) as caught:
        SamplingParams(**fields)

    assert caught.value.param == param


@pytest.mark.parametrize("given", ["END", ["END"], ("END",)])
def test_a_text_to_stop_at_is_given_alone_or_in_a_list(given: Any) -> None:
    assert SamplingParams(stop=given).stop == ("END",)
    assert SamplingParams(stop_regex=given).stop_regex == ("END",)
    assert SamplingParams(stop=None).stop == ()  # type: ignore[arg-type]
