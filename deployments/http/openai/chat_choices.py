"""OpenAI's choice objects of a chat: complete choices, and the deltas of streamed choices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from remora.deployments.http.generation.bodies import ChatBody
from remora.deployments.http.generation.logprobs import LogprobWriter
from remora.deployments.http.generation.replies import TOOL_CALLS, Reply, ToolCall
from remora.deployments.parsers.events import CallArguments, CallBegun, Reasoning, ReplyEvent, Text
from remora.engine.types import Output

REASONING_NAMES = ("reasoning", "reasoning_content")


def reasoning_names(field: str) -> tuple[str, ...]:
    """Return the names of the reasoning fields; `field` is the setting `api.reasoning_field`."""
    return REASONING_NAMES if field == "both" else (field,)


class ChoiceWriter:
    """Writes the choices of one chat.

    names:  names of the reasoning fields
    """

    def __init__(self, body: ChatBody, logprobs: LogprobWriter, names: tuple[str, ...]) -> None:
        self._body = body
        self._logprobs = logprobs
        self._names = () if body.include_reasoning is False else names
        self.shows_reasoning = bool(self._names)
        self.shows_tokens = bool(body.logprobs or body.return_token_ids)

    def whole(self, reply: Reply) -> dict[str, Any]:
        """Return one complete choice."""
        value = {
            "index": reply.index,
            "message": self._message(reply),
            "logprobs": self._logprobs.chat(reply.logprobs) if self._body.logprobs else None,
            "finish_reason": self._finish_reason(reply.reason),
            "stop_reason": reply.stop_reason,
        }
        if reply.score is not None:
            value["beam_score"] = reply.score
        if self._body.return_token_ids:
            value["token_ids"] = reply.token_ids
        return value

    def _message(self, reply: Reply) -> dict[str, Any]:
        has_more = reply.calls or reply.reasoning
        content = reply.text if reply.texts or not has_more else None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reply.reasoning:
            message |= dict.fromkeys(self._names, "".join(reply.reasoning))
        if reply.calls and self._body.is_old:
            message["function_call"] = _function(reply.calls[0])
        elif reply.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": _function(call)}
                for call in reply.calls
            ]
        return message

    def pieces(
        self, reply: Reply, output: Output, events: Sequence[ReplyEvent], *, begins: bool
    ) -> list[dict[str, Any]]:
        """Return the choice objects of one output: role, deltas, finish reason."""
        deltas = [delta for event in events if (delta := self._delta(event))]
        if not deltas and output.token_ids and self.shows_tokens:
            deltas = [{"content": ""}]
        pieces = [_piece(output.index, delta) for delta in deltas]
        if pieces and self._body.logprobs:
            pieces[0]["logprobs"] = self._logprobs.chat(output.logprobs or ())
        if pieces and self._body.return_token_ids:
            pieces[0]["token_ids"] = output.token_ids
        if begins:
            pieces.insert(0, _piece(output.index, {"role": "assistant", "content": ""}))
        if output.finish_reason is not None:
            last = _piece(output.index, {})
            last["finish_reason"] = self._finish_reason(reply.reason)
            last["stop_reason"] = output.stop_reason
            if output.score is not None:
                last["beam_score"] = output.score
            pieces.append(last)
        return pieces

    def delta(self, index: int, event: ReplyEvent) -> dict[str, Any]:
        """Return the choice object of one event."""
        return _piece(index, self._delta(event))

    def _delta(self, event: ReplyEvent) -> dict[str, Any]:
        """Return the delta of an event; empty if the event is not shown."""
        match event:
            case Text(text):
                return {"content": text}
            case Reasoning(text):
                return dict.fromkeys(self._names, text)
            case CallBegun(number, call_id, name):
                function = {"name": name, "arguments": ""}
                return self._call_delta(number, function, id=call_id, type="function")
            case CallArguments(number, text):
                return self._call_delta(number, {"arguments": text})

    def _call_delta(self, number: int, function: dict[str, str], **named: str) -> dict[str, Any]:
        if self._body.is_old:
            return {"function_call": function} if number == 0 else {}
        return {"tool_calls": [{"index": number, **named, "function": function}]}

    def _finish_reason(self, reason: str | None) -> str | None:
        return "function_call" if reason == TOOL_CALLS and self._body.is_old else reason


def _function(call: ToolCall) -> dict[str, str]:
    return {"name": call.name, "arguments": call.arguments}


def _piece(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
