"""Lengths of prompts in Ollama's bodies: `options.num_ctx`, `truncate`, and `context`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from remora.configs.errors import PromptTooLong
from remora.deployments.http.core.errors import unsupported
from remora.deployments.http.generation.prompts import encode
from remora.deployments.http.generation.sampling import check_vocabulary
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.http.ollama.bodies import OllamaBody
from remora.engine.types import Request, SamplingParams


def within(
    server: ServerState, body: OllamaBody, request: Request, before: Sequence[int] = ()
) -> Request:
    """Return the request after earlier tokens, with its output limited to the rest of `num_ctx`.

    before:  `context` of an earlier answer

    Raises InvalidRequest and PromptTooLong.
    """
    check_vocabulary(before, server.tokenizer.vocab_size, "context")
    sampling = request.sampling
    _check_penalties(server, body, sampling)
    ids = _joined(server, before, request.prompt_ids)
    limit = min(body.num_ctx or server.plan.max_sequence_tokens, server.plan.max_sequence_tokens)
    if len(ids) >= limit:
        raise too_long(len(ids), limit, "the prompt", "prompt")
    room = limit - len(ids)
    if before or body.num_ctx:
        wanted = sampling.max_tokens
        sampling = replace(sampling, max_tokens=room if wanted is None else min(wanted, room))
    return replace(request, prompt_ids=ids, sampling=sampling)


def _joined(server: ServerState, before: Sequence[int], ids: Sequence[int]) -> list[int]:
    """Join ids; the tokens with which texts begin are not repeated."""
    start = server.tokenizer.encode("", add_special_tokens=True) if before else []
    has_start = start and list(ids[: len(start)]) == start
    return [*before, *ids[len(start) if has_start else 0 :]]


def _check_penalties(server: ServerState, body: OllamaBody, sampling: SamplingParams) -> None:
    """Raise InvalidRequest for a window of penalties, which cover the whole text here."""
    window = body.options.repeat_last_n if body.options else None
    penalties = (sampling.presence_penalty, sampling.frequency_penalty)
    has_penalty = sampling.repetition_penalty != 1.0 or any(penalties)
    if has_penalty and window is not None and 0 < window < server.plan.max_sequence_tokens:
        name = "options.repeat_last_n"
        raise unsupported(
            name,
            f"{name} is {window}; penalties cover the whole text here. Send -1 for that, or 0 for "
            "no penalties.",
        )


async def check_whole(
    server: ServerState, body: OllamaBody, text: str, request: Request, *, special: bool
) -> None:
    """Raise PromptTooLong if a prompt was truncated although `truncate` is false.

    text:     the prompt
    special:  whether its tokens include those with which a plain text begins
    """
    if body.truncate is not False or server.config.api.prompt_truncation == "none":
        return
    (ids,) = await encode(server, [text], add_special_tokens=special, param="prompt")
    kept = len(request.prompt_ids)
    if len(ids) > kept:
        raise too_long(len(ids), kept, "the prompt", "prompt")


def too_long(found: int, limit: int, what: str, param: str) -> PromptTooLong:
    """Return the error for a text that is longer than the context of its request."""
    return PromptTooLong(
        f"This request's context length is {limit} tokens, and {what} has {found}. Send less text, "
        "or a greater options.num_ctx.",
        param,
    )


async def check_lengths(server: ServerState, texts: Any, limit: int) -> None:
    """Raise PromptTooLong if one of the texts to embed is longer than `limit` tokens."""
    given = [texts] if isinstance(texts, str) else texts
    for ids in await encode(server, given, add_special_tokens=True, param="input"):
        if len(ids) > limit:
            raise too_long(len(ids), limit, "an entry of input", "input")
