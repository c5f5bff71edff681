"""HTTP client of a running server, for the commands: OpenAI's API with streaming.

Knows HTTP and server-sent events. Knows nothing of terminals.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import Any

import httpx

from remora.deployments.cli.terminal import Failure


class ServerClient:
    """Sends requests to one server. Every error is raised as Failure.

    on_ignored:  gets a line for each field that the server ignores, once
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        on_ignored: Callable[[str], None] | None = None,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._on_ignored = on_ignored
        self._ignored: set[str] = set()
        try:
            # A busy server may take long to send the first token, so only connecting times out.
            timeout = httpx.Timeout(None, connect=5.0)
            headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
            self._http = httpx.Client(base_url=self.url, timeout=timeout, headers=headers)
        except httpx.InvalidURL as error:
            raise Failure(f"invalid address {url} ({error}); expected http://HOST:PORT") from None

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def pick_model(self, wanted: str | None) -> str:
        """Return `wanted`, or the first model served. Raises Failure when it is not served."""
        with self._request("GET", "/v1/models") as response:
            served = [str(entry["id"]) for entry in _as_json(response)["data"]]
        if wanted is None and served:
            return served[0]
        if wanted in served:
            return str(wanted)
        raise Failure(
            f"{self.url} does not serve {wanted or 'any model'}; served: {', '.join(served)}"
        )

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Send a request and return its JSON. Raises Failure for a refusal."""
        with self._request(method, path, body) as response:
            return _as_json(response)

    def stream_chat(
        self,
        messages: list[dict[str, str]],
        on_usage: Callable[[dict[str, Any]], None] | None = None,
        /,
        **fields: Any,
    ) -> Generator[str]:
        """Yield the assistant's reply in pieces, as they arrive.

        on_usage:  called with the numbers of tokens at the end, if the server reports them
        """
        body = {"messages": messages, **fields}
        if on_usage is not None:
            body["stream_options"] = {"include_usage": True}
        for choice in self._stream("/v1/chat/completions", body, on_usage):
            yield choice.get("delta", {}).get("content") or ""

    def stream_completion(self, prompt: str, **fields: Any) -> Generator[str]:
        """Yield the continuation of `prompt` in pieces, as they arrive."""
        for choice in self._stream("/v1/completions", {"prompt": prompt, **fields}):
            yield choice.get("text") or ""

    def _stream(
        self,
        path: str,
        body: dict[str, Any],
        on_usage: Callable[[dict[str, Any]], None] | None = None,
    ) -> Iterator[dict[str, Any]]:
        sent = {key: value for key, value in body.items() if value is not None}
        with self._request("POST", path, {**sent, "stream": True}) as response:
            try:
                for line in response.iter_lines():
                    data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
                    if data == "[DONE]":
                        return
                    if data:
                        event = json.loads(data)
                        if on_usage is not None and event.get("usage"):
                            on_usage(event["usage"])
                        yield from _choices(event)
            except httpx.HTTPError as error:
                raise Failure(
                    f"{self.url}: the connection was lost during the response ({error})"
                ) from None
        raise Failure(f"{self.url}: the response ended without [DONE]")

    def _request(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> closing[httpx.Response]:
        """Send a request. Closing its response makes the server stop generating."""
        try:
            request = self._http.build_request(method, path, json=body)
            response = self._http.send(request, stream=True)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Failure(
                f"cannot reach a server at {self.url} ({error}); start one with `make serve` or "
                "`remora serve FILE`, or set another address with --url"
            ) from None
        if response.status_code >= 400:
            with closing(response):
                response.read()
                raise Failure(f"{self.url}{path}: {_error_message(response)}")
        self._report_ignored(response.headers)
        return closing(response)

    def _report_ignored(self, headers: httpx.Headers) -> None:
        names = headers.get("x-remora-ignored-fields", "").split(", ")
        hints = headers.get("x-remora-suggested-fields", "").split(", ")
        nearest = dict(hint.split("=", 1) for hint in hints if "=" in hint)
        for name in names:
            if name and name not in self._ignored and self._on_ignored is not None:
                self._ignored.add(name)
                hint = f"; did you mean {nearest[name]}?" if name in nearest else ""
                self._on_ignored(f"the server ignored the field {name}{hint}")


def _choices(event: dict[str, Any]) -> list[dict[str, Any]]:
    if "error" in event:
        raise Failure(f"the server reported an error: {event['error'].get('message', event)}")
    choices: list[dict[str, Any]] = event.get("choices", [])
    return choices


def _as_json(response: httpx.Response) -> Any:
    try:
        return json.loads(response.read())
    except ValueError:
        raise Failure(
            f"{response.url}: the response is not JSON; check that this is a remora server"
        ) from None


def _error_message(response: httpx.Response) -> str:
    """Return the message of an OpenAI-style error, or the HTTP status."""
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status_code} {response.reason_phrase}"
    return f"{message} (HTTP {response.status_code})"
