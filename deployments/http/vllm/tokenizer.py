"""vLLM's /tokenizer_info: the tokenizer's configuration, if `api.tokenizer_info` allows it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.responses import Response

from remora.deployments.http.core.wire import JSONAnswer
from remora.deployments.http.generation.server_state import ServerState

_FILE = "tokenizer_config.json"
_PATHS = ("name_or_path", "_name_or_path", "tokenizer_file")  # places on the server


def vllm_routes(server: ServerState) -> APIRouter:
    """Return the router of the path, which answers 404 unless the operator has turned it on."""
    router = APIRouter(tags=["tokens"])

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        if not server.config.api.tokenizer_info:
            raise HTTPException(
                404, "The tokenizer's configuration is not shown: set api.tokenizer_info."
            )
        return JSONAnswer(await asyncio.to_thread(_info, server))

    return router


def _info(server: ServerState) -> dict[str, Any]:
    tokenizer, given = server.tokenizer, server.config.model.tokenizer_path
    folder = server.plan.model_path if given is None else Path(given)
    found: dict[str, Any] = {}
    if (folder / _FILE).is_file():
        found = json.loads((folder / _FILE).read_text(encoding="utf-8"))
    shown = {name: value for name, value in found.items() if name not in _PATHS}
    added = {str(id_): text for id_, text in sorted(tokenizer.added_tokens.items())}
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "added_tokens": added,
        "vocab_size": tokenizer.vocab_size,
        "model_max_length": server.plan.max_model_len,
        **shown,
        "chat_template": tokenizer.template_source,
    }
