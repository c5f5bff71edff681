"""Ollama's information routes: models and version.

The served model is always loaded; its modification time is the server's start.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from remora.configs.errors import InvalidRequest
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.http.ollama.bodies import ShowBody
from remora.deployments.http.ollama.generate import check_name

_NEVER = "9999-12-31T23:59:59Z"


def tags(server: ServerState) -> dict[str, Any]:
    """Return the available models: the served one."""
    return {"models": [_card(server) | {"modified_at": _created(server)}]}


def running(server: ServerState) -> dict[str, Any]:
    """Return the loaded models: the served one."""
    plan = server.plan
    sizes = {
        "size_vram": 0 if plan.device == "cpu" else plan.weight_bytes + plan.kv_bytes,
        "context_length": plan.max_model_len,
    }
    return {"models": [_card(server) | sizes | {"expires_at": _NEVER}]}


async def show(server: ServerState, body: ShowBody) -> dict[str, Any]:
    """Return the description of the model. Raises InvalidRequest and UnknownModel."""
    name = body.model or body.name
    if not name:
        raise InvalidRequest("model is required.", "model", "missing_required_parameter")
    await check_name(server, name)
    plan = server.plan
    return {
        "modelfile": "",
        "parameters": "\n".join(
            f"{name} {value}" for name, value in sorted(server.generation_defaults.items())
        ),
        "template": "",
        "details": _details(server),
        "model_info": {
            "general.architecture": "remora",
            "remora.context_length": plan.max_model_len,
            "remora.vocab_size": server.tokenizer.vocab_size,
        },
        "capabilities": _capabilities(server),
        "modified_at": _created(server),
    }


def server_version() -> dict[str, str]:
    """Return remora's version."""
    return {"version": version("remora")}


def _card(server: ServerState) -> dict[str, Any]:
    name = server.plan.served_model_name
    return {
        "name": name,
        "model": name,
        "size": server.plan.weight_bytes,
        "digest": hashlib.sha256(name.encode()).hexdigest(),
        "details": _details(server),
    }


def _details(server: ServerState) -> dict[str, Any]:
    plan = server.plan
    is_gguf = plan.load_format == "gguf" or plan.model_path.suffix == ".gguf"
    level = plan.dtype if plan.quantization == "none" else plan.quantization
    return {
        "parent_model": "",
        "format": "gguf" if is_gguf else "safetensors",
        "family": "",
        "families": [],
        "parameter_size": "",
        "quantization_level": level,
    }


def _capabilities(server: ServerState) -> list[str]:
    if server.pooling is not None:
        return ["embedding"] if server.pooling.facts.task == "embed" else []
    tools, reasoning = server.formats.tool_format_name, server.formats.reasoning_format_name
    found = {"completion": True, "tools": tools is not None, "thinking": reasoning is not None}
    return [name for name, is_there in found.items() if is_there]


def _created(server: ServerState) -> str:
    return datetime.fromtimestamp(server.created, UTC).isoformat().replace("+00:00", "Z")
