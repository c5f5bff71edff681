"""Bodies of text-embeddings-inference: /embed, /embed_all, /predict, /rerank and /similarity."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, WithJsonSchema

from remora.deployments.http.core.body_limits import AtMost, check_size
from remora.deployments.http.core.fields import (
    Body,
    Label,
    fault,
    unsupported_part,
)
from remora.deployments.http.generation.bodies import Inputs

Direction = Literal["Left", "Right", "left", "right"]
Sentences = Annotated[list[str], Field(min_length=1, fail_fast=True), AtMost("max_inputs")]


def _check_predicted(value: Any) -> list[str] | str:
    """Return one text, or the texts of a batch, each of which is sent in a list."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise fault("must be a text, or a list of lists of one text")
    if all(isinstance(item, str) for item in value):
        if len(value) == 1:
            return str(value[0])
        raise _pair()
    check_size("max_inputs", value)
    for item in value:
        if not isinstance(item, list) or not all(isinstance(text, str) for text in item):
            raise fault("must be a text, or a list of lists of one text")
        if len(item) != 1:
            raise _pair()
    return [item[0] for item in value]


def _pair() -> Exception:
    return unsupported_part(
        "pairs of texts cannot be classified here; send them to /rerank or /v1/score"
    )


def _no_prompt(value: Any) -> None:
    if value is not None:
        raise unsupported_part("sentences get the prompts of queries and documents; leave it out")


class TeiBody(Body):
    """Fields that all bodies share.

    truncate:  whether texts that are too long are cut instead of refused
    """

    truncate: bool | None = None
    truncation_direction: Direction | None = None

    @property
    def cut(self) -> dict[str, Any]:
        """The same in terms of OpenAI's routes."""
        if not self.truncate:
            return {}
        side = (self.truncation_direction or "right").lower()
        return {"truncate_prompt_tokens": -1, "truncation_side": side}


class TeiEmbedBody(TeiBody):
    """Body of /embed and /embed_all."""

    inputs: Inputs
    normalize: bool | None = None
    prompt_name: Label | None = None
    dimensions: Annotated[int, Field(ge=1, le=2**20)] | None = None


class TeiPredictBody(TeiBody):
    """Body of /predict."""

    inputs: Annotated[
        list[str] | str,
        PlainValidator(_check_predicted),
        WithJsonSchema({"type": ["string", "array"]}),
    ]
    raw_scores: bool | None = None


class TeiRerankBody(TeiBody):
    """Body of /rerank."""

    query: str
    texts: Sentences
    raw_scores: bool | None = None
    return_text: bool | None = None


class TeiSource(Body):
    """A sentence, and the sentences that it is compared with."""

    source_sentence: str
    sentences: Sentences


class TeiSimilarityParameters(TeiBody):
    """Parameters of /similarity."""

    prompt_name: Annotated[Any, PlainValidator(_no_prompt)] = None


class TeiSimilarityBody(Body):
    """Body of /similarity."""

    inputs: TeiSource
    parameters: TeiSimilarityParameters | None = None
