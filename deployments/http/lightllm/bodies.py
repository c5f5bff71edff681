"""Bodies of LightLLM's /generate, /generate_stream and /tokens."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from remora.deployments.http.core.body_limits import check_size
from remora.deployments.http.core.fields import (
    AllowedIds,
    Body,
    Count,
    Label,
    NumOutputs,
    SamplingBody,
    Seed,
    fault,
    is_token_list,
    only,
    parse_with_parameters,
)


def _check_stops(value: Any) -> list[str] | list[int] | None:
    """Return texts, or the token ids of single-id lists."""
    if value is None:
        return None
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise fault("must be a text, or a list of texts or lists of ids")
    check_size("max_stops", stops)
    if all(isinstance(stop, str) and stop for stop in stops):
        for stop in stops:
            check_size("max_stop_chars", stop)
        return stops
    if all(is_token_list(stop) and len(stop) == 1 for stop in stops):
        return [stop[0] for stop in stops]
    raise fault("must hold texts of at least one character, or lists of one token id")


class LightParameters(SamplingBody):
    """`parameters`."""

    max_new_tokens: Annotated[Count, Field(ge=1)] | None = None
    min_new_tokens: Count | None = None
    do_sample: bool | None = None
    # Checked here, since greedy decoding ignores it.
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    seed: Seed | None = None
    best_of: NumOutputs | None = None
    do_beam: bool | None = None
    do_beam_search: bool | None = None
    stop_sequences: Annotated[
        list[str] | list[int] | None,
        PlainValidator(_check_stops),
        WithJsonSchema({"type": ["string", "array"]}),
    ] = None
    add_special_tokens: bool | None = None
    add_spaces_between_special_tokens: bool | None = None
    print_eos_token: Annotated[Any, only(False)] = None
    no_stop_trim: Annotated[Any, only(True)] = None
    return_details: bool | None = None
    allowed_token_ids: AllowedIds | None = None
    regular_constraint: str | None = None
    guided_grammar: str | None = None
    guided_json: Annotated[Any, WithJsonSchema({"type": ["object", "string"]})] = None
    # Fields of LightLLM's multi-machine operation, and a penalty that only LightLLM has.
    exponential_decay_length_penalty: Annotated[Any, only([1, 1.0], [1, 1])] = None
    input_penalty: Annotated[Any, only(False)] = None
    group_request_id: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    move_kv_to_decode_node: Annotated[Any, only()] = None
    suggested_dp_index: Annotated[Any, only(-1)] = None
    disable_prompt_cache: Annotated[Any, only(False)] = None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.n is not None and self.n > (self.best_of or self.n):
            raise fault("must not be greater than best_of", param="n")
        if self.stop is not None and self.stop_sequences is not None:
            raise fault("cannot be combined with stop_sequences; send one of them", param="stop")
        return self

    @property
    def num_drawn(self) -> int:
        """The number of sequences to generate; those of a beam search are all in the response."""
        if self.is_beam_search:
            return self.n or 1
        return self.best_of or self.n or 1

    @property
    def is_beam_search(self) -> bool:
        """Whether the request asks for beam search, by any of its names."""
        return bool(self.do_beam or self.do_beam_search) or super().is_beam_search

    @property
    def num_shown(self) -> int:
        """The number of sequences in the response: the most likely ones."""
        return self.n or self.num_drawn


def _check_media(value: Any) -> Any:
    if value is not None and (not isinstance(value, dict) or any(value.values())):
        raise fault("must be empty: this model takes text only")
    return value


class LightBody(Body):
    """A prompt and its generation parameters."""

    inputs: str
    parameters: LightParameters = Field(default_factory=LightParameters)
    multimodal_params: Annotated[
        Any, PlainValidator(_check_media), WithJsonSchema({"type": "object"})
    ] = None
    model: Annotated[str, Field(max_length=1024)] | None = None
    rid: Label | None = None
    stream: bool = False


class TokensBody(Body):
    """Body of /tokens."""

    text: str
    parameters: dict[str, Any] | None = None
    multimodal_params: Annotated[
        Any, PlainValidator(_check_media), WithJsonSchema({"type": "object"})
    ] = None


def parse_light(body: Any, *, stream: bool | None = None) -> LightBody:
    """Validate a body.

    stream:  whether the path itself selects streaming; None = the body's field selects it

    Raises InvalidRequest.
    """
    return parse_with_parameters(LightBody, LightParameters, body, stream=stream)
