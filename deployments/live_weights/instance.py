"""Copies the weights of another server over HTTP, a part at a time.

Each part carries the tag of the weights that it belongs to, and all have to carry the first one's:
what was read of two sets of weights, or under two labels, is never joined. Redirects, proxies and
passwords of the environment are not used.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from remora.configs.errors import ConfigError, InvalidRequest
from remora.deployments.http.core.body_limits import limit
from remora.deployments.http.generation.weight_update import PART_BYTES, InstanceUpdate

PATH = "/weights"
CONNECT_S = 10.0
# Entries of the file's metadata.
CONFIG, VERSION = "remora_config", "remora_weight_version"
_HEADER_START = 8  # bytes, after the length of the header
_MAX_HEADER_BYTES = 100_000_000
_MAX_ERROR_BYTES = 64 * 2**10
_MAX_SHOWN_CHARS = 400
_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    content: bytes
    total_bytes: int
    tag: str


async def copy_weights(
    order: InstanceUpdate,
    *,
    limit_bytes: int,
    add: Callable[[int, bytes], Awaitable[None]],
    check_config: Callable[[Mapping[str, Any]], None],
) -> str:
    """Read all weights of a server; return their label.

    limit_bytes:   the most that is read
    add:           is called with the offset and bytes of each part, in order
    check_config:  raises ConfigError for the config.json of another model
    Raises InvalidRequest if the server does not give all of them, unchanged.
    """
    head = _Header(order.url)
    async with httpx.AsyncClient(
        timeout=httpx.Timeout(limit("body_timeout_s"), connect=CONNECT_S),
        trust_env=False,
        follow_redirects=False,
    ) as client:
        instance = _Instance(client, order)
        first = part = await instance.part(0, None)
        if first.total_bytes > limit_bytes:
            raise _refused(
                f"the weights of {order.url} have {first.total_bytes:,} bytes, and "
                f"model.weight_upload_limit allows {limit_bytes:,}"
            )
        offset = 0
        while True:
            head.add(part.content, check_config)
            await add(offset, part.content)
            offset += len(part.content)
            if offset >= first.total_bytes:
                return head.version
            part = await instance.part(offset, first)


class _Instance:
    """The other server."""

    def __init__(self, client: httpx.AsyncClient, order: InstanceUpdate) -> None:
        self._client, self._url = client, order.url
        self._headers = {"accept-encoding": "identity"}
        if order.api_key is not None:
            self._headers["authorization"] = f"Bearer {order.api_key}"
        self._query = {} if order.model is None else {"model": order.model}

    async def part(self, start: int, first: _Part | None) -> _Part:
        """Read the part that begins at `start`. Raises InvalidRequest."""
        headers = {**self._headers, "range": f"bytes={start}-{start + PART_BYTES - 1}"}
        if first is not None:
            headers["if-match"] = first.tag
        seconds = limit("body_timeout_s")
        try:
            async with asyncio.timeout(seconds):
                return await self._read(headers, start, first)
        except TimeoutError:
            raise _unreachable(
                f"{self._url} has not sent a part of its weights in {seconds:g} s "
                "(limits.body_timeout_s)"
            ) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = str(error) or type(error).__name__
            raise _unreachable(f"{self._url} cannot be reached, or broke off: {reason}") from None

    async def _read(self, headers: Mapping[str, str], start: int, first: _Part | None) -> _Part:
        asked = self._client.stream("GET", self._url + PATH, headers=headers, params=self._query)
        async with asked as answer:
            is_part = answer.status_code == httpx.codes.PARTIAL_CONTENT
            content = bytearray()
            async for chunk in answer.aiter_raw():
                content += chunk
                if len(content) > (PART_BYTES if is_part else _MAX_ERROR_BYTES):
                    break
        if not is_part:
            raise self._refusal(answer.status_code, bytes(content))
        said = _RANGE.fullmatch(answer.headers.get("content-range", ""))
        tag = answer.headers.get("etag", "")
        if said is None or not tag:
            raise _refused(f"{self._url} does not answer like a remora server")
        begin, last, total = map(int, said.groups())
        if begin != start or last + 1 - begin != len(content) or not content or last >= total:
            raise _refused(f"{self._url} sent other bytes of its weights than it was asked for")
        if first is not None and (tag, total) != (first.tag, first.total_bytes):
            raise self._changed()
        return _Part(content=bytes(content), total_bytes=total, tag=tag)

    def _refusal(self, status: int, body: bytes) -> InvalidRequest:
        if status == httpx.codes.PRECONDITION_FAILED:
            return self._changed()
        return _refused(f"{self._url} answered {status}{_message(body)}")

    def _changed(self) -> InvalidRequest:
        return InvalidRequest(
            f"The weights stay as they are: {self._url} changed its weights or their label while "
            "they were read. Try again.",
            "url",
            "instance_changed",
        )


class _Header:
    """Reads the header of the file from its first parts.

    version:  the label of the weights, once the header is complete
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._bytes: bytearray | None = bytearray()
        self.version = ""

    def add(self, content: bytes, check_config: Callable[[Mapping[str, Any]], None]) -> None:
        """Add the next bytes of the file. Raises InvalidRequest for another model's."""
        if self._bytes is None:
            return
        self._bytes += content
        end = _HEADER_START + int.from_bytes(self._bytes[:_HEADER_START], "little")
        if end > _MAX_HEADER_BYTES:
            raise _refused(f"the header of {self._url}'s weights claims {end:,} bytes")
        if len(self._bytes) < max(end, _HEADER_START + 1):
            return
        text, self._bytes = bytes(self._bytes[_HEADER_START:end]), None
        try:
            metadata = json.loads(text)["__metadata__"]
            self.version, config = str(metadata[VERSION]), json.loads(metadata[CONFIG])
            if not isinstance(config, dict) or not self.version:
                raise TypeError
        except (ValueError, TypeError, KeyError, RecursionError):
            raise _refused(f"{self._url} does not say which model it serves") from None
        try:
            check_config(config)
        except ConfigError as error:
            raise InvalidRequest(
                f"The weights stay as they are: {self._url} serves another model: {error}",
                "url",
                "instance_differs",
            ) from None


def _message(body: bytes) -> str:
    """Return what an error's body says, shortened."""
    try:
        said = json.loads(body)["error"]["message"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""
    return f": {str(said)[:_MAX_SHOWN_CHARS]}"


def _refused(why: str) -> InvalidRequest:
    return InvalidRequest(f"The weights stay as they are: {why}", "url", "instance_refused")


def _unreachable(why: str) -> InvalidRequest:
    return InvalidRequest(f"The weights stay as they are: {why}", "url", "instance_unreachable")
