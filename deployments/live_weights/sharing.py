"""This replica's weights as a file that other servers read in parts.

A tag goes with each part. It changes with the weights, their label and their files, so parts with
the same tag make one file, whichever replica they come from.
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import TYPE_CHECKING

from remora.configs.errors import ConfigError, InvalidRequest, Unavailable
from remora.deployments.http.generation.weight_update import WeightPart

if TYPE_CHECKING:  # torch is imported when it is needed
    from remora.engine.live.control import LiveWeights
    from remora.engine.live.shared_file import SharedFile
    from remora.engine.live.source import LiveSource, Stamp

_WEIGHTS = "weights"  # the tag of memory
_Key = tuple["LiveSource", "Stamp", str, str]


class SharedWeights:
    """The file of the current weights, made when it is first asked for."""

    def __init__(self, live: LiveWeights) -> None:
        self._live = live
        self._file: tuple[_Key, str, SharedFile] | None = None
        self._making = asyncio.Lock()

    async def part(
        self,
        source: LiveSource | None,
        version: str,
        update: str,
        start: int,
        num_bytes: int,
        tag: str | None,
    ) -> WeightPart:
        """Return a part of the weights of a source.

        version, update:  its label, and the name of the update that has brought it
        tag:              what the part has to belong to; None = anything
        Raises InvalidRequest, and Unavailable while weights change or are released.
        """
        if source is None or _WEIGHTS in self._live.released:
            raise Unavailable("The server sleeps: its weights are released. Wake it first.")
        try:
            self._check(source)
            async with self._making:
                found, file = await self._current((source, self._live.stamp, version, update))
            content = b""
            if tag in (None, found) and start < file.total_bytes:
                end = min(start + num_bytes, file.total_bytes)
                content = await asyncio.to_thread(file.read, start, end)
            self._check(source)
        except (ConfigError, OSError) as error:
            if self._live.source != source:
                raise _changing() from None
            raise InvalidRequest(f"The weights cannot be shared: {error}") from None
        return WeightPart(content=content, start=start, total_bytes=file.total_bytes, tag=found)

    def _check(self, source: LiveSource) -> None:
        """Raise Unavailable or ConfigError unless the files of the source are what is served."""
        if self._live.source != source:
            raise _changing()
        self._live.check_files()

    async def _current(self, key: _Key) -> tuple[str, SharedFile]:
        if self._file is None or self._file[0] != key:
            source, stamp, version, update = key
            file = await asyncio.to_thread(self._live.share, source, version)
            said = f"{update}\n{stamp}\n".encode()
            self._file = key, hashlib.sha256(said + file.header).hexdigest()[:32], file
        return self._file[1], self._file[2]


def _changing() -> Unavailable:
    return Unavailable("The weights are being changed. Try again.")
