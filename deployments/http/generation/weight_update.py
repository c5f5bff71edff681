"""/update_weights_from_disk: replaces the weights while the server runs, with SGLang's fields."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from remora.configs.errors import ConfigError, InvalidRequest
from remora.deployments.http.core.fields import Body, PathText
from remora.engine.protocols import EngineClient

log = logging.getLogger(__name__)

Install = Callable[[], None]


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """The functions that replace weights.

    prepare:  loads a source in a format; returns a function that installs it. Raises ConfigError.
    run:      calls that function in the engine, between two requests
    """

    prepare: Callable[[str, str | None], Install]
    run: Callable[[Install], Awaitable[None]]


class UpdateBody(Body):
    """Body of /update_weights_from_disk."""

    model_path: PathText
    load_format: PathText | None = None
    abort_all_requests: bool | None = None
    weight_version: PathText | None = None


class Weights:
    """The served weights.

    version:      label of the weights
    num_updates:  updates since the start
    """

    def __init__(self, version: str, exchange: WeightUpdate | None) -> None:
        """Start with `version`; `exchange` None = weights cannot be replaced."""
        self.version = version
        self.num_updates = 0
        self._exchange = exchange
        self._updating: asyncio.Task[dict[str, Any]] | None = None

    async def update(self, body: UpdateBody, client: EngineClient) -> dict[str, Any]:
        """Load and serve other weights. InvalidRequest leaves the weights unchanged."""
        if self._exchange is None:
            raise InvalidRequest(
                "Weight updates are off; set model.weight_roots or model.weight_loaders.",
                code="not_enabled",
            )
        if self._updating is not None and not self._updating.done():
            raise InvalidRequest("Another weight update is running.", code="update_running")
        # The update continues when the caller disconnects: it must not stop halfway.
        self._updating = asyncio.create_task(self._update(self._exchange, body, client))
        self._updating.add_done_callback(_log_failure)
        return await asyncio.shield(self._updating)

    async def _update(
        self, exchange: WeightUpdate, body: UpdateBody, client: EngineClient
    ) -> dict[str, Any]:
        try:
            install = await asyncio.to_thread(exchange.prepare, body.model_path, body.load_format)
        except ConfigError as error:
            raise InvalidRequest(f"The weights stay as they are: {error}", "model_path") from None
        exchanging = asyncio.ensure_future(exchange.run(install))
        if body.abort_all_requests:
            await asyncio.sleep(0)  # later requests wait for the new weights
            await client.abort(None)
        await exchanging
        self.num_updates += 1
        self.version = body.weight_version or self.version
        return {
            "success": True,
            "message": "The new weights are served.",
            "weight_version": self.version,
        }


def _log_failure(update: asyncio.Task[dict[str, Any]]) -> None:
    """Log the error of a failed update, since its caller may have disconnected."""
    if not update.cancelled() and (error := update.exception()) is not None:
        log.warning("weight update: failed: %s", error)
