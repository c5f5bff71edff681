"""One replica's part in changes of weights, called by whichever replica has got the request.

An update is staged, which loads it, and later installed or discarded. Arguments and answers are
plain data, because they pass through Serve's handles.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remora.configs.errors import ConfigError, InvalidRequest
from remora.deployments.http.generation.weight_update import Mode, Update, WeightPart
from remora.deployments.live_weights.sharing import SharedWeights

if TYPE_CHECKING:  # torch is imported when it is needed
    from remora.engine.live.allowed import AllowedSources
    from remora.engine.live.control import LiveWeights
    from remora.engine.live.source import LiveSource

STAGED_S = 1800.0  # after which an update that its sender has given up is discarded


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsState:
    """The weights of a replica; see `Weights`.

    update:  name of the last update, which all replicas share; "" = there was none
    """

    replica: str
    version: str
    num_updates: int
    update: str
    released: frozenset[str]
    source: LiveSource | None


class ReplicaWeights:
    """The weights of this replica.

    can_sleep:  whether memory may be released (engine.sleep_mode)
    can_share:  whether the weights may be read (model.share_weights)
    model:      folder of the served checkpoint
    """

    def __init__(
        self,
        live: LiveWeights,
        allowed: AllowedSources,
        *,
        version: str,
        replica: str,
        can_sleep: bool,
        can_share: bool = False,
        model: Path,
    ) -> None:
        self._live, self._allowed = live, allowed
        self._replica, self._can_sleep, self._model = replica, can_sleep, model
        self._version, self._num_updates, self._update = version, 0, ""
        self._labelled = live.source  # the weights that the label belongs to
        self._shared = SharedWeights(live) if can_share else None
        self._staged: tuple[str, Update] | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._operations: dict[str, Callable[..., Awaitable[None]]] = {
            "tell": self._tell,
            "stage": self._stage,
            "install": self._install,
            "discard": self._discard,
            "add_part": self._add_part,
            "drop_upload": self._drop_upload,
            "relabel": self._relabel,
            "sleep": self._sleep,
            "wake": self._wake,
        }

    @property
    def state(self) -> WeightsState:
        """The current state."""
        return WeightsState(
            replica=self._replica,
            version=self._version,
            num_updates=self._num_updates,
            update=self._update,
            released=self._live.released,
            source=self._live.source,
        )

    async def call(self, operation: str, *args: Any) -> WeightsState:
        """Run an operation; return the state after it. Raises InvalidRequest."""
        try:
            await self._operations[operation](*args)
        except ConfigError as error:
            raise InvalidRequest(f"The weights stay as they are: {error}", "model_path") from None
        return self.state

    async def save(self, path: str) -> int:
        """Write the weights to a new folder below a root. Raises InvalidRequest."""
        try:
            return await self._live.save(self._allowed.target(path), self._model)
        except ConfigError as error:
            raise InvalidRequest(f"Nothing was saved: {error}", "path") from None

    async def read_part(self, start: int, num_bytes: int, tag: str | None) -> WeightPart:
        """Return at most these bytes of the weights as a file, if they have the tag.

        Raises InvalidRequest, and Unavailable while the weights are released.
        """
        if self._shared is None:
            raise InvalidRequest(
                "The weights are not shared: model.share_weights is false.", code="not_enabled"
            )
        return await self._shared.part(
            self._labelled, self._version, self._update, start, num_bytes, tag
        )

    def check_config(self, raw: Mapping[str, Any]) -> None:
        """Raise ConfigError unless a config.json describes the served model."""
        self._live.check_config(raw)

    async def adopt(self, state: WeightsState) -> None:
        """Become like another replica, which has been updated. Raises ConfigError."""
        if state.source is not None:
            source = await asyncio.to_thread(self._live.uploads.adopt, state.source)
            await self._live.prepare("adopted", source)
            await self._live.install("adopted")
        self._version, self._num_updates = state.version, state.num_updates
        self._update, self._labelled = state.update, self._live.source
        if state.released:
            forgets = state.source is None
            await self._live.sleep(state.released, "abort", forgets=forgets)

    def close(self) -> None:
        """Delete uploads."""
        if self._expiry is not None:
            self._expiry.cancel()
        self._live.close()

    async def _tell(self) -> None:
        pass

    async def _stage(self, name: str, update: Update) -> None:
        if self._staged is not None:
            raise InvalidRequest("Another weight update is running.", code="update_running")
        self._staged = name, update
        try:
            if update.path is not None:
                source = self._allowed.source(update.path, update.load_format)
            else:
                source = await asyncio.to_thread(self._uploaded, update)
            await self._live.prepare(name, source)
        except BaseException:
            self._staged = None
            self._live.drop_unused()
            raise
        self._expiry = asyncio.get_running_loop().call_later(STAGED_S, self._expire, name)

    def _uploaded(self, update: Update) -> LiveSource:
        """Finish an upload; return the source with its tensors. Raises ConfigError."""
        folder = self._live.uploads.finish(update.upload or "")
        return self._live.whole(folder) if update.is_whole else self._live.patched(folder)

    async def _install(self, name: str) -> None:
        if self._staged is None or self._staged[0] != name:
            raise InvalidRequest("The update was discarded.", code="update_discarded")
        update = self._staged[1]
        try:
            await self._live.install(name, aborts=update.aborts)
        finally:
            self._unstage()
        self._num_updates += 1
        self._update, self._labelled = name, self._live.source
        self._version = update.version or self._version

    async def _discard(self, name: str) -> None:
        if self._staged is not None and self._staged[0] == name:
            self._unstage()
            await self._live.discard(name)
            self._live.drop_unused()

    async def _add_part(self, upload: str, offset: int, part: bytes) -> None:
        await asyncio.to_thread(self._live.uploads.add, upload, offset, part)

    async def _drop_upload(self, upload: str) -> None:
        self._live.uploads.drop(upload)

    async def _relabel(self, version: str) -> None:
        self._version = version

    async def _sleep(self, tags: frozenset[str], mode: Mode, forgets: bool) -> None:
        self._check_sleep()
        await self._live.sleep(tags, mode, forgets=forgets)

    async def _wake(self, tags: frozenset[str]) -> None:
        self._check_sleep()
        await self._live.wake(tags)

    def _check_sleep(self) -> None:
        if not self._can_sleep:
            raise InvalidRequest(
                "Memory is not released: engine.sleep_mode is false.", code="not_enabled"
            )

    def _unstage(self) -> None:
        self._staged = None
        if self._expiry is not None:
            self._expiry.cancel()

    def _expire(self, name: str) -> None:
        self._expiring = asyncio.ensure_future(self._discard(name))
