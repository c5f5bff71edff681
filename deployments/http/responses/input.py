"""Input of a response: earlier responses of the conversation, and items referenced by id."""

from __future__ import annotations

from typing import Any

from remora.configs.errors import InvalidRequest
from remora.deployments.http.core.body_limits import max_pieces
from remora.deployments.http.core.fields import parse
from remora.deployments.http.responses.archive import Archive, Record, UnknownResponse
from remora.deployments.http.responses.bodies import ConversationBody
from remora.deployments.http.responses.items import REFERENCE, Item

_CALLS = frozenset({"function_call", "custom_tool_call"})
_PREVIOUS = "previous_response_id"


async def earlier_items(archive: Archive, body: ConversationBody) -> list[Item]:
    """Return the items of the conversation that a body continues.

    Raises InvalidRequest, Unavailable.
    """
    if body.previous_response_id is None:
        return []
    try:
        records = await archive.chain(body.previous_response_id, _PREVIOUS)
    except UnknownResponse as error:
        # As in OpenAI's API: the body is at fault, not the path.
        raise InvalidRequest(error.message, _PREVIOUS, "previous_response_not_found") from None
    found = sum(len(record.items) + len(record.response["output"]) for record in records)
    if found > max_pieces():
        message = f"The conversation has {found} items; at most {max_pieces()} are allowed."
        raise InvalidRequest(message, _PREVIOUS, limit="max_messages")
    return [item for record in records for item in _whole_items(record)]


async def with_references(archive: Archive, items: list[Item]) -> list[Item]:
    """Return the items, with each reference replaced by the stored item.

    Raises InvalidRequest, UnknownResponse, Unavailable.
    """
    read: dict[str, Record] = {}
    resolved = []
    for place, item in enumerate(items):
        if item.type == REFERENCE:
            assert item.id is not None  # required by the body's validation
            param = f"input[{place}].id"
            found = await archive.find_item(item.id, param, read)
            if _is_cut(found):
                message = f"The call {item.id!r} was cut off; it cannot be gone on from."
                raise InvalidRequest(message, param)
            item = _parsed(found, f"The item {item.id!r} cannot be used again", param)
        resolved.append(item)
    return resolved


def _whole_items(record: Record) -> list[Item]:
    """Return the items that a response adds to a conversation, without calls that were cut off."""
    written = [*record.items, *record.response["output"]]
    what = f"The response {record.response['id']!r} cannot be continued"
    return [_parsed(item, what, _PREVIOUS) for item in written if not _is_cut(item)]


def _is_cut(item: dict[str, Any]) -> bool:
    return item["type"] in _CALLS and item.get("status") == "incomplete"


def _parsed(item: dict[str, Any], what: str, param: str) -> Item:
    """Return a stored item as an input item.

    Raises InvalidRequest if the model wrote a value that no input may hold, such as an invalid tool
    name.
    """
    try:
        return parse(Item, item)
    except InvalidRequest as error:
        raise InvalidRequest(f"{what}: {error.message}", param) from None
