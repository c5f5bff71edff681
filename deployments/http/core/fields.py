"""Request bodies as pydantic models: the parts that all dialects share, and parsing.

Validation is strict: a bool is no int, a string is no number, NaN is refused. Every count and
length has a limit here, checked before anything is copied. A malformed field raises InvalidRequest
with its name in OpenAI's form (`messages[0].content`). The body models do not know the served model
or its tokenizer: token ids are range-checked where they become engine values (`sampling.py`,
`prompts.py`).
"""

from __future__ import annotations

import json
import math
import re
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from remora.configs.errors import InvalidRequest
from remora.deployments.http.core.body_limits import AtMost, check_size
from remora.deployments.http.core.errors import UNSUPPORTED
from remora.deployments.http.core.unsupported_fields import refuse_unsupported
from remora.engine.types import MAX_LOGPROBS, MAX_STOP_CHARS

MAX_METADATA = 16
MAX_STOP_TOKEN_IDS = 1024
MAX_BAD_WORDS = 64  # each is also forbidden with a leading space
MAX_ALLOWED_IDS = 2**18
MAX_BIAS = 100.0
_INT32 = 2**31 - 1
_INT64 = 2**63
_MAX_SHOWN_CHARS = 200
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def fault(message: str, *, param: str = "") -> PydanticCustomError:
    """Return a validation error with this message; `param` is for validators of whole objects."""
    return PydanticCustomError("value", "{message}", {"message": message, "param": param})


def missing(name: str) -> PydanticCustomError:
    """Return the validation error of a whole object for a field that it lacks."""
    return PydanticCustomError("missing", "is required", {"param": name})


def unsupported_part(message: str) -> PydanticCustomError:
    """Return the validation error for a known value that is not supported."""
    return PydanticCustomError(UNSUPPORTED, "{message}", {"message": message})


def only(*values: Any) -> PlainValidator:
    """Return a validator for a field of which only some values are supported."""

    def check(value: Any) -> Any:
        if value is not None and not any(type(value) is type(v) and value == v for v in values):
            raise unsupported_part(f"only {' and '.join(map(json.dumps, values))} can be served")
        return value

    return PlainValidator(check)


def is_token_list(value: Any) -> bool:
    """Return whether the value is a list of ints (bools do not count)."""
    return isinstance(value, list) and all(type(item) is int for item in value)


def as_list(value: Any) -> Any:
    """Return a text as a list of one, anything else unchanged."""
    return [value] if isinstance(value, str) else value


def _check_biases(value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise fault("must be an object of token ids and numbers")
    check_size("max_logit_biases", value)
    biases = {}
    for key, bias in value.items():
        token_id = str(key)
        if not (token_id.isascii() and token_id.isdecimal() and len(token_id) <= 10):
            found = repr(token_id[:20])
            raise fault(f"must have token ids, written as whole numbers, for keys; {found} found")
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise fault(f"must have numbers for values; that of token {token_id} is none")
        if not (math.isfinite(bias) and -MAX_BIAS <= bias <= MAX_BIAS):
            found = f"{bias} of token {token_id}"
            raise fault(f"must have values between {-MAX_BIAS:g} and {MAX_BIAS:g}; {found} found")
        biases[int(token_id)] = float(bias)
    return biases


def _check_metadata(value: Any) -> dict[str, str] | None:
    if value is None:
        return None
    if not isinstance(value, dict) or len(value) > MAX_METADATA:
        raise fault(f"must be an object of up to {MAX_METADATA} texts")
    if not all(isinstance(text, str) for text in value.values()):
        raise fault("must have texts for values")
    return value


def _check_params(value: Any) -> dict[str, Any] | None:
    if value is not None and not isinstance(value, dict):
        raise fault("must be an object")
    return value


def _check_early_stopping(value: Any) -> bool | Literal["never"] | None:
    if value is None or isinstance(value, bool):
        return value
    if value == "never":
        return "never"
    raise fault('must be true, false or "never"')


def _check_path(value: str) -> str:
    if _CONTROL.search(value):
        raise fault("contains a control character or half a surrogate pair")
    return value


PathText = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(_check_path)]
StopTexts = Annotated[
    list[Annotated[str, Field(min_length=1), AtMost("max_stop_chars")]],
    Field(fail_fast=True),
    AtMost("max_stops"),
]
BadWords = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]],
    Field(max_length=MAX_BAD_WORDS, fail_fast=True),
]
AllowedIds = Annotated[list[int], Field(min_length=1, max_length=MAX_ALLOWED_IDS, fail_fast=True)]
TokenIds = Annotated[
    list[Annotated[int, Field(le=_INT32)]], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)
]
AskedIds = Annotated[list[int], Field(max_length=MAX_LOGPROBS, fail_fast=True)]
Biases = Annotated[
    dict[int, float] | None, PlainValidator(_check_biases), WithJsonSchema({"type": "object"})
]
Metadata = Annotated[
    dict[str, str] | None, PlainValidator(_check_metadata), WithJsonSchema({"type": "object"})
]
Count = Annotated[int, Field(ge=0, le=_INT32)]
NumOutputs = Annotated[int, Field(ge=1), AtMost("max_n")]
NumLogprobs = Annotated[int, Field(ge=0), AtMost("max_top_logprobs")]
NumPromptLogprobs = Annotated[int, Field(ge=-1), AtMost("max_top_logprobs")]  # -1 = all
Label = Annotated[str, Field(min_length=1, max_length=256)]
TaskId = Label | int
Params = Annotated[
    dict[str, Any] | None, PlainValidator(_check_params), WithJsonSchema({"type": "object"})
]
Seed = Annotated[int, Field(ge=-_INT64, lt=2 * _INT64)]
EarlyStopping = Annotated[
    bool | Literal["never"] | None,
    PlainValidator(_check_early_stopping),
    WithJsonSchema({"type": ["boolean", "string"]}),
]


class Body(BaseModel):
    """A JSON object from a client. Unknown fields are kept so that they can be reported."""

    # Each model builds its validator with its first body: a start needs none of the hundred.
    model_config = ConfigDict(
        strict=True, extra="allow", allow_inf_nan=False, frozen=True, defer_build=True
    )


class SamplingBody(Body):
    """Sampling fields whose names are the same in all dialects."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1, le=_INT32)] | None = None
    min_p: float | None = None
    typical_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Biases = None
    stop: Annotated[StopTexts | None, BeforeValidator(as_list)] = None
    stop_regex: Annotated[StopTexts | None, BeforeValidator(as_list)] = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    custom_logit_processor: Label | None = None
    custom_params: Params = None
    # No effect: the tokenizers in use never put spaces there.
    spaces_between_special_tokens: bool | None = None
    n: NumOutputs | None = None
    max_drafts: Count | None = None
    use_beam_search: bool | None = None
    num_beams: Count | None = None
    length_penalty: float | None = None
    early_stopping: EarlyStopping = None
    num_beam_groups: Count | None = None
    diversity_penalty: float | None = None

    @property
    def is_beam_search(self) -> bool:
        """Whether the request asks for beam search: by name, or by a number of beams."""
        if self.use_beam_search is not None:
            return self.use_beam_search
        return (self.num_beams or 1) > 1


class StreamHints(Body):
    """Hints in `stream_options`, as those of `HintsBody`."""

    include_obfuscation: bool | None = None  # of the lengths of events: nothing is padded here


class StreamOptions(StreamHints):
    """Stream options: contents of a stream in addition to text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


ServiceTier = Literal["auto", "default", "flex", "fast", "scale", "priority"]


class HintsBody(Body):
    """Fields that are accepted without effect, since none of them can change an answer here.

    They name the client, or ask a service with tiers, caches or models of its own for something
    that this server does not have. docs/http-api.md has the same list.
    """

    user: str | None = None
    safety_identifier: str | None = None
    session_id: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    service_tier: ServiceTier | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class OpenAIBody(SamplingBody, HintsBody):
    """Fields shared by chat and text completions."""

    model: Annotated[str, Field(max_length=1024)] | None = None
    max_tokens: Count | None = None
    min_tokens: Count | None = None
    seed: Seed | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: NumPromptLogprobs | None = None
    logprob_token_ids: AskedIds | None = None
    best_of: NumOutputs | None = None
    bad_words: BadWords | None = None
    allowed_token_ids: AllowedIds | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=_INT32)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_prompt_text: bool | None = None
    return_hidden_states: bool | None = None
    priority: Annotated[int, Field(ge=-_INT32, le=_INT32)] | None = None
    cache_salt: Label | None = None
    rid: Label | None = None
    request_id: Label | None = None
    metadata: Metadata = None  # shown with a stored chat, else without effect


BodyT = TypeVar("BodyT", bound=Body)
# Prefix of sampling fields in dialects that keep them in an object.
PREFIX = "parameters."


def parse(model: type[BodyT], body: Any, *, prefix: str = "") -> BodyT:
    """Validate one body. `prefix` precedes the names of its fields in errors.

    Raises InvalidRequest.
    """
    if not isinstance(body, dict):
        name = prefix.removesuffix(".") or None
        raise InvalidRequest(f"{name or 'The body'} must be a JSON object.", name)
    others = {name: value for name, value in body.items() if name not in model.model_fields}
    refuse_unsupported(others, prefix=prefix)
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise _as_invalid_request(error, prefix) from None


def parse_with_parameters(
    model: type[BodyT], parameters: type[Body], body: Any, *, stream: bool | None
) -> BodyT:
    """Validate a body with its sampling fields in `parameters`; errors give their full names.

    stream:  whether the path alone decides that the response is streamed or not; None = the body

    Raises InvalidRequest.
    """
    given = body.get("parameters") if isinstance(body, dict) else None
    if isinstance(body, dict):
        body = {name: value for name, value in body.items() if name != "parameters"}
    parsed = parse(model, body)
    changes: dict[str, Any] = {}
    if given is not None:
        changes["parameters"] = parse(parameters, given, prefix=PREFIX)
    if stream is not None:
        changes["stream"] = stream
    return parsed.model_copy(update=changes)


def _as_invalid_request(error: ValidationError, prefix: str) -> InvalidRequest:
    first = error.errors(include_url=False, include_input=False)[0]
    context = first.get("ctx", {})
    extra = context.get("param")
    param = prefix + _path((*first["loc"], extra) if extra else first["loc"])
    text = first["msg"][:_MAX_SHOWN_CHARS]
    kind = first["type"]
    if kind == "missing":
        return InvalidRequest(f"{param} is required.", param, "missing_required_parameter")
    if kind == UNSUPPORTED:
        return InvalidRequest(f"{param}: {text}.", param, UNSUPPORTED)
    if kind == "model_type":
        return InvalidRequest(f"{param} must be a JSON object.", param)
    message = f"{param} {text}." if kind == "value" else f"{param}: {text}."
    return InvalidRequest(message, param, limit=context.get("limit"))


def _path(location: tuple[int | str, ...]) -> str:
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return path.removeprefix(".")[:_MAX_SHOWN_CHARS]
