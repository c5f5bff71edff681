"""What Ollama's clients ask of a server beside text: its models, and its version.

The one model is always loaded, and is what it was when the server started.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from remora.configs.errors import InvalidRequest
from remora.deployments.http.generation.server_state import Served
from remora.deployments.http.ollama.bodies import ShowBody
from remora.deployments.http.ollama.generate import check_name

_NEVER = "9999-12-31T23:59:59Z"


def tags(served: Served) -> dict[str, Any]:
    """Return the models that could be asked: one."""
    return {"models": [_card(served) | {"modified_at": _created(served)}]}


def running(served: Served) -> dict[str, Any]:
    """Return the models that are loaded: the same one."""
    plan = served.plan
    sizes = {
        "size_vram": 0 if plan.device == "cpu" else plan.weight_bytes + plan.kv_bytes,
        "context_length": plan.max_model_len,
    }
    return {"models": [_card(served) | sizes | {"expires_at": _NEVER}]}


async def show(served: Served, body: ShowBody) -> dict[str, Any]:
    """Return what there is to say of the model. Raises InvalidRequest and UnknownModel."""
    name = body.model or body.name
    if not name:
        raise InvalidRequest("model is required.", "model", "missing_required_parameter")
    await check_name(served, name)
    plan = served.plan
    return {
        "modelfile": "",
        "parameters": "\n".join(
            f"{name} {value}" for name, value in sorted(served.generation_defaults.items())
        ),
        "template": "",
        "details": _details(served),
        "model_info": {
            "general.architecture": "remora",
            "remora.context_length": plan.max_model_len,
            "remora.vocab_size": served.tokenizer.vocab_size,
        },
        "capabilities": _capabilities(served),
        "modified_at": _created(served),
    }


def server_version() -> dict[str, str]:
    """Return our version."""
    return {"version": version("remora")}


def _card(served: Served) -> dict[str, Any]:
    name = served.plan.served_model_name
    return {
        "name": name,
        "model": name,
        "size": served.plan.weight_bytes,
        "digest": hashlib.sha256(name.encode()).hexdigest(),
        "details": _details(served),
    }


def _details(served: Served) -> dict[str, Any]:
    plan = served.plan
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


def _capabilities(served: Served) -> list[str]:
    if served.pooling is not None:
        return ["embedding"] if served.pooling.facts.task == "embed" else []
    tools, thought = served.formats.tool_format_name, served.formats.reasoning_format_name
    found = {"completion": True, "tools": tools is not None, "thinking": thought is not None}
    return [name for name, is_there in found.items() if is_there]


def _created(served: Served) -> str:
    return datetime.fromtimestamp(served.created, UTC).isoformat().replace("+00:00", "Z")
