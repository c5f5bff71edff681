"""Body of /generate in SGLang's shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from remora.configs.errors import InvalidRequest
from remora.deployments.http.errors import unsupported
from remora.deployments.http.fields import (
    MAX_PROMPTS,
    MAX_TOP_LOGPROBS,
    Body,
    Count,
    Label,
    SamplingBody,
    Seed,
    fault,
    is_token_list,
    parse,
)
from remora.deployments.http.openai_bodies import PromptInput, check_prompt


@dataclass(frozen=True, slots=True)
class Given:
    """Prompts of a call. `is_list`: whether they came as a list, so that the answer is one."""

    prompts: list[PromptInput]
    is_list: bool


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


def _check_rid(value: Any) -> str | list[str | None] | None:
    names = value if isinstance(value, list) else [value]
    if len(names) > MAX_PROMPTS or not all(
        name is None or (isinstance(name, str) and 1 <= len(name) <= 256) for name in names
    ):
        raise fault("must be a text of 1 to 256 characters, or a list of such texts")
    checked: str | list[str | None] | None = value
    return checked


class NativeSampling(SamplingBody):
    """`sampling_params` of /generate."""

    max_new_tokens: Count | None = None
    min_new_tokens: Count | None = None
    sampling_seed: Seed | None = None


class GenerateBody(Body):
    """Body of /generate."""

    text: Annotated[
        Given | None, PlainValidator(_check_text), WithJsonSchema({"type": "string"})
    ] = None
    input_ids: Annotated[
        Given | None, PlainValidator(_check_ids), WithJsonSchema({"type": "array"})
    ] = None
    sampling_params: Annotated[
        list[NativeSampling], WithJsonSchema({"type": ["object", "array"]})
    ] = Field(default_factory=list)
    model: Annotated[str, Field(max_length=1024)] | None = None
    rid: Annotated[
        str | list[str | None] | None,
        PlainValidator(_check_rid),
        WithJsonSchema({"type": "string"}),
    ] = None
    return_logprob: bool | None = None
    logprob_start_len: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    top_logprobs_num: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    return_text_in_logprobs: bool | None = None
    stream: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Label | None = None
    log_metrics: bool | None = None

    @model_validator(mode="after")
    def _check_input(self) -> Self:
        if self.text is None and self.input_ids is None:
            raise fault("is required unless input_ids is given", param="text")
        if self.text is not None and self.input_ids is not None:
            raise fault("cannot be combined with input_ids; send one of them", param="text")
        return self

    @property
    def given(self) -> tuple[Given, str]:
        """The prompts, and the name of the field that holds them."""
        if self.text is not None:
            return self.text, "text"
        assert self.input_ids is not None  # `_check_input` has seen to it
        return self.input_ids, "input_ids"

    @property
    def num_prompts(self) -> int:
        """How many prompts there are."""
        return len(self.given[0].prompts)


_OTHER_DIALECTS = {"inputs": "TGI or LightLLM", "prompt": "an old vLLM"}


def parse_generate(body: Any) -> GenerateBody:
    """Validate a body of /generate.

    Its `sampling_params` become a list, one for all or one each, and its `rid` becomes one name.
    Raises InvalidRequest.
    """
    _refuse_other_dialects(body)
    if not isinstance(body, dict):
        return parse(GenerateBody, body)
    outer = {name: value for name, value in body.items() if name != "sampling_params"}
    parsed = parse(GenerateBody, outer)
    given = body.get("sampling_params")
    entries = given if isinstance(given, list) else [given]
    sampling = [
        parse(NativeSampling, {} if entry is None else entry, prefix="sampling_params.")
        for entry in entries[:MAX_PROMPTS]
    ]
    if isinstance(given, list) and len(given) != parsed.num_prompts:
        message = f"sampling_params holds {len(given)} entries for {parsed.num_prompts} prompts."
        raise InvalidRequest(message, "sampling_params")
    return parsed.model_copy(update={"sampling_params": sampling, "rid": _name(parsed)})


def _name(body: GenerateBody) -> str | None:
    """Return the name of the whole call. Raises InvalidRequest."""
    if not isinstance(body.rid, list):
        return body.rid
    if len(body.rid) != body.num_prompts:
        message = f"rid holds {len(body.rid)} names for {body.num_prompts} prompts."
        raise InvalidRequest(message, "rid")
    if len(body.rid) > 1 and any(name is not None for name in body.rid):
        message = (
            "A call has one name here, under which all of it is aborted; send rid as a text, "
            "or the prompts one by one."
        )
        raise unsupported("rid", message)
    return body.rid[0]


def _refuse_other_dialects(body: Any) -> None:
    if not isinstance(body, dict) or "text" in body or "input_ids" in body:
        return
    for name, who in _OTHER_DIALECTS.items():
        if name in body:
            message = (
                f"{name} belongs to the /generate of {who}, which is not served; "
                "send text or input_ids, or use /v1/completions."
            )
            raise unsupported(name, message)
