"""Ollama's information routes: models, their description, and version.

The served model is always loaded; its modification time is the server's start.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from remora.configs.errors import InvalidRequest
from remora.configs.version import __version__
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.http.ollama.bodies import PullBody, ShowBody
from remora.deployments.http.ollama.generate import check_name

_NEVER = "9999-12-31T23:59:59Z"
_HEADS = re.compile(r"(For[A-Z]\w*|Model|LMHead\w*)$")
_LICENSES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "license.txt")
_MAX_LICENSE_CHARS = 2**16


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
    await _known(server, body.model or body.name)
    plan, family = server.plan, _family(server)
    parameters = [f"{name} {value}" for name, value in sorted(server.generation_defaults.items())]
    template, license_text = server.tokenizer.template_source or "", _license(plan.model_path)
    return {
        "modelfile": _modelfile(plan.served_model_name, template, parameters),
        "parameters": "\n".join(parameters),
        "template": template,
        "license": license_text,
        "details": _details(server),
        "model_info": {
            "general.architecture": family,
            "general.parameter_count": _num_parameters(server),
            f"{family}.context_length": plan.max_model_len,
            f"{family}.vocab_size": server.tokenizer.vocab_size,
        },
        "capabilities": _capabilities(server),
        "modified_at": _created(server),
    }


async def pull(server: ServerState, body: PullBody) -> list[dict[str, Any]]:
    """Return the steps of getting a served model, which is here already.

    Raises InvalidRequest and UnknownModel.
    """
    name = await _known(server, body.model or body.name)
    digest = hashlib.sha256(name.encode()).hexdigest()
    return [
        {"status": "pulling manifest"},
        {
            "status": f"pulling {digest[:12]}",
            "digest": f"sha256:{digest}",
            "total": server.plan.weight_bytes,
            "completed": server.plan.weight_bytes,
        },
        {"status": "success"},
    ]


async def _known(server: ServerState, name: str | None) -> str:
    if not name:
        raise InvalidRequest("model is required.", "model", "missing_required_parameter")
    return await check_name(server, name)


def _modelfile(name: str, template: str, parameters: Iterable[str]) -> str:
    lines = [f"FROM {name}", *(f"PARAMETER {line}" for line in parameters)]
    if template:
        lines.append(f'TEMPLATE """{template}"""')
    return "\n".join(lines)


def _license(folder: Path) -> str:
    """Return the text of the checkpoint's license file; empty without one."""
    for name in _LICENSES:
        try:
            with (folder / name).open(encoding="utf-8", errors="replace") as file:
                return file.read(_MAX_LICENSE_CHARS)
        except OSError:
            continue
    return ""


def server_version() -> dict[str, str]:
    """Return remora's version."""
    return {"version": __version__}


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
        "family": _family(server),
        "families": [_family(server)],
        "parameter_size": _size(_num_parameters(server)),
        "quantization_level": level,
    }


def _family(server: ServerState) -> str:
    """Return the name of the model's architecture, such as llama for LlamaForCausalLM."""
    found = "" if server.facts is None else server.facts.architecture
    return _HEADS.sub("", found).lower() or "unknown"


def _num_parameters(server: ServerState) -> int:
    return 0 if server.facts is None else server.facts.num_parameters


def _size(num_parameters: int) -> str:
    """Return a number of parameters in short, such as 134.52M or 8.0B."""
    if num_parameters < 10**9:
        return f"{num_parameters / 10**6:.2f}M"
    return f"{num_parameters / 10**9:.1f}B"


def _capabilities(server: ServerState) -> list[str]:
    if server.pooling is not None:
        return ["embedding"] if server.pooling.facts.task == "embed" else []
    tools, reasoning = server.formats.tool_format_name, server.formats.reasoning_format_name
    found = {"completion": True, "tools": tools is not None, "thinking": reasoning is not None}
    return [name for name, is_there in found.items() if is_there]


def _created(server: ServerState) -> str:
    return datetime.fromtimestamp(server.created, UTC).isoformat().replace("+00:00", "Z")
