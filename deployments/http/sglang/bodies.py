"""Body of SGLang's /generate: one or several prompts, with shared or per-prompt options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self, TypeVar

from pydantic import Field, PlainValidator, WithJsonSchema, model_validator
from pydantic.json_schema import SkipJsonSchema

from remora.configs.errors import InvalidRequest
from remora.deployments.http.core.body_limits import check_size, limit, over
from remora.deployments.http.core.errors import unsupported
from remora.deployments.http.core.fields import (
    Body,
    Count,
    Label,
    SamplingBody,
    Seed,
    TaskId,
    fault,
    is_token_list,
    parse,
)
from remora.deployments.http.generation.bodies import PromptInput, check_prompt
from remora.deployments.http.prompt_embeddings.prompts import SentEmbeddings, check_rows_sent
from remora.engine.types import MAX_LOGPROBS

MAX_STREAM_INTERVAL = 4096
_PROMPTS = ("text", "input_ids", "input_embeds")
PROMPT_FIELDS = frozenset(_PROMPTS)
_MAX_LOGPROB_START = 2**31 - 1

ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True)
class Given:
    """Prompts of a request. `is_list`: they were sent as a list, so the response is a list."""

    prompts: list[PromptInput]
    is_list: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """Options of one prompt.

    rid:                id of the prompt; None = derived from the request's id
    adapter:            adapter of the prompt; None = the request's `model`
    logprob_start_len:  first prompt position with log-probabilities; -1 = none
    token_ids_logprob:  tokens whose log-probabilities are returned at each position
    """

    rid: str | None
    sampling: NativeSampling
    return_logprob: bool
    logprob_start_len: int
    top_logprobs_num: int
    token_ids_logprob: tuple[int, ...]
    adapter: str | None


def _check_text(value: Any) -> Given | None:
    if value is None:
        return None
    if isinstance(value, str):
        return Given([value], is_list=False)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return Given(check_prompt(value), is_list=True)
    raise fault("must be a text or a list of texts")


def _check_ids(value: Any) -> Given | None:
    if value is None:
        return None
    if is_token_list(value):
        return Given([value], is_list=False)
    if isinstance(value, list) and all(map(is_token_list, value)):
        return Given(check_prompt(value), is_list=True)
    raise fault("must be a list of token ids or a list of such lists")


def _check_names(value: Any) -> str | list[str | None] | None:
    names = value if isinstance(value, list) else [value]
    check_size("max_prompts", names)
    if not all(name is None or (isinstance(name, str) and 1 <= len(name) <= 256) for name in names):
        raise fault("must be a text of 1 to 256 characters, or a list of such texts")
    checked: str | list[str | None] | None = value
    return checked


def _check_flags(value: Any) -> bool | list[bool | None] | None:
    flags = value if isinstance(value, list) else [value]
    check_size("max_prompts", flags)
    if not all(flag is None or type(flag) is bool for flag in flags):
        raise fault("must be true or false, or a list of these")
    checked: bool | list[bool | None] | None = value
    return checked


def _check_ints(value: Any, low: int, high: int) -> int | list[int | None] | None:
    numbers = value if isinstance(value, list) else [value]
    check_size("max_prompts", numbers)
    if not all(
        number is None or (type(number) is int and low <= number <= high) for number in numbers
    ):
        raise fault(f"must be a whole number from {low} to {high}, or a list of these")
    checked: int | list[int | None] | None = value
    return checked


def _check_start(value: Any) -> int | list[int | None] | None:
    return _check_ints(value, -1, _MAX_LOGPROB_START)


def _check_top(value: Any) -> int | list[int | None] | None:
    for number in value if isinstance(value, list) else [value]:
        if type(number) is int and number > limit("max_top_logprobs"):
            raise over("max_top_logprobs", number)
    return _check_ints(value, 0, limit("max_top_logprobs"))


def _check_asked(value: Any) -> list[list[int]] | None:
    """Return the ids of each prompt, or one list for all prompts."""
    if value is None:
        return None
    lists = [value] if is_token_list(value) else value
    if not isinstance(lists, list) or not all(ids is None or is_token_list(ids) for ids in lists):
        raise fault("must be a list of token ids, or a list of such lists")
    check_size("max_prompts", lists)
    longest = max((len(ids) for ids in lists if ids is not None), default=0)
    if longest > MAX_LOGPROBS:
        raise fault(f"has {longest} ids; at most {MAX_LOGPROBS} are allowed")
    return [ids or [] for ids in lists]


_LISTS = ("rid", "return_logprob", "logprob_start_len", "top_logprobs_num", "lora_path")
Ints = int | list[int | None] | None
_INTS = WithJsonSchema({"type": ["integer", "array"]})


class NativeSampling(SamplingBody):
    """`sampling_params` of /generate."""

    max_new_tokens: Count | None = None
    min_new_tokens: Count | None = None
    sampling_seed: Seed | None = None
    stream_interval: Annotated[int, Field(ge=1, le=MAX_STREAM_INTERVAL)] | None = None
    json_schema: Annotated[Any, WithJsonSchema({"type": ["string", "object"]})] = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: Annotated[Any, WithJsonSchema({"type": ["string", "object"]})] = None


class GenerateBody(Body):
    """Body of /generate."""

    text: Annotated[
        Given | None, PlainValidator(_check_text), WithJsonSchema({"type": "string"})
    ] = None
    input_ids: Annotated[
        Given | None, PlainValidator(_check_ids), WithJsonSchema({"type": "array"})
    ] = None
    # Omitted from the schema, because it is off unless the operator turns it on.
    input_embeds: Annotated[
        SentEmbeddings | None, PlainValidator(check_rows_sent), SkipJsonSchema()
    ] = None
    sampling_params: Annotated[
        list[NativeSampling], WithJsonSchema({"type": ["object", "array"]})
    ] = Field(default_factory=list)
    model: Annotated[str, Field(max_length=1024)] | None = None
    rid: Annotated[
        str | list[str | None] | None,
        PlainValidator(_check_names),
        WithJsonSchema({"type": ["string", "array"]}),
    ] = None
    return_logprob: Annotated[
        bool | list[bool | None] | None,
        PlainValidator(_check_flags),
        WithJsonSchema({"type": ["boolean", "array"]}),
    ] = None
    logprob_start_len: Annotated[Ints, PlainValidator(_check_start), _INTS] = None
    top_logprobs_num: Annotated[Ints, PlainValidator(_check_top), _INTS] = None
    token_ids_logprob: Annotated[
        list[list[int]] | None,
        PlainValidator(_check_asked),
        WithJsonSchema({"type": "array"}),
    ] = None
    lora_path: Annotated[
        str | list[str | None] | None,
        PlainValidator(_check_names),
        WithJsonSchema({"type": ["string", "array"]}),
    ] = None
    return_text_in_logprobs: bool | None = None
    stream: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Label | None = None
    task_id: TaskId | None = None
    custom_logit_processor: Label | None = None
    return_hidden_states: bool | None = None
    log_metrics: bool | None = None

    @model_validator(mode="after")
    def _check_input(self) -> Self:
        given = [name for name in _PROMPTS if getattr(self, name) is not None]
        if not given:
            raise fault("is required unless input_ids or input_embeds is given", param="text")
        if len(given) > 1:
            named, other = given[:2] if self.input_embeds is None else given[:-3:-1]
            raise fault(f"cannot be combined with {other}; send one of them", param=named)
        return self

    @property
    def given(self) -> tuple[Given | SentEmbeddings, str]:
        """The prompts, and the name of the field that holds them."""
        if self.text is not None:
            return self.text, "text"
        if self.input_ids is not None:
            return self.input_ids, "input_ids"
        assert self.input_embeds is not None  # `_check_input` guarantees it
        return self.input_embeds, "input_embeds"

    @property
    def names(self) -> tuple[str, ...]:
        """The names that the caller gave to the request or its prompts."""
        given = self.rid if isinstance(self.rid, list) else [self.rid]
        return tuple(name for name in given if name is not None)

    @property
    def num_prompts(self) -> int:
        """The number of prompts."""
        return len(self.given[0].prompts)

    @property
    def options(self) -> list[PromptOptions]:
        """The options of each prompt. `parse_generate` has checked the lengths of the lists."""
        rids = self.rid if isinstance(self.rid, list) else [None]
        columns = (
            rids,
            self.sampling_params or [NativeSampling()],
            _as_list(self.return_logprob),
            _as_list(self.logprob_start_len),
            _as_list(self.top_logprobs_num),
            self.token_ids_logprob or [[]],
            _as_list(self.lora_path),
        )
        rows = zip(*(_each(column, self.num_prompts) for column in columns), strict=True)
        return [
            PromptOptions(
                rid=rid,
                sampling=self._with_processor(sampling),
                return_logprob=bool(flag),
                logprob_start_len=-1 if start is None else start,
                top_logprobs_num=top or 0,
                token_ids_logprob=tuple(asked) if flag else (),
                adapter=adapter,
            )
            for rid, sampling, flag, start, top, asked, adapter in rows
        ]

    def _with_processor(self, sampling: NativeSampling) -> NativeSampling:
        """Apply the request's logit processor to a prompt that does not name its own."""
        name = self.custom_logit_processor
        if name is None or sampling.custom_logit_processor is not None:
            return sampling
        return sampling.model_copy(update={"custom_logit_processor": name})


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _each(values: Sequence[ValueT], num: int) -> Sequence[ValueT]:
    return values if len(values) == num else [values[0]] * num


def parse_generate(body: Any) -> GenerateBody:
    """Validate a body of /generate; `sampling_params` becomes a list of one, or one per prompt.

    Raises InvalidRequest.
    """
    _refuse_old_dialect(body)
    if not isinstance(body, dict):
        return parse(GenerateBody, body)
    outer = {name: value for name, value in body.items() if name != "sampling_params"}
    parsed = parse(GenerateBody, outer)
    given = body.get("sampling_params")
    sampling = [
        parse(NativeSampling, {} if entry is None else entry, prefix="sampling_params.")
        for entry in _as_list(given)[: limit("max_prompts")]
    ]
    for name in _LISTS:
        _check_length(name, getattr(parsed, name), parsed.num_prompts)
    if parsed.token_ids_logprob is not None and len(parsed.token_ids_logprob) > 1:
        _check_length("token_ids_logprob", parsed.token_ids_logprob, parsed.num_prompts)
    if any(parsed.token_ids_logprob or ()) and not any(_as_list(parsed.return_logprob)):
        message = "token_ids_logprob needs return_logprob, which is not set."
        raise InvalidRequest(message, "token_ids_logprob")
    _check_length("sampling_params", given, parsed.num_prompts)
    return parsed.model_copy(update={"sampling_params": sampling})


def _check_length(name: str, values: Any, num_prompts: int) -> None:
    if isinstance(values, list) and len(values) != num_prompts:
        message = f"{name} holds {len(values)} entries for {num_prompts} prompts."
        raise InvalidRequest(message, name)


def _refuse_old_dialect(body: Any) -> None:
    if isinstance(body, dict) and "prompt" in body and not PROMPT_FIELDS & body.keys():
        message = (
            "prompt belongs to the /generate of an old vLLM, which is not served; send text or "
            "input_ids, or use /v1/completions."
        )
        raise unsupported("prompt", message)
