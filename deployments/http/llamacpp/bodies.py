"""Bodies of llama.cpp's /completion, /infill, /tokenize and /apply-template."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, WithJsonSchema

from remora.deployments.http.core.body_limits import check_size
from remora.deployments.http.core.fields import (
    Body,
    NumLogprobs,
    NumOutputs,
    SamplingBody,
    Seed,
    fault,
    only,
    unsupported_part,
)
from remora.deployments.http.generation.bodies import TemplateBody
from remora.deployments.http.generation.messages import Messages

MAX_RESPONSE_FIELDS = 64
MAX_EXTRA = 512
# Values of `seed` that ask for a random one.
RANDOM_SEEDS = (-1, 2**32 - 1)
# Name of a sampler in `samplers` -> its parameters, in the order in which samplers apply here.
SAMPLERS: dict[str, tuple[str, ...]] = {
    "penalties": ("repetition_penalty", "presence_penalty", "frequency_penalty"),
    "temperature": ("temperature",),
    "top_k": ("top_k",),
    "top_p": ("top_p",),
    "min_p": ("min_p",),
    "typ_p": ("typical_p",),
    "infill": (),
}
# Samplers that are off: their fields accept only values without effect.
_OFF = ("dry", "top_n_sigma", "xtc", "adaptive_p", "dist")

Part = str | list[int]


def _check_piece(value: Any) -> list[Part]:
    """Return one prompt as texts and token ids in order."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        if value.get("multimodal_data"):
            raise unsupported_part("multimodal_data: this model takes text only")
        if not isinstance(value.get("prompt_string"), str):
            raise fault("must have a text as prompt_string where it is an object")
        return [value["prompt_string"]]
    if not isinstance(value, list) or not value:
        raise fault(
            "must be a text, a list of token ids and texts, an object with prompt_string, or a "
            "list of these"
        )
    parts: list[Part] = []
    for item in value:
        if isinstance(item, str):
            parts.append(item)
        elif type(item) is not int:
            raise fault("must hold whole numbers and texts only where it is a list of tokens")
        elif parts and isinstance(parts[-1], list):
            parts[-1].append(item)
        else:
            parts.append([item])
    return parts


def _check_prompts(value: Any) -> list[list[Part]]:
    """Return `prompt` as a list of prompts, from any of its forms."""
    is_many = isinstance(value, list) and not any(type(item) is int for item in value)
    if not is_many:
        return [_check_piece(value)]
    if not value:
        raise fault("is empty; at least one token is needed")
    check_size("max_prompts", value)
    return [_check_piece(item) for item in value]


Bias = tuple[int | str, float | Literal[False]]


def _check_biases(value: Any) -> list[Bias]:
    """Return pairs of a token id or a text, and a bias or false, which bans it."""
    if value is None:
        return []
    pairs = list(map(list, value.items())) if isinstance(value, dict) else value
    if not isinstance(pairs, list):
        raise fault("must be a list of pairs of a token and a bias, or an object of these")
    check_size("max_logit_biases", pairs)
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            raise fault("must hold pairs of a token id or a text, and a number or false")
        token, bias = pair
        if type(token) is not int and not isinstance(token, str):
            raise fault("must have token ids or texts as the first of each pair")
        is_number = isinstance(bias, int | float) and not isinstance(bias, bool)
        if bias is not False and not (is_number and math.isfinite(bias)):
            raise fault("must have numbers or false as the second of each pair")
    return [(_token_of(token), bias) for token, bias in pairs]


def _token_of(token: int | str) -> int | str:
    """Return a token id that is written as text, such as a key of an object, as a number."""
    is_id = isinstance(token, str) and token.isascii() and token.isdecimal() and len(token) <= 10
    return int(token) if is_id else token


def _at_most_zero(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float | None):
        raise fault("must be a number")
    if value is not None and value > 0:
        raise unsupported_part("only 0 and negative values, which switch it off, can be served")
    return value


def _check_samplers(value: Any) -> list[str] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise fault("must be a list of names of samplers")
    for name in value:
        if name not in SAMPLERS and name not in _OFF:
            raise unsupported_part(f"{name[:64]!r} is no sampler that can be served")
    if len(set(value)) < len(value):
        raise unsupported_part("a sampler cannot be applied twice")
    return value


def _check_grammar(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise fault("must be a text")
    return value or None


Off = Annotated[Any, PlainValidator(_at_most_zero), WithJsonSchema({"type": "number"})]
Number = Annotated[float, Field(ge=-1e9, le=1e9)]
Whole = Annotated[int, Field(ge=-(2**31), lt=2**32)]
Limit = Annotated[int, Field(ge=-2, lt=2**31)]


class LlamaBody(SamplingBody):
    """Fields that /completion and /infill share."""

    model: Annotated[str, Field(max_length=1024)] | None = None
    n_predict: Limit | None = None
    max_tokens: Limit | None = None
    temperature: Annotated[float, Field(ge=-100, le=100)] | None = None
    top_k: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    repeat_penalty: float | None = None
    repeat_last_n: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    seed: Seed | None = None
    logit_bias: Annotated[
        Any, PlainValidator(_check_biases), WithJsonSchema({"type": ["array", "object"]})
    ] = None
    n_cmpl: NumOutputs | None = None
    n_probs: NumLogprobs | None = None
    n_indent: Annotated[int, Field(ge=0, le=1024)] | None = None
    t_max_predict_ms: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    samplers: Annotated[
        list[str] | None,
        PlainValidator(_check_samplers),
        WithJsonSchema({"type": "array", "items": {"type": "string"}}),
    ] = None
    grammar: Annotated[
        str | None, PlainValidator(_check_grammar), WithJsonSchema({"type": "string"})
    ] = None
    json_schema: Annotated[Any, WithJsonSchema({"type": ["object", "string"]})] = None
    stream: bool | None = None
    cache_prompt: bool | None = None
    return_tokens: bool | None = None
    timings_per_token: bool | None = None
    response_fields: Annotated[list[str], Field(max_length=MAX_RESPONSE_FIELDS)] | None = None
    # Sampling that is not available; values that switch it off are accepted.
    dynatemp_range: Annotated[Any, only(0, 0.0)] = None
    dry_multiplier: Annotated[Any, only(0, 0.0)] = None
    xtc_probability: Annotated[Any, only(0, 0.0)] = None
    top_n_sigma: Off = None
    adaptive_target: Off = None
    mirostat: Annotated[Any, only(0)] = None
    min_keep: Annotated[Any, only(0, 1)] = None
    post_sampling_probs: Annotated[Any, only(False)] = None
    return_progress: Annotated[Any, only(False)] = None
    grammar_lazy: Annotated[Any, only(False)] = None
    grammar_triggers: Annotated[Any, only([])] = None
    preserved_tokens: Annotated[Any, only([])] = None
    lora: Annotated[Any, only([])] = None
    # Beam search belongs to other APIs.
    use_beam_search: Annotated[Any, only(False)] = None
    num_beams: Annotated[Any, only(1)] = None
    length_penalty: Annotated[Any, only(1, 1.0)] = None
    early_stopping: Annotated[Any, only(False)] = None
    num_beam_groups: Annotated[Any, only(1)] = None
    diversity_penalty: Annotated[Any, only(0, 0.0)] = None
    # Details of sampling that is off, and of llama.cpp's slots: without effect here.
    dynatemp_exponent: Number | None = None
    dry_base: Number | None = None
    dry_allowed_length: Whole | None = None
    dry_penalty_last_n: Whole | None = None
    dry_sequence_breakers: list[str] | None = None
    xtc_threshold: Number | None = None
    adaptive_decay: Number | None = None
    mirostat_tau: Number | None = None
    mirostat_eta: Number | None = None
    t_max_prompt_ms: Whole | None = None
    id_slot: Whole | None = None
    n_keep: Whole | None = None
    n_discard: Whole | None = None
    n_cache_reuse: Whole | None = None
    sse_ping_interval: Whole | None = None
    backend_sampling: bool | None = None

    @property
    def limit(self) -> int | None:
        """The output limit in tokens, 0 = compute the prompt only; None = as many as fit."""
        wanted = self.max_tokens if self.n_predict is None else self.n_predict
        return None if wanted is None or wanted < 0 else wanted

    @property
    def num_answers(self) -> int:
        """The number of answers to each prompt."""
        return self.n_cmpl or self.n or 1


class LlamaCompletionBody(LlamaBody):
    """Body of /completion."""

    prompt: Annotated[
        list[list[Part]],
        PlainValidator(_check_prompts),
        WithJsonSchema({"type": ["string", "array", "object"]}),
    ]


class InfillExtra(Body):
    """A part of another file."""

    text: str
    filename: str | None = None


class InfillBody(LlamaBody):
    """Body of /infill: the text before and after the gap, and the beginning of the answer."""

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[InfillExtra], Field(max_length=MAX_EXTRA)] | None = None
    prompt: str | None = None


class LlamaTokenizeBody(Body):
    """Body of /tokenize with `content`."""

    content: str
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None
    model: Annotated[str, Field(max_length=1024)] | None = None


class ApplyTemplateBody(TemplateBody):
    """Body of /apply-template."""

    messages: Messages
    model: Annotated[str, Field(max_length=1024)] | None = None
