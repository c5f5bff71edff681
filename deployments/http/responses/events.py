"""Output items of a response, and the events of a streamed response.

The same code builds complete and streamed responses.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from remora.deployments.http.generation.tools import custom_input
from remora.deployments.http.responses.archive import ItemIds
from remora.deployments.parsers.events import (
    CallArguments,
    CallBegun,
    Reasoning,
    ReplyEvent,
    Text,
)

Event = dict[str, Any]

MESSAGE, REASONING, CALL = "message", "reasoning", "function_call"
CUSTOM_CALL = "custom_tool_call"
_STEMS: Mapping[str, str] = MappingProxyType(
    {
        MESSAGE: "response.output_text",
        REASONING: "response.reasoning_text",
        CALL: "response.function_call_arguments",
        CUSTOM_CALL: "response.custom_tool_call_input",
    }
)
_CALLS = (CALL, CUSTOM_CALL)


@dataclass(slots=True, eq=False)
class _OpenItem:
    """The item in progress.

    pieces:    pieces of its text, or of the call's arguments
    logprobs:  log-probabilities of the tokens of its text
    """

    index: int
    kind: str
    id: str
    head: dict[str, Any]
    pieces: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def place(self) -> dict[str, Any]:
        """Fields that locate the item in an event."""
        place: dict[str, Any] = {"item_id": self.id, "output_index": self.index}
        return place if self.kind in _CALLS else place | {"content_index": 0}

    def part(self, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the only part of the item's content."""
        if self.kind == REASONING:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def item(self, status: str, content: list[dict[str, Any]], arguments: str) -> dict[str, Any]:
        """Return the item object."""
        item = {"id": self.id, "type": self.kind, "status": status, **self.head}
        if self.kind == CALL:
            return item | {"arguments": arguments}
        if self.kind == CUSTOM_CALL:
            return item | {"input": arguments}
        return item | {"content": content}


_HEADS: Mapping[str, dict[str, Any]] = MappingProxyType(
    {MESSAGE: {"role": "assistant"}, REASONING: {"summary": []}}
)


class OutputWriter:
    """Writes one reply as items. Its events have no `sequence_number`.

    custom:           names of custom tools
    shows_reasoning:  whether reasoning becomes items
    items:            finished items
    """

    def __init__(
        self, ids: ItemIds, *, custom: Collection[str] = (), shows_reasoning: bool = True
    ) -> None:
        self._ids = ids
        self._custom = custom
        self._shows_reasoning = shows_reasoning
        self.items: list[dict[str, Any]] = []
        self._open: _OpenItem | None = None
        # Log-probabilities of tokens whose text is held back.
        self._logprobs: list[dict[str, Any]] = []

    def take(self, events: Iterable[ReplyEvent], logprobs: Iterable[Event] = ()) -> list[Event]:
        """Add events of the reply and log-probabilities of its tokens; return the API events."""
        self._logprobs += logprobs
        found: list[Event] = []
        for event in events:
            match event:
                case Text(text):
                    found += self._grow(MESSAGE, text)
                case Reasoning(text):
                    if self._shows_reasoning:
                        found += self._grow(REASONING, text)
                    else:
                        self._logprobs = []
                case CallBegun(_, call_id, name):
                    kind = CUSTOM_CALL if name in self._custom else CALL
                    found += self._begin(kind, {"call_id": call_id, "name": name})
                case CallArguments(_, text):
                    found += self._argue(text)
        return found

    def finish(self, status: str) -> list[Event]:
        """End the reply; `status` is for its last item. An empty reply gets one empty message."""
        begun = [] if self.items or self._open else self._begin(MESSAGE, _HEADS[MESSAGE])
        return begun + self._end(status)

    def _argue(self, text: str) -> list[Event]:
        """Add arguments. Those of a custom call are JSON around its input, sent when complete."""
        if self._open is not None and self._open.kind == CUSTOM_CALL:
            self._open.pieces.append(text)
            self._logprobs = []
            return []
        return self._grow(CALL, text)

    def _grow(self, kind: str, text: str) -> list[Event]:
        found = []
        if self._open is None or self._open.kind != kind:
            found = self._begin(kind, _HEADS[kind])
        item = self._open
        assert item is not None
        item.pieces.append(text)
        delta = {"type": f"{_STEMS[kind]}.delta", **item.place, "delta": text}
        if kind == MESSAGE:
            delta["logprobs"] = self._logprobs
            item.logprobs += self._logprobs
        self._logprobs = []
        return [*found, delta]

    def _begin(self, kind: str, head: dict[str, Any]) -> list[Event]:
        found = self._end("completed")
        item = _OpenItem(len(self.items), kind, self._ids.new(kind), head)
        self._open = item
        added = item.item("in_progress", [], "")
        found.append(
            {"type": "response.output_item.added", "output_index": item.index, "item": added}
        )
        if kind not in _CALLS:
            part = item.part("", [])
            found.append({"type": "response.content_part.added", **item.place, "part": part})
        return found

    def _end(self, status: str) -> list[Event]:
        item, self._open = self._open, None
        if item is None:
            return []
        text, stem = "".join(item.pieces), _STEMS[item.kind]
        if item.kind == CUSTOM_CALL:
            text = custom_input(text)
            found = [
                {"type": f"{stem}.delta", **item.place, "delta": text},
                {"type": f"{stem}.done", **item.place, "input": text},
            ]
            whole = item.item(status, [], text)
        elif item.kind == CALL:
            done = {"name": item.head["name"], "arguments": text}
            found = [{"type": f"{stem}.done", **item.place, **done}]
            whole = item.item(status, [], text)
        else:
            part = item.part(text, item.logprobs)
            more = {"logprobs": item.logprobs} if item.kind == MESSAGE else {}
            found = [
                {"type": f"{stem}.done", **item.place, "text": text, **more},
                {"type": "response.content_part.done", **item.place, "part": part},
            ]
            whole = item.item(status, [part], "")
        self.items.append(whole)
        done_event = {"type": "response.output_item.done", "output_index": item.index}
        return [*found, done_event | {"item": whole}]
