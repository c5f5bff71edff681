"""/v1/chat/completions: from a body to a job, and from outputs to OpenAI's objects."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Any

from remora.configs.errors import InvalidRequest
from remora.deployments.http.calls import OpenCall
from remora.deployments.http.errors import unsupported
from remora.deployments.http.logprobs import LogprobWriter, check_scored
from remora.deployments.http.openai_bodies import ChatBody
from remora.deployments.http.prompts import check_room, encode, render
from remora.deployments.http.reply import ParserMaker, Replies, Reply, ReplyPiece
from remora.deployments.http.sampling import openai_sampling
from remora.deployments.http.served import Served, check_together
from remora.deployments.parsers.events import Text
from remora.engine.types import Grammar, Request, SamplingParams, Thinking


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatJob:
    """One validated chat request.

    make_parser:   of one reply's text
    counts_calls:  whether a reply that calls tools ends with `tool_calls`
    """

    body: ChatBody
    rid: str
    model: str
    created: int
    prompt_ids: list[int]
    sampling: SamplingParams
    writer: LogprobWriter
    make_parser: ParserMaker = lambda: None
    counts_calls: bool = True
    grammar: Grammar | None = None
    thinking: Thinking | None = None

    @property
    def streams(self) -> bool:
        """Whether the client wants chunks."""
        return bool(self.body.stream)

    @property
    def requests(self) -> tuple[Request, ...]:
        """What the engine gets."""
        request = Request(
            request_id=self.rid,
            prompt_ids=self.prompt_ids,
            sampling=self.sampling,
            priority=self.body.priority or 0,
            cache_salt=self.body.cache_salt or "",
            grammar=self.grammar,
            thinking=self.thinking,
        )
        return (request,)

    def replies(self) -> Replies:
        """Return a reader of the call's outputs."""
        return Replies(self.sampling.n, self.make_parser, counts_calls=self.counts_calls)

    async def result(self, outputs: OpenCall) -> dict[str, Any]:
        """Return the whole answer."""
        replies = self.replies()
        answer = self._envelope("chat.completion")
        answer["choices"] = [self._choice(reply) for reply in await replies.gather(outputs)]
        answer["usage"] = replies.usage(len(self.prompt_ids))
        if self.body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = self.writer.prompt(replies.all[0].prompt_logprobs or ())
        if self.body.return_token_ids:
            answer["prompt_token_ids"] = self.prompt_ids
        return answer

    async def chunks(self, outputs: OpenCall) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the answer piece by piece: role, text, finish reason; then usage, if asked for."""
        options = self.body.stream_options
        replies = self.replies()
        is_first = True
        async for piece in replies.read(outputs):
            for choice in self._pieces(piece):
                chunk = self._envelope("chat.completion.chunk")
                chunk["choices"] = [choice]
                if self.body.return_token_ids and is_first:
                    chunk["prompt_token_ids"] = self.prompt_ids
                if options and options.include_usage:
                    continuous = options.continuous_usage_stats
                    chunk["usage"] = replies.usage(len(self.prompt_ids)) if continuous else None
                is_first = False
                yield chunk
        if options and options.include_usage:
            usage = replies.usage(len(self.prompt_ids))
            yield self._envelope("chat.completion.chunk") | {"choices": [], "usage": usage}

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self.rid}",
            "object": kind,
            "created": self.created,
            "model": self.model,
        }

    def _choice(self, reply: Reply) -> dict[str, Any]:
        value = {
            "index": reply.index,
            "message": {"role": "assistant", "content": reply.text or "", "refusal": None},
            "logprobs": self.writer.chat(reply.logprobs) if self.body.logprobs else None,
            "finish_reason": reply.finish_reason,
            "stop_reason": reply.stop_reason,
        }
        if self.body.return_token_ids:
            value["token_ids"] = reply.token_ids
        return value

    def _pieces(self, piece: ReplyPiece) -> list[dict[str, Any]]:
        """Return the choice objects that one output becomes."""
        output = piece.output
        deltas = [{"content": event.text} for event in piece.events if isinstance(event, Text)]
        shows_tokens = self.body.logprobs or self.body.return_token_ids
        if not deltas and output.token_ids and shows_tokens:
            deltas = [{"content": ""}]
        pieces = [_piece(output.index, delta) for delta in deltas]
        if pieces and self.body.logprobs:
            pieces[0]["logprobs"] = self.writer.chat(output.logprobs or ())
        if pieces and self.body.return_token_ids:
            pieces[0]["token_ids"] = output.token_ids
        if piece.begins:
            pieces.insert(0, _piece(output.index, {"role": "assistant", "content": ""}))
        if piece.finish_reason is not None:
            last = _piece(output.index, {})
            last["finish_reason"] = piece.finish_reason
            last["stop_reason"] = output.stop_reason
            pieces.append(last)
        return pieces


def _piece(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _check(served: Served, body: ChatBody) -> None:
    served.check_model(body.model)
    check_together(
        stream=bool(body.stream),
        prompt_logprobs=body.prompt_logprobs,
        has_stream_options=body.stream_options is not None,
    )
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true.", "top_logprobs")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise unsupported("best_of", "best_of is supported only when it equals n.")


async def _prompt(served: Served, body: ChatBody) -> list[int]:
    text = await render(served.tokenizer, served.plan, body.messages, body)
    (ids,) = await encode(
        served.tokenizer,
        served.plan,
        [text],
        add_special_tokens=bool(body.add_special_tokens),
        param="messages",
    )
    return ids


async def prepare_chat(served: Served, body: ChatBody, rid: str) -> ChatJob:
    """Check everything that can be checked before the engine is asked.

    Raises InvalidRequest, PromptTooLong, UnknownModel.
    """
    _check(served, body)
    max_tokens, limit_name = body.max_completion_tokens, "max_completion_tokens"
    if max_tokens is None:
        max_tokens, limit_name = body.max_tokens, "max_tokens"
    sampling = openai_sampling(
        body,
        defaults=served.generation_defaults,
        vocab_size=served.tokenizer.vocab_size,
        max_tokens=max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        names={"max_tokens": limit_name},
    )
    ids = await _prompt(served, body)
    if not body.stream:  # a stream is written bit by bit
        check_scored(sampling, len(ids), sampling.max_tokens or 0, "top_logprobs")
    check_room(len(ids), max_tokens, served.plan, "messages")
    recommended = served.generation_defaults.get("max_tokens")
    if max_tokens is None and recommended is not None:
        room = served.plan.max_sequence_tokens - len(ids)
        sampling = replace(sampling, max_tokens=min(recommended, room))
    return ChatJob(
        body=body,
        rid=rid,
        model=served.plan.served_model_name,
        created=int(time.time()),
        prompt_ids=ids,
        sampling=sampling,
        writer=LogprobWriter(served.tokenizer, as_ids=bool(body.return_tokens_as_token_ids)),
    )
