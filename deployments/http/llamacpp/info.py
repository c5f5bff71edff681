"""llama.cpp's /props, /slots, /apply-template and /tokenize."""

from __future__ import annotations

from typing import Any

from remora.configs.errors import Unavailable
from remora.configs.version import __version__
from remora.deployments.http.core.errors import unsupported
from remora.deployments.http.generation.prompts import encode, render
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.http.llamacpp.bodies import (
    ApplyTemplateBody,
    LlamaBody,
    LlamaTokenizeBody,
)
from remora.deployments.http.llamacpp.settings import llama_sampling, settings_of


def props(server: ServerState) -> dict[str, Any]:
    """Return the properties of the server. The path of the model is not shown."""
    plan, tokenizer = server.plan, server.tokenizer
    limit = plan.max_sequence_tokens
    params = settings_of(llama_sampling(server, LlamaBody(), None), n_ctx=limit)
    start = tokenizer.encode("", add_special_tokens=True) if tokenizer.takes_text else []
    ends = tokenizer.eos_token_ids
    return {
        "default_generation_settings": {**_slot(0, server), "params": params},
        "total_slots": plan.max_running_requests,
        "model_alias": plan.served_model_name,
        "model_path": plan.served_model_name,
        "chat_template": tokenizer.template_source or "",
        "chat_template_caps": {},
        "modalities": {"vision": False, "audio": False},
        "bos_token": tokenizer.token_text(start[0]) if start else "",
        "eos_token": tokenizer.token_text(ends[0]) if ends else "",
        "build_info": f"remora-{__version__}",
        "is_sleeping": False,
    }


def slots(server: ServerState, *, needs_free: bool) -> list[dict[str, Any]]:
    """Return a slot for each row of a batch; sequences have no rows of their own to name.

    needs_free:  whether to raise Unavailable if all slots are processing
    """
    num_slots, num_running = server.plan.max_running_requests, server.client.stats().num_running
    if needs_free and num_running >= num_slots:
        raise Unavailable("No slot is free.", 1.0)
    return [
        _slot(number, server) | {"is_processing": number < num_running}
        for number in range(num_slots)
    ]


def _slot(number: int, server: ServerState) -> dict[str, Any]:
    return {
        "id": number,
        "id_task": -1,
        "n_ctx": server.plan.max_sequence_tokens,
        "speculative": server.plan.speculation is not None,
        "is_processing": False,
    }


async def apply_template(server: ServerState, body: ApplyTemplateBody) -> dict[str, str]:
    """Return the prompt of a conversation. Raises RequestError."""
    await server.model(body.model)
    return {"prompt": await render(server, body.messages, body)}


async def tokenize(server: ServerState, body: LlamaTokenizeBody) -> dict[str, Any]:
    """Return the token ids of a text, or each with its piece of the text. Raises RequestError."""
    await server.model(body.model)
    tokenizer, text = server.tokenizer, body.content
    if body.parse_special is False and any(
        marker in text for marker in tokenizer.added_tokens.values()
    ):
        message = "parse_special: the text holds special tokens, which are always parsed."
        raise unsupported("parse_special", message)
    special = bool(body.add_special)
    (ids,) = await encode(server, [text], add_special_tokens=special, param="content")
    if not body.with_pieces:
        return {"tokens": ids}
    return {"tokens": [{"id": id_, "piece": _piece(tokenizer.token_bytes(id_))} for id_ in ids]}


def _piece(raw: bytes) -> str | list[int]:
    """Return the text of a token, or its bytes if they are no text."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)
