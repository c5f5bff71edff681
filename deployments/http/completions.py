"""/v1/completions: from a body to a job, and from outputs to OpenAI's objects."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from remora.configs.errors import InvalidRequest, PromptTooLong
from remora.deployments.http.calls import OpenCall
from remora.deployments.http.choices import Choice, Choices
from remora.deployments.http.errors import unsupported
from remora.deployments.http.fields import MAX_SEQUENCES
from remora.deployments.http.logprobs import Line, LogprobWriter, TextOffsets, check_scored
from remora.deployments.http.openai_bodies import CompletionBody
from remora.deployments.http.prompts import check_room, prompt_ids
from remora.deployments.http.sampling import openai_sampling
from remora.deployments.http.served import Served, check_together
from remora.engine.types import FinishReason, Output, Request, SamplingParams

DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionJob:
    """One validated text request, of one or many prompts.

    prompts:      ids of each prompt
    echoes:       text of each prompt, when it is to be repeated; else empty
    is_dry:       whether no output is wanted (echo with max_tokens 0): the engine still makes one
                  token, which is left out
    """

    body: CompletionBody
    rid: str
    model: str
    created: int
    prompts: list[list[int]]
    echoes: list[str]
    sampling: SamplingParams
    is_dry: bool
    writer: LogprobWriter

    @property
    def streams(self) -> bool:
        """Whether the client wants chunks."""
        return bool(self.body.stream)

    @property
    def requests(self) -> tuple[Request, ...]:
        """What the engine gets."""
        return tuple(
            Request(
                request_id=self.rid,
                prompt_ids=ids,
                sampling=self.sampling,
                priority=self.body.priority or 0,
                cache_salt=self.body.cache_salt or "",
            )
            for ids in self.prompts
        )

    async def result(self, outputs: OpenCall) -> dict[str, Any]:
        """Return the whole answer; choice i * n + j is answer j to prompt i."""
        choices = self._choices()
        await choices.gather(outputs)
        answer = self._envelope()
        answer["choices"] = [self._choice(choices, choice) async for choice in choices.each()]
        answer["usage"] = self._usage(choices)
        return answer

    async def chunks(self, outputs: OpenCall) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the answer piece by piece; then usage, if asked for."""
        options = self.body.stream_options
        choices = self._choices()
        begun: dict[int, TextOffsets | None] = {}
        async for event in outputs:
            _, output = event
            choice = choices.add(event)
            piece = self._piece(choices, choice, output, begun)
            if piece is None:
                continue
            chunk = self._envelope() | {"choices": [piece]}
            if options and options.include_usage:
                chunk["usage"] = self._usage(choices) if options.continuous_usage_stats else None
            yield chunk
        if options and options.include_usage:
            yield self._envelope() | {"choices": [], "usage": self._usage(choices)}

    def _choices(self) -> Choices:
        return Choices(len(self.prompts), self.sampling.n)

    def _envelope(self) -> dict[str, Any]:
        return {
            "id": f"cmpl-{self.rid}",
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
        }

    def _usage(self, choices: Choices) -> dict[str, Any]:
        usage = choices.usage([len(ids) for ids in self.prompts])
        if self.is_dry:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage

    def _choice(self, choices: Choices, choice: Choice) -> dict[str, Any]:
        ids = [] if self.is_dry else choice.token_ids
        lines = [] if self.is_dry else choice.logprobs
        value: dict[str, Any] = {
            "index": choices.number(choice),
            "text": self._echo(choice) + ("" if self.is_dry else choice.text),
            "logprobs": None,
            **self._ending(choice),
        }
        if self.body.logprobs is not None:
            value["logprobs"] = self._logprobs(
                choices, choice, ids, lines, self._offsets(), begins=True
            )
        if self.body.prompt_logprobs is not None:
            value["prompt_logprobs"] = self.writer.prompt(choices.prompt_logprobs(choice) or ())
        if self.body.return_token_ids:
            value |= {"prompt_token_ids": self.prompts[choice.prompt], "token_ids": ids}
        return value

    def _piece(
        self,
        choices: Choices,
        choice: Choice,
        output: Output,
        begun: dict[int, TextOffsets | None],
    ) -> dict[str, Any] | None:
        """Return the choice object of one output; None if it would say nothing.

        begun:  number of a choice that has said something -> where its tokens' texts begin, if
                that will be told; updated
        """
        number = choices.number(choice)
        begins = number not in begun
        ids = () if self.is_dry else output.token_ids
        text = "" if self.is_dry else output.text
        if begins:
            text = self._echo(choice) + text
        shows_tokens = self.body.logprobs is not None or self.body.return_token_ids
        if not (text or output.finish_reason or (ids and shows_tokens)):
            return None
        piece: dict[str, Any] = {
            "index": number,
            "text": text,
            "logprobs": None,
            "finish_reason": None,
        }
        if output.finish_reason is not None:
            piece |= self._ending(output)
        if begins:
            begun[number] = None if self.body.logprobs is None else self._offsets()
        offsets = begun[number]
        if offsets is not None:
            lines = () if self.is_dry else output.logprobs or ()
            piece["logprobs"] = self._logprobs(choices, choice, ids, lines, offsets, begins=begins)
        if self.body.return_token_ids:
            piece["token_ids"] = ids
            if begins:
                piece["prompt_token_ids"] = self.prompts[choice.prompt]
        return piece

    def _ending(self, ended: Choice | Output) -> dict[str, Any]:
        if self.is_dry and ended.finish_reason is FinishReason.STOP:
            # The token that nobody asked for was an end; the answer's end is the limit of 0.
            return {"finish_reason": FinishReason.LENGTH, "stop_reason": None}
        return {"finish_reason": ended.finish_reason, "stop_reason": ended.stop_reason}

    def _echo(self, choice: Choice) -> str:
        return self.echoes[choice.prompt] if self.echoes else ""

    def _logprobs(
        self,
        choices: Choices,
        choice: Choice,
        ids: Sequence[int],
        lines: Sequence[Line],
        offsets: TextOffsets,
        *,
        begins: bool,
    ) -> dict[str, Any]:
        starts: list[int] = []
        shown = ids
        if begins and self.echoes:
            prompt = self.prompts[choice.prompt]
            starts = offsets.of_prompt(prompt, self._echo(choice))
            shown = (*prompt, *ids)
            lines = (*(choices.prompt_logprobs(choice) or ()), *lines)
        return self.writer.completion(shown, lines, starts + offsets.of_output(ids))

    def _offsets(self) -> TextOffsets:
        return self.writer.offsets(shows_special=not self.sampling.skip_special_tokens)


def _check(body: CompletionBody) -> None:
    check_together(
        stream=bool(body.stream),
        prompt_logprobs=body.prompt_logprobs,
        has_stream_options=body.stream_options is not None,
    )
    n = body.n or 1
    if body.best_of is not None and body.best_of != n:
        raise unsupported("best_of", "best_of is supported only when it equals n.")
    if n * len(body.prompt) > MAX_SEQUENCES:
        message = f"n times the number of prompts must not exceed {MAX_SEQUENCES}."
        raise InvalidRequest(message, "n")
    if body.echo and body.logprobs is not None and body.stream and n > 1:
        raise unsupported("echo", "echo with logprobs and n > 1 is not available with stream.")
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequest("max_tokens may be 0 only with echo.", "max_tokens")


async def prepare_completion(served: Served, body: CompletionBody, rid: str) -> CompletionJob:
    """Check everything that can be checked before the engine is asked.

    Raises InvalidRequest, PromptTooLong, UnknownModel.
    """
    served.check_model(body.model)
    _check(body)
    is_dry = body.max_tokens == 0
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else max(1, body.max_tokens)
    echoed_logprobs = body.logprobs if body.echo else None
    sampling = openai_sampling(
        body,
        defaults=served.generation_defaults,
        vocab_size=served.tokenizer.vocab_size,
        max_tokens=max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=_larger(body.prompt_logprobs, echoed_logprobs),
    )
    prompts = await prompt_ids(
        served.tokenizer,
        served.plan,
        body.prompt,
        add_special_tokens=body.add_special_tokens is not False,
        param="prompt",
    )
    for ids in prompts:
        if is_dry:
            _check_dry_room(len(ids), served.plan.max_sequence_tokens)
        check_room(len(ids), max_tokens, served.plan, "prompt")
    check_scored(sampling, sum(map(len, prompts)), len(prompts) * max_tokens, "logprobs")
    return CompletionJob(
        body=body,
        rid=rid,
        model=served.plan.served_model_name,
        created=int(time.time()),
        prompts=prompts,
        echoes=await _echoes(served, body) if body.echo else [],
        sampling=sampling,
        is_dry=is_dry,
        writer=LogprobWriter(served.tokenizer, as_ids=bool(body.return_tokens_as_token_ids)),
    )


def _check_dry_room(num_prompt: int, limit: int) -> None:
    """Raise PromptTooLong where there is no room for the token that is made and left out."""
    if num_prompt >= limit:
        message = (
            f"With max_tokens 0, the prompt may have at most {limit - 1} tokens here (one less "
            f"than the maximum of {limit}). However, you requested {num_prompt} tokens "
            f"({num_prompt} in the prompt, 0 in the completion). Please shorten the prompt."
        )
        raise PromptTooLong(message, "prompt")


def _larger(first: int | None, second: int | None) -> int | None:
    return max((k for k in (first, second) if k is not None), default=None)


async def _echoes(served: Served, body: CompletionBody) -> list[str]:
    def text_of(prompt: str | list[int]) -> str:
        if isinstance(prompt, str):
            return prompt
        return served.tokenizer.decode(prompt, skip_special_tokens=False)

    return await asyncio.to_thread(lambda: [text_of(prompt) for prompt in body.prompt])
