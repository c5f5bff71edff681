"""Conversion of request fields to SamplingParams."""

from __future__ import annotations

from typing import Any

import pytest

from remora.configs.errors import InvalidRequest, InvalidSampling
from remora.deployments.http.core.fields import OpenAIBody, parse
from remora.deployments.http.generation.sampling import as_seed, openai_sampling
from remora.deployments.http.generation.server_state import ServerState
from remora.engine.types import MAX_SEED, SamplingParams
from tests.deployments.fakes import FakeServer, make_server_config


def make_sampling(defaults: dict[str, Any] | None = None, **fields: Any) -> SamplingParams:
    body = parse(OpenAIBody, fields)
    return openai_sampling(
        body,
        ServerState.over(FakeServer(generation_defaults=defaults or {})),
        max_tokens=body.max_tokens,
        logprobs=None,
        prompt_logprobs=body.prompt_logprobs,
        names={"max_tokens": "max_completion_tokens"},
    )


def test_the_models_defaults_fill_what_the_request_leaves_out() -> None:
    defaults = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1}

    params = make_sampling(defaults, top_p=1.0, top_k=-1)

    assert (params.temperature, params.repetition_penalty) == (0.6, 1.1)
    assert (params.top_p, params.top_k) == (1.0, 0)


def test_an_explicit_zero_is_a_value_and_no_fields_are_neutral() -> None:
    assert make_sampling({"temperature": 0.6}, temperature=0).is_greedy
    assert make_sampling() == SamplingParams(max_tokens=None)


def test_every_field_arrives() -> None:
    same: dict[str, Any] = {"max_tokens": 9, "min_tokens": 3, "temperature": 0.5, "top_k": 7}
    same |= {"top_p": 0.8, "min_p": 0.1, "presence_penalty": 0.2, "frequency_penalty": 0.3}
    same |= {"repetition_penalty": 1.2, "ignore_eos": True, "skip_special_tokens": False}
    same |= {"seed": 11, "n": 2, "prompt_logprobs": 4}

    params = make_sampling(
        **same,
        logit_bias={"5": -100, "6": 1.5},
        stop="end",
        stop_regex="e.d",
        stop_token_ids=[1, 2],
        bad_words=["no", " or"],
        allowed_token_ids=[5, 6],
        include_stop_str_in_output=True,
    )

    assert params == SamplingParams(
        **same,
        logit_bias={5: -100.0, 6: 1.5},
        stop=("end",),
        stop_regex=("e.d",),
        stop_token_ids=(1, 2),
        bad_words_ids=((110, 111), (32, 110, 111), (32, 111, 114)),
        allowed_token_ids=(5, 6),
        include_stop_in_output=True,
    )


def test_seeds_of_any_sign_map_apart_and_alike_each_time() -> None:
    seeds = [as_seed(seed) for seed in (-1, 0, 1, -(2**63), 2**63 - 1)]

    assert len(set(seeds)) == 5
    assert all(seed is not None and 0 <= seed <= MAX_SEED for seed in seeds)
    assert as_seed(-1) == MAX_SEED


@pytest.mark.parametrize(
    "fields",
    [{"logit_bias": {"257": 1}}, {"stop_token_ids": [-1]}, {"allowed_token_ids": [257]}],
)
def test_ids_outside_the_vocabulary_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        make_sampling(**fields)
    assert caught.value.param == next(iter(fields))


def test_stop_ids_beyond_the_vocabulary_are_passed_over() -> None:
    assert make_sampling(stop_token_ids=[257, 5, 10**6]).stop_token_ids == (5,)


def test_errors_use_the_callers_name_of_a_parameter() -> None:
    with pytest.raises(InvalidSampling) as caught:
        make_sampling(max_tokens=0)
    assert caught.value.param == "max_completion_tokens"


@pytest.mark.observes("grammar.first_token_ids")
def test_the_operators_first_tokens_hold_for_every_request() -> None:
    config = make_server_config(grammar={"first_token_ids": [7, 8]})

    params = openai_sampling(
        parse(OpenAIBody, {}),
        ServerState.over(FakeServer(config=config)),
        max_tokens=1,
        logprobs=None,
        prompt_logprobs=None,
    )

    assert params.first_token_ids == (7, 8)
