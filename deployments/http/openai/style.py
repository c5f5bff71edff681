"""What an answer of OpenAI's API contains besides its text, as the operator and the body say.

Shared by chats and text completions. Knows no replies.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from remora.deployments.http.core.fields import OpenAIBody
from remora.deployments.http.generation.replies import Reply
from remora.deployments.http.generation.server_state import ServerState
from remora.engine.types import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerStyle:
    """Settings of the answers to one request.

    fingerprint:     `system_fingerprint`; None = the answer has none
    tier:            `service_tier`; None = the answer has none
    null_fields:     whether optional fields are null instead of absent
    per_token:       whether a stream has a chunk for each token
    shows_usage:     whether a stream has a last chunk with the usage
    is_continuous:   whether each chunk of a stream has the usage so far
    shows_metrics:   whether the answer has `metrics`, the times of the request
    eos_ids:         the model's end-of-sequence tokens
    """

    fingerprint: str | None
    tier: str | None = None
    null_fields: bool = False
    per_token: bool = False
    shows_usage: bool = False
    is_continuous: bool = False
    shows_metrics: bool = False
    eos_ids: Collection[int] = ()

    @property
    def fields(self) -> dict[str, Any]:
        """The fields that each object of the answer has."""
        fields: dict[str, Any] = {}
        if self.fingerprint is not None:
            fields["system_fingerprint"] = self.fingerprint
        if self.tier is not None:
            fields["service_tier"] = self.tier
        return fields


def style_of(server: ServerState, body: OpenAIBody) -> AnswerStyle:
    """Return the style of the answers to a body."""
    api, options = server.config.api, body.stream_options
    is_continuous = api.stream_usage == "continuous"
    shows_usage = is_continuous or api.stream_usage == "final"
    if options is not None:
        shows_usage = shows_usage or bool(options.include_usage)
        is_continuous = is_continuous or bool(options.continuous_usage_stats)
    return AnswerStyle(
        fingerprint=_fingerprint(server),
        tier=None if body.service_tier is None else "default",
        null_fields=api.null_fields,
        per_token=api.chunk_per_token,
        shows_usage=shows_usage,
        is_continuous=shows_usage and is_continuous,
        shows_metrics=api.request_metrics,
        eos_ids=server.tokenizer.eos_token_ids,
    )


def _fingerprint(server: ServerState) -> str | None:
    text = server.config.api.system_fingerprint
    return {"auto": server.fingerprint, "none": None}.get(text, text)


def matched_stop(style: AnswerStyle, reply: Reply) -> str | int | None:
    """Return what ended a reply, as SGLang has it: a stop text, or a token's id."""
    if reply.finish_reason is not FinishReason.STOP or reply.stop_reason is not None:
        return reply.stop_reason
    last = reply.token_ids[-1] if reply.token_ids else None
    return last if last in style.eos_ids else None  # None: a completed grammar ended it


def shown_states(reply: Reply, num_prompt: int) -> list[Any]:
    """Return the hidden state of the last token that has one, as SGLang has it.

    num_prompt:  tokens of the prompt; empty if the output has one token, which has no state
    """
    states = reply.hidden_states
    if states is None or len(states) <= num_prompt:
        return []
    last: list[Any] = states[-1].tolist()
    return last
