"""Content blocks and calls of a reply, and the events of a streamed one, in Cohere's form.

The same code builds whole and streamed replies.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from remora.deployments.parsers.events import (
    CallArguments,
    CallBegun,
    Reasoning,
    ReplyEvent,
    Text,
)

Event = dict[str, Any]


class CohereWriter:
    """Writes one reply.

    blocks:  texts and thoughts, in order
    calls:   tool calls
    """

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []
        self.calls: list[dict[str, Any]] = []
        self._open = ""  # the kind of the block, or call, that has no end yet

    def take(self, events: Iterable[ReplyEvent]) -> list[Event]:
        """Add events of the reply; return Cohere's."""
        found: list[Event] = []
        for event in events:
            match event:
                case Text(text):
                    found += self._grow("text", text)
                case Reasoning(text):
                    found += self._grow("thinking", text)
                case CallBegun(_, call_id, name):
                    found += self._begin_call(call_id, name)
                case CallArguments(_, text):
                    self.calls[-1]["function"]["arguments"] += text
                    function = {"function": {"arguments": text}}
                    found.append(self._event("tool-call-delta", {"tool_calls": function}))
        return found

    def finish(self) -> list[Event]:
        """End the last block or call."""
        kind, self._open = self._open, ""
        if not kind:
            return []
        return [self._event("tool-call-end" if kind == "call" else "content-end", kind=kind)]

    @property
    def message(self) -> dict[str, Any]:
        """The whole message."""
        message: dict[str, Any] = {"role": "assistant"}
        if self.blocks or not self.calls:
            message["content"] = self.blocks or [{"type": "text", "text": ""}]
        if self.calls:
            message["tool_calls"] = self.calls
        return message

    def _grow(self, kind: str, text: str) -> list[Event]:
        found: list[Event] = []
        if self._open != kind:
            found = self.finish()
            self.blocks.append({"type": kind, kind: ""})
            self._open = kind
            begun = {"content": {"type": kind, kind: ""}}
            found.append(self._event("content-start", begun, kind=kind))
        self.blocks[-1][kind] += text
        return [*found, self._event("content-delta", {"content": {kind: text}}, kind=kind)]

    def _begin_call(self, call_id: str, name: str) -> list[Event]:
        found = self.finish()
        function = {"name": name, "arguments": ""}
        self.calls.append({"id": call_id, "type": "function", "function": function})
        self._open = "call"
        begun = {"id": call_id, "type": "function", "function": dict(function)}
        return [*found, self._event("tool-call-start", {"tool_calls": begun})]

    def _event(
        self, name: str, message: dict[str, Any] | None = None, *, kind: str = "call"
    ) -> Event:
        items = self.calls if kind == "call" else self.blocks
        event: Event = {"type": name, "index": len(items) - 1}
        return event if message is None else event | {"delta": {"message": message}}
