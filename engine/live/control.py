"""The weights of one running engine with all of its ranks: update, sleep, wake, save.

Everything is done in two phases: loading, in threads and on all ranks while requests run, and a
change of all ranks at once while the engine has no requests. One operation runs at a time. Knows
no HTTP and no other replicas.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from remora.configs.errors import ConfigError, InvalidRequest
from remora.engine.client import LocalEngineClient
from remora.engine.live.patched import live_patches
from remora.engine.live.rank import KV_CACHE, WEIGHTS, RankWeights
from remora.engine.live.saving import save_checkpoint
from remora.engine.live.shared_file import SharedFile
from remora.engine.live.source import NOTHING, LiveSource, Stamp, stamp_of
from remora.engine.live.uploads import Uploads

Mode = Literal["idle", "abort", "wait"]
RANKS_S = 600.0  # for a change at the other ranks, which have loaded
_WAKING = "waking"
# Entries of a shared file's metadata.
CONFIG, VERSION = "remora_config", "remora_weight_version"


class OtherRanks(Protocol):
    """The ranks other than 0."""

    async def call(self, operation: str, *args: Any) -> None:
        """Call a method of `RankWeights` at each rank, wait for all, and raise the first error."""


class NoOtherRanks:
    """The OtherRanks of a single rank."""

    async def call(self, operation: str, *args: Any) -> None:
        """Do nothing."""


class LiveWeights:
    """Weights and memory of an engine. Use it on the client's event loop."""

    def __init__(
        self,
        rank: RankWeights,
        client: LocalEngineClient,
        uploads: Uploads,
        others: OtherRanks | None = None,
    ) -> None:
        self.uploads = uploads
        self._rank, self._client = rank, client
        self._others = others or NoOtherRanks()
        self._loop = asyncio.get_running_loop()
        self._changing = asyncio.Lock()
        self._stamp = stamp_of(rank.source)
        self._stamps: dict[str, Stamp] = {}  # of prepared weights

    @property
    def source(self) -> LiveSource | None:
        """What is served, or will be after waking; None = weights were discarded."""
        return self._rank.source

    @property
    def released(self) -> frozenset[str]:
        """Tags of released memory."""
        return self._rank.released

    def patched(self, folder: str) -> LiveSource:
        """Return the source of the current weights with the tensors of a folder."""
        source = (self._rank.source or NOTHING).patched(folder)
        return LiveSource(
            path=source.path,
            load_format=source.load_format,
            patches=live_patches(source.patches),
        )

    def whole(self, folder: str) -> LiveSource:
        """Return the source of the tensors of a folder alone."""
        return NOTHING.patched(folder)

    async def prepare(self, name: str, source: LiveSource) -> None:
        """Load weights on all ranks. Raises ConfigError, and changes nothing then."""
        self._stamps[name] = await asyncio.to_thread(stamp_of, source)
        own = asyncio.to_thread(self._rank.prepare, name, source)
        # Wait for all: weights that are loaded after they were discarded would stay.
        found = await asyncio.gather(
            own, self._others.call("prepare", name, source), return_exceptions=True
        )
        errors = [error for error in found if isinstance(error, BaseException)]
        if errors:
            await self.discard(name)
            raise next((error for error in errors if isinstance(error, ConfigError)), errors[0])

    async def install(self, name: str, *, aborts: bool = False) -> None:
        """Serve prepared weights once open requests have ended, or abort these.

        Requests that arrive meanwhile wait.
        """
        async with self._changing:
            exchanging = asyncio.ensure_future(
                self._client.exchange(lambda: self._change("install", name))
            )
            if aborts:
                await asyncio.sleep(0)  # later requests wait for the new weights
                await self._client.abort(None)
            await exchanging
            self._stamp = self._stamps.pop(name)
            self._admit()
        self.drop_unused()

    def drop_unused(self) -> None:
        """Delete the uploads that are not served."""
        source = self._rank.source
        self.uploads.keep(() if source is None else source.patches)

    async def discard(self, name: str) -> None:
        """Drop prepared weights on all ranks."""
        self._stamps.pop(name, None)
        await asyncio.to_thread(self._rank.discard, name)
        await self._others.call("discard", name)

    async def sleep(self, tags: frozenset[str], mode: Mode, *, forgets: bool = False) -> None:
        """Release memory; requests are refused from now on.

        mode:     of open requests: idle = raise InvalidRequest if there are any; abort them; or
                  wait for their ends
        forgets:  whether an update will supply the weights
        """
        async with self._changing:
            if mode == "idle" and self._client.num_open:
                raise InvalidRequest(
                    f"{self._client.num_open} requests are running; memory is released only "
                    "without requests. Wait for them or abort them.",
                    code="requests_running",
                )
            self._client.refuse(_reason(tags | self._rank.released))
            try:
                if mode == "abort":
                    await self._client.abort(None)
                await self._client.exchange(lambda: self._change("release", tags, forgets))
            finally:
                self._admit()

    async def wake(self, tags: frozenset[str]) -> None:
        """Take memory again. Raises ConfigError if the weights cannot be loaded."""
        async with self._changing:
            tags &= self._rank.released
            if not tags:
                return
            loads = WEIGHTS in tags and self._rank.source is not None
            if loads:
                await self._load_again()
            await self._client.exchange(lambda: self._wake(tags, loads=loads))
            self._stamp = self._stamps.pop(_WAKING, self._stamp)
            self._admit()

    async def save(self, out: Path, model: Path) -> int:
        """Write the current weights to a new folder; return their bytes. Raises ConfigError."""
        source = self._rank.source
        if source is None:
            raise ConfigError("the weights were discarded; there is nothing to save")

        def write() -> int:
            return save_checkpoint(self._rank.stored(source), model, out)

        async with self._changing:
            return await asyncio.to_thread(write)

    def check_config(self, raw: Mapping[str, Any]) -> None:
        """Raise ConfigError unless a config.json describes the served model."""
        self._rank.check_config(raw)

    def share(self, source: LiveSource, version: str) -> SharedFile:
        """Return the weights of a source as a file; call it in a thread, since it reads headers.

        version:  their label, which the file's metadata tell
        Raises ConfigError if the weights are not in files that can be read at any time.
        """
        metadata = {"format": "pt", CONFIG: self._rank.raw_config(), VERSION: version}
        return SharedFile(self._rank.stored_in_files(source), metadata)

    def check_files(self) -> None:
        """Raise ConfigError if the files of the current weights were written to since loading."""
        if stamp_of(self._rank.source) != self._stamp:
            raise ConfigError(
                "the files of the served weights have changed since they were loaded, so they are "
                "other weights now; load them with /update_weights_from_disk first"
            )

    @property
    def stamp(self) -> Stamp:
        """The files of the current weights at the time of loading."""
        return self._stamp

    def close(self) -> None:
        """Delete uploads and prepared weights."""
        self._rank.close()
        self.uploads.close()

    async def _load_again(self) -> None:
        self._stamps[_WAKING] = await asyncio.to_thread(stamp_of, self._rank.source)
        own = asyncio.to_thread(self._rank.prepare_waking, _WAKING)
        others = self._others.call("prepare_waking", _WAKING)
        found = await asyncio.gather(own, others, return_exceptions=True)
        errors = [error for error in found if isinstance(error, BaseException)]
        if errors:
            await self.discard(_WAKING)
            raise errors[0]

    def _wake(self, tags: frozenset[str], *, loads: bool) -> None:
        if loads:
            self._change("install", _WAKING)
        self._change("wake", tags)

    def _change(self, operation: str, *args: Any) -> None:
        """Change all ranks; runs on the engine's thread, between requests."""
        others = asyncio.run_coroutine_threadsafe(self._others.call(operation, *args), self._loop)
        change: Callable[..., None] = getattr(self._rank, operation)
        change(*args)
        others.result(RANKS_S)

    def _admit(self) -> None:
        released = self._rank.released
        self._client.refuse(_reason(released) if released & {WEIGHTS, KV_CACHE} else None)


def _reason(tags: frozenset[str]) -> str:
    return (
        f"The server sleeps: its memory is released ({', '.join(sorted(tags))}). Wake it with "
        "/wake_up or /resume_memory_occupation; weights that were discarded also need an update."
    )
