"""A request of /v1/completions, and OpenAI's objects that its outputs become."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from remora.deployments.http.generation.bodies import CompletionBody
from remora.deployments.http.generation.choices import Choice, Choices, let_others_go_on
from remora.deployments.http.generation.logprobs import Line, LogprobWriter, TextOffsets
from remora.deployments.http.generation.request_tracker import OutputStream
from remora.deployments.http.generation.server_state import ServedModel
from remora.engine.types import FinishReason, Grammar, Output, Request, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionJob:
    """One validated text request, of one or many prompts.

    prompts:      ids of each prompt
    num_kept:     of them, that stand before the prompts of a task
    shown:        text of each prompt, when the answer holds it; else empty
    echoes:       text of each prompt, when it is to be repeated; else empty
    n:            how many answers to each prompt are told, of `sampling.n` that are made
    heals:        for each prompt, whether its last token is taken back and written anew
    is_dry:       whether no output is wanted (echo with max_tokens 0): the engine still makes one
                  token, which is left out
    """

    body: CompletionBody
    rid: str
    model: ServedModel
    created: int
    prompts: list[list[int]]
    shown: list[str]
    echoes: list[str]
    n: int
    heals: list[bool]
    sampling: SamplingParams
    grammar: Grammar | None
    is_dry: bool
    num_kept: int
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
                grammar=self.grammar,
                heal=heal,
                lora_id=self.model.lora_id,
                kept_tokens=self.num_kept,
            )
            for ids, heal in zip(self.prompts, self.heals, strict=True)
        )

    async def result(self, outputs: OutputStream) -> dict[str, Any]:
        """Return the whole answer; choice i * n + j is answer j to prompt i."""
        choices = self._choices()
        await choices.gather(outputs)
        answer = self._envelope()
        kept = choices.best(self.n)
        answer["choices"] = [
            self._choice(choices, choice, number)
            async for number, choice in let_others_go_on(enumerate(kept))
        ]
        answer["usage"] = self._usage(choices)
        return answer

    async def chunks(self, outputs: OutputStream) -> AsyncGenerator[dict[str, Any], None]:
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
        envelope: dict[str, Any] = {
            "id": f"cmpl-{self.rid}",
            "object": "text_completion",
            "created": self.created,
            "model": self.model.name,
        }
        return (
            envelope if self.body.service_tier is None else envelope | {"service_tier": "default"}
        )

    def _usage(self, choices: Choices) -> dict[str, Any]:
        usage = choices.usage([len(ids) for ids in self.prompts])
        if self.is_dry:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage

    def _choice(self, choices: Choices, choice: Choice, number: int) -> dict[str, Any]:
        ids = [] if self.is_dry else choice.token_ids
        lines = [] if self.is_dry else choice.logprobs
        value: dict[str, Any] = {
            "index": number,
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
            value["token_ids"] = ids
        return value | self._prompt_fields(choice)

    def _prompt_fields(self, choice: Choice) -> dict[str, Any]:
        """Return what the answer tells of a choice's prompt."""
        fields: dict[str, Any] = {}
        if self.body.return_token_ids:
            fields["prompt_token_ids"] = self.prompts[choice.prompt]
        if self.body.return_prompt_text:
            fields["prompt_text"] = self.shown[choice.prompt]
        return fields

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
        return piece | self._prompt_fields(choice) if begins else piece

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
