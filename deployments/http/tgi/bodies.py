"""Bodies of TGI's /generate, /generate_stream and /."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, WithJsonSchema, model_validator

from remora.deployments.http.core.fields import (
    Body,
    Count,
    NumOutputs,
    SamplingBody,
    Seed,
    fault,
    only,
    parse_with_parameters,
)

MAX_TOP_TOKENS = 5


class TgiGrammar(Body):
    """A constraint: a regex, or a JSON schema as an object, as text, or with a name."""

    type: Literal["json", "json_object", "json_schema", "regex"]
    value: Annotated[Any, WithJsonSchema({"type": ["object", "string"]})]


class TgiParameters(SamplingBody):
    """`parameters`."""

    max_new_tokens: Annotated[Count, Field(ge=1)] | None = None
    do_sample: bool | None = None
    seed: Seed | None = None
    best_of: NumOutputs | None = None
    truncate: Annotated[Count, Field(ge=1)] | None = None
    return_full_text: bool | None = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    top_n_tokens: Annotated[int, Field(ge=0, le=MAX_TOP_TOKENS)] | None = None
    # The name of an adapter.
    adapter_id: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    watermark: Annotated[Any, only(False)] = None
    # TGI returns one sequence and includes the stop sequence.
    n: Annotated[Any, only(1)] = None
    no_stop_trim: Annotated[Any, only(True)] = None
    grammar: TgiGrammar | None = None

    @model_validator(mode="after")
    def _check_best_of(self) -> Self:
        if (self.best_of or 1) == 1:
            return self
        if not self.samples:
            raise fault("needs sampling: set do_sample or temperature", param="best_of")
        if self.seed is not None:
            raise fault("cannot be combined with best_of", param="seed")
        return self

    @property
    def samples(self) -> bool:
        """Whether to sample: set by `do_sample`, or implied by a sampling parameter."""
        if self.temperature == 0:
            return False
        shapes = (
            self.temperature not in (None, 1),
            self.top_p not in (None, 1),
            self.typical_p not in (None, 1),
            self.top_k,
        )
        return bool(self.do_sample) or any(shapes)


class TgiBody(Body):
    """A prompt and its generation parameters."""

    inputs: str
    parameters: TgiParameters = Field(default_factory=TgiParameters)
    stream: bool | None = None
    model: Annotated[str, Field(max_length=1024)] | None = None


def parse_tgi(body: Any, *, stream: bool | None = None) -> TgiBody:
    """Validate a body.

    stream:  whether the path itself selects streaming; None = the body's field selects it

    Raises InvalidRequest.
    """
    return parse_with_parameters(TgiBody, TgiParameters, body, stream=stream)
