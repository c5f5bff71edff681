"""Fields of pooling bodies: inputs, conversations, and what each kind of body may ask for.

Fields of peers that another route has are declared here too, so that a body that asks for them is
refused by name instead of answered as if it had not. Does not know the model.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema, model_validator

from remora.deployments.http.core.body_limits import AtMost
from remora.deployments.http.core.fields import (
    Body,
    Label,
    fault,
    unsupported_part,
)
from remora.deployments.http.generation.bodies import Inputs, TemplateKwargs

MAX_ROW_TOKENS = 2**31 - 1


def elsewhere(*harmless: Any) -> PlainValidator:
    """Return a validator for a field of other routes, which takes values without effect only."""

    def check(value: Any) -> Any:
        if value is not None and not any(type(value) is type(v) and value == v for v in harmless):
            but = f", unless it is {json.dumps(harmless[0])}" if harmless else ""
            raise unsupported_part(f"this route has no use for it{but}; leave it out")
        return value

    return PlainValidator(check)


Texts = Annotated[
    list[Annotated[str, Field(max_length=2**24)]],
    Field(min_length=1, fail_fast=True),
    AtMost("max_inputs"),
]
Dimensions = Annotated[int, Field(ge=1, le=2**20)]
EncodingFormat = Literal["float", "base64", "bytes", "bytes_only"]
EmbedDtype = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
Endianness = Literal["native", "big", "little"]
TokenLimit = Annotated[int, Field(ge=1, le=MAX_ROW_TOKENS)]


def _as_plain_text(value: Any) -> Any:
    """Return the content of a message as one text; its parts must be texts."""
    if not isinstance(value, list):
        return value
    for part in value:
        if not (isinstance(part, dict) and part.get("type", "text") in ("text", "input_text")):
            raise unsupported_part("only parts of the type text can be embedded or scored")
        if not isinstance(part.get("text"), str):
            raise fault("must hold parts with a text")
    return "".join(part["text"] for part in value)


class ChatMessage(Body):
    """One message of a conversation to score or embed; its content is text or text parts."""

    role: Label
    content: Annotated[
        str, BeforeValidator(_as_plain_text), WithJsonSchema({"type": ["string", "array"]})
    ]


Conversation = Annotated[list[ChatMessage], Field(min_length=1), AtMost("max_messages")]


class PoolingBaseBody(Body):
    """Fields that the bodies of all pooling routes share.

    add_special_tokens:  whether the tokenizer frames texts; default: texts yes, conversations no
    use_activation:      false = raw logits, or vectors that are not normalized
    cache_salt:          without effect: pooling models have no prefix cache
    """

    model: Annotated[str, Field(max_length=1024)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MAX_ROW_TOKENS)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    use_activation: bool | None = None
    cache_salt: Label | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    rid: Label | None = None
    request_id: Label | None = None
    user: str | None = None
    # Of other routes:
    encoding_format: Annotated[Any, elsewhere("float")] = None
    embed_dtype: Annotated[Any, elsewhere("float32")] = None
    endianness: Annotated[Any, elsewhere("native")] = None
    dimensions: Annotated[Any, elsewhere()] = None
    normalize: Annotated[Any, elsewhere()] = None
    max_tokens_per_doc: Annotated[Any, elsewhere()] = None
    max_tokens_per_query: Annotated[Any, elsewhere()] = None
    add_generation_prompt: Annotated[Any, elsewhere(False)] = None
    continue_final_message: Annotated[Any, elsewhere(False)] = None
    chat_template_kwargs: Annotated[Any, elsewhere({})] = None


class ConversationBody(PoolingBaseBody):
    """A body with inputs, or with a conversation that the model's template renders."""

    input: Inputs | None = None
    messages: Conversation | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateKwargs = None

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if (self.input is None) == (self.messages is None):
            raise fault("is required, or messages in its place; not both", param="input")
        for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
            if self.messages is None and getattr(self, name):
                raise fault("needs messages", param=name)
        if self.add_generation_prompt and self.continue_final_message:
            raise fault(
                "cannot be true together with add_generation_prompt", param="continue_final_message"
            )
        return self


class VectorBody(ConversationBody):
    """A body whose answer holds arrays of numbers, in a form that it chooses."""

    encoding_format: EncodingFormat | None = None
    embed_dtype: EmbedDtype | None = None
    endianness: Endianness | None = None
    dimensions: Dimensions | None = None
    normalize: bool | None = None

    @model_validator(mode="after")
    def _check_form(self) -> Self:
        if (self.encoding_format or "float") == "float":
            for name, usual in (("embed_dtype", "float32"), ("endianness", "native")):
                if getattr(self, name) not in (None, usual):
                    raise fault(
                        "needs an encoding_format of base64, bytes or bytes_only", param=name
                    )
        given = {self.normalize, self.use_activation} - {None}
        if len(given) > 1:
            raise fault("contradicts normalize; leave one of them out", param="use_activation")
        return self

    @property
    def normalizes(self) -> bool | None:
        """Whether vectors get length 1; None = as the model does."""
        return self.use_activation if self.normalize is None else self.normalize


class PairBody(PoolingBaseBody):
    """A body of queries and documents.

    max_tokens_per_query, max_tokens_per_doc:  longer texts lose their ends before they are paired
    instruction:                               of the model's pair template
    """

    max_tokens_per_query: TokenLimit | None = None
    max_tokens_per_doc: TokenLimit | None = None
    instruction: str | None = None
