"""Methods that Python callers reach through Serve's handle: bodies in, plain values or chunks out.

    handle.chat.remote(body)                        a whole response, as a dict
    handle.chat.remote(messages=[...], max_tokens=5)    fields as keywords, or added to a body
    handle.chat.remote(body | {"stream": True})     a stream: iterate over what the response gives
    handle.options(stream=True).chat.remote(body)   its chunks by Serve's own generator

A response names the fields that were ignored, with the most similar known name of each, in
`ignored_fields`; of a stream, the first chunk does. Knows no engine and no endpoint.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing
from types import MappingProxyType
from typing import Any

from remora.configs.errors import InvalidRequest
from remora.deployments.ray_private import is_streamed_call
from remora.deployments.serve_context import own_names

Chunks = AsyncGenerator[dict[str, Any], None]
# Method -> the method that always streams it.
STREAMS: Mapping[str, str] = MappingProxyType(
    {"chat": "chat_stream", "completions": "completions_stream", "generate": "generate"}
)


class HandleCalls(ABC):
    """The methods of a deployment that take a body of an HTTP endpoint.

    Each takes the body, its fields as keywords, or both, and raises the error that HTTP would
    return.
    """

    @abstractmethod
    async def _answer(self, method: str, body: Mapping[str, Any]) -> Any:
        """Return the whole response to a body."""

    @abstractmethod
    def _chunks(self, method: str, body: Mapping[str, Any]) -> Chunks:
        """Yield the chunks of the response to a body."""

    async def chat(self, body: Mapping[str, Any] | None = None, /, **fields: Any) -> Any:
        """Handle a body of /v1/chat/completions."""
        return await self._call("chat", body, fields)

    async def completions(self, body: Mapping[str, Any] | None = None, /, **fields: Any) -> Any:
        """Handle a body of /v1/completions."""
        return await self._call("completions", body, fields)

    async def embed(self, body: Mapping[str, Any] | None = None, /, **fields: Any) -> Any:
        """Handle a body of /v1/embeddings."""
        return await self._call("embed", body, fields)

    async def rerank(self, body: Mapping[str, Any] | None = None, /, **fields: Any) -> Any:
        """Handle a body of /v1/rerank."""
        return await self._call("rerank", body, fields)

    async def score(self, body: Mapping[str, Any] | None = None, /, **fields: Any) -> Any:
        """Handle a body of /v1/score."""
        return await self._call("score", body, fields)

    async def classify(self, body: Mapping[str, Any] | None = None, /, **fields: Any) -> Any:
        """Handle a body of /classify."""
        return await self._call("classify", body, fields)

    async def chat_stream(self, body: Mapping[str, Any] | None = None, /, **fields: Any) -> Chunks:
        """Yield the chunks for a body of /v1/chat/completions."""
        async with aclosing(self._chunks("chat", body_of(body, fields))) as chunks:
            async for chunk in chunks:
                yield chunk

    async def completions_stream(
        self, body: Mapping[str, Any] | None = None, /, **fields: Any
    ) -> Chunks:
        """Yield the chunks for a body of /v1/completions."""
        async with aclosing(self._chunks("completions", body_of(body, fields))) as chunks:
            async for chunk in chunks:
                yield chunk

    async def generate(self, body: Mapping[str, Any] | None = None, /, **fields: Any) -> Chunks:
        """Yield the chunks for a body of /generate; each holds all text so far."""
        async with aclosing(self._chunks("generate", body_of(body, fields))) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _call(
        self, method: str, body: Mapping[str, Any] | None, fields: Mapping[str, Any]
    ) -> Any:
        given = body_of(body, fields)
        if method in STREAMS:
            if is_streamed_call():
                return self._chunks(method, given)
            if given.get("stream") is True:
                names = own_names()
                if names is None:  # called without Serve
                    return self._chunks(method, given)
                return HandleStream(*names, STREAMS[method], given)
        return await self._answer(method, given)


class HandleStream:
    """A response in chunks, as the caller of a handle receives it.

    Iterate over it once, with `for` or `async for`. The request starts with the first chunk that is
    asked for, and is cancelled if the iteration is left. Needs a connection to the Ray cluster.
    """

    def __init__(
        self, deployment: str, application: str, method: str, body: Mapping[str, Any]
    ) -> None:
        self._names = (deployment, application)
        self._method = method
        self._body = body

    def _open(self) -> Any:
        from ray import serve

        handle = serve.get_deployment_handle(*self._names)
        return handle.options(method_name=self._method, stream=True).remote(self._body)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the chunks."""
        chunks = self._open()
        try:
            yield from chunks
        except GeneratorExit:
            chunks.cancel()
            raise

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the chunks."""
        chunks = self._open()
        try:
            async for chunk in chunks:
                yield chunk
        except BaseException:
            chunks.cancel()
            raise


def body_of(body: Mapping[str, Any] | None, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return one body of a body and keywords. Raises InvalidRequest."""
    if body is not None and not isinstance(body, Mapping):
        raise InvalidRequest(
            f"The body is of type {type(body).__name__}; pass a dict, or its fields as keywords."
        )
    given = dict(body or {})
    for name in fields:
        if name in given:
            raise InvalidRequest(
                f"{name} is given twice, in the body and as a keyword; keep one of the two.", name
            )
    return given | dict(fields)


def plain(value: Any) -> Any:
    """Return a response of the types that JSON has, so that enums arrive as plain strings."""
    if isinstance(value, str):
        return value if type(value) is str else str.__str__(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


def with_ignored(answer: Any, nearest: Mapping[str, str | None]) -> Any:
    """Return a response that also names the fields of its request that were ignored.

    nearest:  name -> the most similar known name, or None
    """
    if not nearest or not isinstance(answer, dict):
        return answer
    return {**answer, "ignored_fields": dict(nearest)}
