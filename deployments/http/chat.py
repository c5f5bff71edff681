"""/v1/chat/completions: from a body to a job, and from outputs to OpenAI's objects."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Any

from remora.configs.errors import InvalidRequest
from remora.deployments.http.calls import OpenCall
from remora.deployments.http.choices import Choice, Choices
from remora.deployments.http.errors import unsupported
from remora.deployments.http.logprobs import LogprobWriter, check_scored
from remora.deployments.http.openai_bodies import ChatBody
from remora.deployments.http.prompts import check_room, encode, render
from remora.deployments.http.sampling import openai_sampling
from remora.deployments.http.served import Served, check_together
from remora.engine.types import Output, Request, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatJob:
    """One validated chat request."""

    body: ChatBody
    rid: str
    model: str
    created: int
    prompt_ids: list[int]
    sampling: SamplingParams
    writer: LogprobWriter

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
        )
        return (request,)

    async def result(self, outputs: OpenCall) -> dict[str, Any]:
        """Return the whole answer."""
        choices = Choices(1, self.sampling.n)
        await choices.gather(outputs)
        answer = self._envelope("chat.completion")
        answer["choices"] = [self._choice(choice) async for choice in choices.each()]
        answer["usage"] = choices.usage([len(self.prompt_ids)])
        if self.body.prompt_logprobs is not None:
            lines = next(iter(choices)).prompt_logprobs or ()
            answer["prompt_logprobs"] = self.writer.prompt(lines)
        if self.body.return_token_ids:
            answer["prompt_token_ids"] = self.prompt_ids
        return answer

    async def chunks(self, outputs: OpenCall) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the answer piece by piece: role, text, finish reason; then usage, if asked for."""
        options = self.body.stream_options
        choices = Choices(1, self.sampling.n)
        begun: set[int] = set()
        async for event in outputs:
            _, output = event
            choice = choices.add(event)
            for piece in self._pieces(output, begins=output.index not in begun):
                chunk = self._envelope("chat.completion.chunk")
                chunk["choices"] = [piece]
                if self.body.return_token_ids and not begun:
                    chunk["prompt_token_ids"] = self.prompt_ids
                if options and options.include_usage:
                    continuous = options.continuous_usage_stats
                    chunk["usage"] = self._usage(choices) if continuous else None
                begun.add(choice.index)
                yield chunk
        if options and options.include_usage:
            usage = self._usage(choices)
            yield self._envelope("chat.completion.chunk") | {"choices": [], "usage": usage}

    def _usage(self, choices: Choices) -> dict[str, Any]:
        return choices.usage([len(self.prompt_ids)])

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self.rid}",
            "object": kind,
            "created": self.created,
            "model": self.model,
        }

    def _choice(self, choice: Choice) -> dict[str, Any]:
        value = {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self.writer.chat(choice.logprobs) if self.body.logprobs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self.body.return_token_ids:
            value["token_ids"] = choice.token_ids
        return value

    def _pieces(self, output: Output, *, begins: bool) -> list[dict[str, Any]]:
        """Return the choice objects that one output becomes: up to three."""
        pieces = []
        if begins:
            pieces.append(_piece(output.index, {"role": "assistant", "content": ""}))
        shows_tokens = self.body.logprobs or self.body.return_token_ids
        if output.text or (output.token_ids and shows_tokens):
            piece = _piece(output.index, {"content": output.text})
            if self.body.logprobs:
                piece["logprobs"] = self.writer.chat(output.logprobs or ())
            if self.body.return_token_ids:
                piece["token_ids"] = output.token_ids
            pieces.append(piece)
        if output.finish_reason is not None:
            piece = _piece(output.index, {})
            piece["finish_reason"] = output.finish_reason
            piece["stop_reason"] = output.stop_reason
            pieces.append(piece)
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
