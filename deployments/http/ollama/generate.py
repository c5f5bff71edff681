"""Ollama's /api/chat and /api/generate, as chats, or as completions without a chat template."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from remora.deployments.http.core.errors import unsupported
from remora.deployments.http.core.field_names import in_callers_words
from remora.deployments.http.core.fields import parse
from remora.deployments.http.generation.bodies import ChatBody, CompletionBody
from remora.deployments.http.generation.chat import prepare_chat
from remora.deployments.http.generation.completions import prepare_completion
from remora.deployments.http.generation.logprobs import LogprobWriter
from remora.deployments.http.generation.reasoning import EFFORT, EFFORT_OFF, SWITCHES
from remora.deployments.http.generation.replies import Replies
from remora.deployments.http.generation.request_context import RequestContext
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.http.ollama.answers import OllamaJob
from remora.deployments.http.ollama.bodies import (
    RENAMES,
    OllamaBody,
    OllamaChatBody,
    OllamaGenerateBody,
)
from remora.deployments.http.ollama.context import check_whole, within
from remora.engine.types import Request

_LATEST = ":latest"


async def check_name(server: ServerState, name: str | None) -> str:
    """Return the served model's name for a name with or without a tag. Raises UnknownModel."""
    if name is not None and name != server.plan.served_model_name:
        name = name.removesuffix(_LATEST)
    return (await server.model(name)).name


def _chat_fields(server: ServerState, body: OllamaBody, model: str) -> dict[str, Any]:
    fields = body.shared() | {"model": model}
    if body.logprobs:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    if isinstance(body.think, str):
        fields[EFFORT] = body.think
    elif body.think is not None:
        fields |= _thought(server, is_wanted=body.think)
    return fields


def _thought(server: ServerState, *, is_wanted: bool) -> dict[str, Any]:
    """Return the fields that enable or disable reasoning; none if the model always reasons."""
    if not is_wanted:
        return {EFFORT: EFFORT_OFF}
    known = server.tokenizer.template_variables
    if any(name in known for name in (EFFORT, *SWITCHES)):
        return {EFFORT: "medium"}
    if server.formats.reasoning_format_name is None:
        raise unsupported("think", f"{server.plan.served_model_name} does not support thinking.")
    return {}


async def _of_chat(
    server: ServerState,
    body: OllamaBody,
    context: RequestContext,
    fields: dict[str, Any],
    *,
    is_chat: bool,
) -> OllamaJob:
    with in_callers_words(RENAMES):
        chat = await prepare_chat(server, parse(ChatBody, fields), context)
    await check_whole(server, body, chat.prompt, chat.request, special=False)
    given = body.context if isinstance(body, OllamaGenerateBody) else None
    request = within(server, body, chat.request, given or ())
    job = _job(server, body, context, is_chat=is_chat, served_name=chat.model.name)
    return replace(job, requests=(request,), replies=chat.replies, shows_context=not is_chat)


def _job(
    server: ServerState,
    body: OllamaBody,
    context: RequestContext,
    *,
    is_chat: bool,
    served_name: str | None = None,
    requests: tuple[Request, ...] = (),
) -> OllamaJob:
    """Return the job of a body; without requests, it only loads or unloads the model."""
    return OllamaJob(
        context=context,
        requests=requests,
        streams=body.streams,
        body=body,
        model=body.model or served_name or server.plan.served_model_name,
        is_chat=is_chat,
        replies=Replies,
        logprobs=LogprobWriter(server.tokenizer),
        ready_ns=time.monotonic_ns(),
    )


async def prepare_ollama_chat(
    server: ServerState, body: OllamaChatBody, context: RequestContext
) -> OllamaJob:
    """Check everything that can be checked without the engine. Raises RequestError."""
    model = await check_name(server, body.model)
    if not body.messages:
        return _job(server, body, context, is_chat=True)
    fields = _chat_fields(server, body, model) | {
        "messages": [message.as_openai() for message in body.messages]
    }
    if body.tools:
        fields["tools"] = body.tools
    return await _of_chat(server, body, context, fields, is_chat=True)


async def prepare_ollama_generate(
    server: ServerState, body: OllamaGenerateBody, context: RequestContext
) -> OllamaJob:
    """Check everything that can be checked without the engine. Raises RequestError."""
    model = await check_name(server, body.model)
    if not body.prompt:
        return _job(server, body, context, is_chat=False)
    if body.raw or body.suffix:
        return await _of_text(server, body, context, model)
    messages = [{"role": "user", "content": body.prompt}]
    if body.system:
        messages.insert(0, {"role": "system", "content": body.system})
    fields = _chat_fields(server, body, model) | {"messages": messages}
    return await _of_chat(server, body, context, fields, is_chat=False)


async def _of_text(
    server: ServerState, body: OllamaGenerateBody, context: RequestContext, model: str
) -> OllamaJob:
    """Return the job of a raw prompt, or of a prompt with a suffix."""
    given = (("system", body.system), ("think", body.think), ("context", body.context))
    for name, value in given:
        if value:
            message = f"{name} cannot be combined with raw or suffix: no chat template is used."
            raise unsupported(name, message)
    fields = body.shared() | {"model": model, "prompt": body.prompt}
    if body.suffix:
        fields["suffix"] = body.suffix
    if body.logprobs:
        fields["logprobs"] = body.top_logprobs or 0
    with in_callers_words(RENAMES):
        completion = await prepare_completion(server, parse(CompletionBody, fields), context)
    (request,) = completion.requests
    await check_whole(server, body, body.prompt or "", request, special=True)
    if body.options is None or body.options.max_tokens is None:
        # Ollama has no default output limit.
        request = replace(request, sampling=replace(request.sampling, max_tokens=None))
    request = within(server, body, request)
    name = completion.model.name
    return _job(server, body, context, is_chat=False, served_name=name, requests=(request,))
