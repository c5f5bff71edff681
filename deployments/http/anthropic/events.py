"""Content blocks of a message, and the events of a streamed message.

The same code builds complete and streamed messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from remora.configs.errors import InvalidRequest
from remora.deployments.http.core.wire import parse_json
from remora.deployments.parsers.events import (
    CallArguments,
    CallBegun,
    Reasoning,
    ReplyEvent,
    Text,
)

Event = dict[str, Any]

TEXT, THINKING, TOOL_USE = "text", "thinking", "tool_use"
_NEW: Mapping[str, dict[str, Any]] = MappingProxyType(
    {TEXT: {"text": ""}, THINKING: {"thinking": "", "signature": ""}}
)
# Type of a block -> type of its deltas, and the field that holds their text.
_DELTAS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        TEXT: ("text_delta", "text"),
        THINKING: ("thinking_delta", "thinking"),
        TOOL_USE: ("input_json_delta", "partial_json"),
    }
)


class BlockWriter:
    """Writes one reply as blocks.

    omits_thinking:  whether the blocks of reasoning have no text
    blocks:  all blocks so far; the last block has no text until it ends
    """

    def __init__(self, *, omits_thinking: bool = False) -> None:
        self._omits_thinking = omits_thinking
        self.blocks: list[dict[str, Any]] = []
        self._is_open = False
        self._pieces: list[str] = []

    def take(self, events: Iterable[ReplyEvent]) -> list[Event]:
        """Add events of the reply; return the API events."""
        found: list[Event] = []
        for event in events:
            match event:
                case Text(text):
                    found += self._grow(TEXT, text)
                case Reasoning(text):
                    found += self._think(text)
                case CallBegun(_, call_id, name):
                    found += self._begin(TOOL_USE, {"id": call_id, "name": name, "input": {}})
                case CallArguments(_, text):
                    found += self._grow(TOOL_USE, text)
        return found

    def finish(self) -> list[Event]:
        """End the reply. An empty reply gets one empty text block."""
        begun = [] if self.blocks else self._begin(TEXT, _NEW[TEXT])
        return begun + self._end()

    def _think(self, text: str) -> list[Event]:
        if not self._omits_thinking:
            return self._grow(THINKING, text)
        is_begun = self._is_open and self.blocks[-1]["type"] == THINKING
        return [] if is_begun else self._begin(THINKING, _NEW[THINKING])

    def _grow(self, kind: str, text: str) -> list[Event]:
        found = []
        if not self._is_open or self.blocks[-1]["type"] != kind:
            found = self._begin(kind, _NEW[kind])
        self._pieces.append(text)
        delta_type, name = _DELTAS[kind]
        delta = {"type": delta_type, name: text}
        return [*found, {"type": "content_block_delta", "index": self._index, "delta": delta}]

    def _begin(self, kind: str, fields: Mapping[str, Any]) -> list[Event]:
        found = self._end()
        self.blocks.append({"type": kind, **fields})
        self._is_open, self._pieces = True, []
        begun = {"type": "content_block_start", "index": self._index}
        # A copy, since the block changes later.
        return [*found, begun | {"content_block": dict(self.blocks[-1])}]

    def _end(self) -> list[Event]:
        if not self._is_open:
            return []
        self._is_open = False
        block, text = self.blocks[-1], "".join(self._pieces)
        if block["type"] == TOOL_USE:
            block["input"] = _object(text)
        else:
            block[block["type"]] = text
        return [{"type": "content_block_stop", "index": self._index}]

    @property
    def _index(self) -> int:
        return len(self.blocks) - 1


def _object(arguments: str) -> dict[str, Any]:
    """Return a call's arguments; empty if they are cut off and therefore not a JSON object."""
    try:
        value = parse_json(arguments.encode())
    except (InvalidRequest, UnicodeEncodeError):
        return {}
    return value if isinstance(value, dict) else {}
