"""Bodies of RTP-LLM's / and /batch_infer: prompts, and the fields of `generate_config`.

The fields of `generate_config` may stand in the body itself, too, where they take precedence.
"""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from remora.configs.errors import InvalidRequest
from remora.deployments.http.core.body_limits import check_size
from remora.deployments.http.core.errors import unsupported
from remora.deployments.http.core.fields import Body, Label, Params, fault, parse
from remora.deployments.http.rtp_llm.generate_config import (
    ALIASES,
    SERVED_AS,
    RtpConfig,
    off,
)

# Name of the object with the sampling fields, and another name of it.
CONFIG_NAMES = ("generate_config", "generation_config")
# The prompt under any of its names; a body with one of these, and without `inputs`, is RTP-LLM's.
PROMPT_NAMES = ("prompt", "prompt_batch", "text")


class RtpBody(RtpConfig):
    """Body of /: one prompt or several, and fields of `generate_config`."""

    prompt: str | None = None
    text: str | None = None
    prompt_batch: list[str] | None = None
    generate_config: RtpConfig | None = None
    generation_config: RtpConfig | None = None
    model: Annotated[str, Field(max_length=1024)] | None = None
    stream: bool | None = None
    rid: Label | None = None
    images: Annotated[Any, off([], instead="send text")] = None
    urls: Annotated[Any, off([], instead="send text")] = None
    functions: Annotated[Any, off([], instead="send text")] = None
    # Names of the client, without effect.
    source: str | None = None
    private_request: bool | None = None
    master_info: Params = None

    @model_validator(mode="after")
    def _check_prompts(self) -> Self:
        given = [name for name in PROMPT_NAMES if getattr(self, name) is not None]
        if not given:
            raise fault("is required, or prompt_batch with several prompts", param="prompt")
        if len(given) > 1:
            raise fault(f"cannot be combined with {given[0]}; send one of them", param=given[1])
        if self.prompt_batch is not None:
            check_size("max_prompts", self.prompt_batch)
            if not self.prompt_batch:
                raise fault("is empty; at least one prompt is needed", param="prompt_batch")
        return self

    @property
    def prompts(self) -> list[str]:
        """The prompts."""
        if self.prompt_batch is not None:
            return self.prompt_batch
        return [self.prompt if self.prompt is not None else self.text or ""]

    @property
    def prompt_name(self) -> str:
        """The name of the prompts' field."""
        return next(name for name in PROMPT_NAMES if getattr(self, name) is not None)

    @property
    def streams(self) -> bool:
        """Whether the response is streamed."""
        return bool(self.stream or self.config.yield_generator)

    @property
    def is_batch(self) -> bool:
        """Whether the answers are in a list, one for each prompt."""
        return self.prompt_batch is not None

    @property
    def config(self) -> RtpConfig:
        """The fields of `generate_config` from both places, under their first names."""
        inner = {} if self.inner is None else self.inner.given()
        return RtpConfig.model_construct(**{**inner, **self.given()})

    @property
    def inner(self) -> RtpConfig | None:
        """The object of sampling fields, under either of its names."""
        return self.generate_config or self.generation_config

    def sent_name(self, name: str) -> str:
        """Return the name in the body of a field, or of a parameter of the engine."""
        head = name.partition(".")[0].partition("[")[0]
        field, rest = SERVED_AS.get(head, head), name[len(head) :]
        if field == "num_return_sequences" and not self.config.is_list:
            field = "num_beams"
        others = [alias for alias, first in ALIASES.items() if first == field]
        if field == "return_hidden_states":
            others.append("return_all_hidden_states")
        for place, holder in (("", self), (self._place, self.inner)):
            for one in (field, *others):
                if getattr(holder, one, None) is not None:
                    return f"{place}{one}{rest}"
        return field + rest

    @property
    def _place(self) -> str:
        return f"{CONFIG_NAMES[self.generate_config is None]}."


class TokenizerEncodeBody(Body):
    """Body of /tokenizer/encode."""

    prompt: str
    return_offsets_mapping: bool | None = None
    model: Annotated[str, Field(max_length=1024)] | None = None


def is_rtp(body: Any) -> bool:
    """Return whether a body of / is RTP-LLM's; TGI's and LightLLM's have `inputs`."""
    return (
        isinstance(body, dict)
        and "inputs" not in body
        and any(name in body for name in PROMPT_NAMES)
    )


def parse_rtp(body: Any) -> RtpBody:
    """Validate a body of /. Raises InvalidRequest."""
    if not isinstance(body, dict):
        return parse(RtpBody, body)
    _check_prompt(body)
    given = [name for name in CONFIG_NAMES if body.get(name) is not None]
    if len(given) > 1:
        message = f"{given[1]} cannot be combined with {given[0]}; send one of them."
        raise InvalidRequest(message, given[1])
    outer = {name: value for name, value in body.items() if name not in CONFIG_NAMES}
    parsed = parse(RtpBody, outer)
    if not given:
        return parsed
    (name,) = given
    return parsed.model_copy(update={name: parse(RtpConfig, body[name], prefix=f"{name}.")})


def parse_rtp_batch(body: Any) -> RtpBody:
    """Validate a body of /batch_infer, which is answered whole. Raises InvalidRequest."""
    parsed = parse_rtp(body)
    if not parsed.is_batch:
        message = f"{parsed.prompt_name} belongs to /; send prompt_batch, a list of texts."
        raise InvalidRequest(message, parsed.prompt_name)
    if parsed.streams:
        name = "stream" if parsed.stream else parsed.sent_name("yield_generator")
        raise unsupported(name, f"{name}: /batch_infer does not stream; send the body to /.")
    return parsed


def _check_prompt(body: dict[str, Any]) -> None:
    """Raise InvalidRequest for prompts in a form that has another place."""
    prompt = body.get("prompt")
    has_messages = body.get("messages") is not None
    if has_messages or (isinstance(prompt, list) and prompt and isinstance(prompt[0], dict)):
        name = "messages" if has_messages else "prompt"
        message = f"{name}: send conversations to /v1/chat/completions; this path takes texts."
        raise unsupported(name, message)
    if isinstance(prompt, list):
        raise InvalidRequest("prompt must be a text; send a list as prompt_batch.", "prompt")
