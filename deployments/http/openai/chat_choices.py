"""OpenAI's choice objects of a chat: complete choices, and the deltas of streamed choices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from remora.deployments.http.generation.bodies import ChatBody
from remora.deployments.http.generation.logprobs import LogprobWriter
from remora.deployments.http.generation.replies import TOOL_CALLS, Reply, ToolCall
from remora.deployments.http.generation.tools import CUSTOM, FUNCTION, custom_input
from remora.deployments.http.openai.style import AnswerStyle, matched_stop, shown_states
from remora.deployments.parsers.events import CallArguments, CallBegun, Reasoning, ReplyEvent, Text
from remora.engine.types import Output

REASONING_NAMES = ("reasoning", "reasoning_content")


def reasoning_names(field: str) -> tuple[str, ...]:
    """Return the names of the reasoning fields; `field` is the setting `api.reasoning_field`."""
    return REASONING_NAMES if field == "both" else (field,)


class ChoiceWriter:
    """Writes the choices of one chat.

    names:  names of the reasoning fields
    echo:   text that the answer repeats before its own
    num_prompt:  tokens of the prompt
    """

    def __init__(
        self,
        body: ChatBody,
        logprobs: LogprobWriter,
        names: tuple[str, ...],
        style: AnswerStyle,
        *,
        num_prompt: int,
        echo: str = "",
    ) -> None:
        self._body = body
        self._logprobs = logprobs
        self._all_names = names
        self._names = () if body.include_reasoning is False else names
        self._style = style
        self._echo = echo
        self._num_prompt = num_prompt
        self._custom = body.custom_names
        self.shows_reasoning = bool(self._names)
        self.shows_tokens = bool(body.logprobs or body.return_token_ids or style.per_token)

    def whole(self, reply: Reply) -> dict[str, Any]:
        """Return one complete choice."""
        value = {
            "index": reply.index,
            "message": self._message(reply),
            "logprobs": self._logprobs.chat(reply.logprobs) if self._body.logprobs else None,
            "finish_reason": self._finish_reason(reply.reason),
            "stop_reason": reply.stop_reason,
            "matched_stop": matched_stop(self._style, reply),
        }
        if reply.score is not None:
            value["beam_score"] = reply.score
        if self._body.return_token_ids:
            value["token_ids"] = reply.token_ids
        elif self._style.null_fields:
            value["token_ids"] = None
        if self._body.return_hidden_states:
            value["hidden_states"] = shown_states(reply, self._num_prompt)
        return value

    def _message(self, reply: Reply) -> dict[str, Any]:
        has_more = reply.calls or reply.reasoning
        content = self._echo + reply.text if reply.texts or self._echo or not has_more else None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self._style.null_fields:
            message |= dict.fromkeys(self._all_names)
        if reply.reasoning:
            message |= dict.fromkeys(self._names, "".join(reply.reasoning))
        if reply.calls and self._body.is_old:
            message["function_call"] = _function(reply.calls[0])
        elif reply.calls:
            message["tool_calls"] = [self._call(call) for call in reply.calls]
        return message

    def _call(self, call: ToolCall) -> dict[str, Any]:
        if call.name in self._custom:
            custom = {"name": call.name, "input": custom_input(call.arguments)}
            return {"id": call.id, "type": CUSTOM, CUSTOM: custom}
        return {"id": call.id, "type": FUNCTION, FUNCTION: _function(call)}

    def pieces(
        self, reply: Reply, output: Output, events: Sequence[ReplyEvent], *, begins: bool
    ) -> list[dict[str, Any]]:
        """Return the choice objects of one output: role, deltas, finish reason."""
        deltas = self._deltas(reply, output, events)
        if not deltas and output.token_ids and self.shows_tokens:
            deltas = [{"content": ""}]
        if self._style.per_token and len(deltas) > 1:
            deltas = [_joined(deltas)]
        pieces = [_piece(output.index, delta) for delta in deltas]
        if pieces and self._body.logprobs:
            pieces[0]["logprobs"] = self._logprobs.chat(output.logprobs or ())
        if pieces and self._body.return_token_ids:
            pieces[0]["token_ids"] = output.token_ids
        if begins:
            begun = [{"role": "assistant", "content": ""}]
            begun += [{"content": self._echo}] if self._echo else []
            pieces = [*(_piece(output.index, delta) for delta in begun), *pieces]
        if output.finish_reason is not None:
            last = _piece(output.index, {"content": ""} if self._style.null_fields else {})
            last["finish_reason"] = self._finish_reason(reply.reason)
            last["stop_reason"] = output.stop_reason
            last["matched_stop"] = matched_stop(self._style, reply)
            if output.score is not None:
                last["beam_score"] = output.score
            if self._body.return_hidden_states:
                last["hidden_states"] = shown_states(reply, self._num_prompt)
            pieces.append(last)
        return pieces

    def delta(self, index: int, event: ReplyEvent) -> dict[str, Any]:
        """Return the choice object of one event."""
        return _piece(index, self._delta(event))

    def _deltas(
        self, reply: Reply, output: Output, events: Sequence[ReplyEvent]
    ) -> list[dict[str, Any]]:
        if not self._custom:
            return [delta for event in events if (delta := self._delta(event))]
        deltas = []
        for event in events:
            deltas += self._custom_deltas(reply, event)
        if output.finish_reason is not None and reply.calls:
            deltas += self._input_delta(len(reply.calls) - 1, reply.calls[-1])
        return deltas

    def _custom_deltas(self, reply: Reply, event: ReplyEvent) -> list[dict[str, Any]]:
        """Return the deltas of an event of a reply that may call custom tools.

        Their input is sent as a whole, when the call has ended.
        """
        calls = reply.calls
        if isinstance(event, CallArguments) and calls[event.number].name in self._custom:
            return []
        deltas: list[dict[str, Any]] = []
        if isinstance(event, CallBegun):
            if event.number:
                deltas += self._input_delta(event.number - 1, calls[event.number - 1])
            if event.name in self._custom:
                begun = {"id": event.id, "type": CUSTOM, CUSTOM: {"name": event.name, "input": ""}}
                return [*deltas, {"tool_calls": [{"index": event.number, **begun}]}]
        delta = self._delta(event)
        return [*deltas, delta] if delta else deltas

    def _input_delta(self, number: int, call: ToolCall) -> list[dict[str, Any]]:
        if call.name not in self._custom:
            return []
        custom = {"input": custom_input(call.arguments)}
        return [{"tool_calls": [{"index": number, CUSTOM: custom}]}]

    def _delta(self, event: ReplyEvent) -> dict[str, Any]:
        """Return the delta of an event; empty if the event is not shown."""
        match event:
            case Text(text):
                return {"content": text}
            case Reasoning(text):
                return dict.fromkeys(self._names, text)
            case CallBegun(number, call_id, name):
                function = {"name": name, "arguments": ""}
                return self._call_delta(number, function, id=call_id, type=FUNCTION)
            case CallArguments(number, text):
                return self._call_delta(number, {"arguments": text})

    def _call_delta(self, number: int, function: dict[str, str], **named: str) -> dict[str, Any]:
        if self._body.is_old:
            return {"function_call": function} if number == 0 else {}
        return {"tool_calls": [{"index": number, **named, FUNCTION: function}]}

    def _finish_reason(self, reason: str | None) -> str | None:
        return "function_call" if reason == TOOL_CALLS and self._body.is_old else reason


def _function(call: ToolCall) -> dict[str, str]:
    return {"name": call.name, "arguments": call.arguments}


def _piece(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _joined(deltas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return several deltas of one token as one."""
    whole: dict[str, Any] = {}
    for delta in deltas:
        for name, value in delta.items():
            if name == "tool_calls":
                whole[name] = _joined_calls(whole.get(name, []), value)
            elif isinstance(value, str):
                whole[name] = whole.get(name, "") + value
            else:  # a function_call in the old form
                whole[name] = _joined([whole.get(name, {}), value])
    return whole


def _joined_calls(
    calls: list[dict[str, Any]], more: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the calls of a delta with those of the next; a call has one entry."""
    for entry in more:
        if not calls or calls[-1]["index"] != entry["index"]:
            calls = [*calls, entry]
            continue
        last = dict(calls[-1])
        for kind in (FUNCTION, CUSTOM):
            if kind in entry:
                last[kind] = _joined([last.get(kind, {}), entry[kind]])
        calls = [*calls[:-1], last]
    return calls
