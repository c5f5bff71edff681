"""/v1/completions: turns a body into a job, and outputs into OpenAI's completion objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from remora.deployments.http.core.sse import Chunk, ChunkWriter, Frame, TextFrame
from remora.deployments.http.generation.bodies import CompletionBody
from remora.deployments.http.generation.completions import PreparedCompletion, prepare_completion
from remora.deployments.http.generation.endpoint import Job
from remora.deployments.http.generation.logprobs import LogprobEntry, TextOffsets
from remora.deployments.http.generation.replies import Replies, Reply, with_pauses
from remora.deployments.http.generation.request_context import RequestContext
from remora.deployments.http.generation.request_tracker import OutputStream
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.http.openai.style import (
    AnswerStyle,
    matched_stop,
    shown_states,
    style_of,
)
from remora.deployments.observing.reply_clock import ReplyClock
from remora.engine.types import FinishReason, Output


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionJob(Job):
    """A validated completion request."""

    completion: PreparedCompletion
    style: AnswerStyle

    async def result(self, outputs: OutputStream) -> dict[str, Any]:
        """Return the complete answer; choice i * n + j is reply j to prompt i."""
        choices = _ChoiceWriter(self.completion, self.style)
        clock = ReplyClock(self.context.started_ns)
        await choices.replies.gather(outputs, clock)
        answer = choices.envelope()
        kept = choices.replies.best(self.completion.n)
        answer["choices"] = [
            choices.whole(reply, number) async for number, reply in with_pauses(enumerate(kept))
        ]
        answer["usage"] = choices.usage()
        if self.style.shows_metrics:
            answer["metrics"] = choices.replies.metrics(clock)
        return answer

    def writer(self) -> CompletionWriter:
        """Return the writer of the streamed answer."""
        return CompletionWriter(self.completion, self.style)


class CompletionWriter(ChunkWriter):
    """Writes streamed completions: a chunk for each output with a choice to show; then usage."""

    def __init__(self, completion: PreparedCompletion, style: AnswerStyle) -> None:
        self._completion = completion
        self._style = style
        self._choices = _ChoiceWriter(completion, style)
        # Outputs that arrived before the log-probabilities of their prompt, which they repeat.
        self._early: dict[int, list[Output]] = {}
        self._clock = ReplyClock(completion.context.started_ns)

    def chunks(self, prompt: int, output: Output) -> Sequence[Chunk]:
        """Return the chunks of one output; none if its choice would be empty."""
        self._clock.note(output)
        if self._choices.must_wait(prompt, output):
            self._early.setdefault(prompt, []).append(output)
            return ()
        chunks = self._chunks(prompt, output)
        for early in self._early.pop(prompt, ()):
            chunks += self._chunks(prompt, early)
        return chunks

    def _chunks(self, prompt: int, output: Output) -> list[Chunk]:
        is_split = self._style.per_token and len(output.token_ids) > 1
        chunks = []
        for one in self._completion.logprobs.split(output) if is_split else (output,):
            reply = self._choices.replies.add(prompt, one)
            choice = self._choices.piece(reply, one)
            if choice is not None:
                chunks.append(self._chunk(choice))
        return chunks

    async def end(self) -> Sequence[Chunk]:
        """Return the usage chunk, if requested."""
        if not self._style.shows_usage:
            return ()
        chunk = self._choices.envelope() | {"choices": [], "usage": self._choices.usage()}
        if self._style.shows_metrics:
            chunk["metrics"] = self._choices.replies.metrics(self._clock)
        return (chunk,)

    def framed(self, frame: Frame) -> Callable[[int, Output], bytes]:
        """Return a function that returns `chunks` as bytes.

        A chunk that differs only in its text reuses an encoded frame: only the text is encoded.
        """
        general = super().framed(frame)
        choices, body = self._choices, self._completion.body
        is_plain = body.logprobs is None and not body.return_token_ids
        style = self._style
        if not is_plain or style.is_continuous or style.per_token or self._completion.is_dry:
            return general
        frames = [
            TextFrame(lambda text, n=number: self._chunk(_text_choice(n, text)), frame)  # type: ignore[misc]
            for number in range(len(choices.replies.all))
        ]

        def write(prompt: int, output: Output) -> bytes:
            reply = choices.replies.of(prompt, output)
            number = choices.replies.number(reply)
            if number not in choices.begun or output.finish_reason is not None:
                return general(prompt, output)
            reply.add(output)
            return frames[number].of(output.text) if output.text else b""

        return write

    def _chunk(self, choice: dict[str, Any]) -> Chunk:
        chunk = self._choices.envelope()
        chunk["choices"] = [choice]
        if self._style.shows_usage:
            chunk["usage"] = self._choices.usage() if self._style.is_continuous else None
        return chunk


class _ChoiceWriter:
    """Writes the choice objects of one request.

    begun:  number of each reply with a written chunk -> text offsets of its tokens, None unless
            log-probabilities are requested
    """

    def __init__(self, completion: PreparedCompletion, style: AnswerStyle) -> None:
        self._completion = completion
        self._style = style
        self._body = completion.body
        self.replies = Replies(len(completion.prompts), completion.sampling.n)
        self.begun: dict[int, TextOffsets | None] = {}

    def envelope(self) -> dict[str, Any]:
        """Return the fields of an answer or a chunk other than its choices."""
        return {
            "id": f"cmpl-{self._completion.context.request_id}",
            "object": "text_completion",
            "created": self._completion.context.created,
            "model": self._completion.model.name,
            **self._style.fields,
        }

    def usage(self) -> dict[str, Any]:
        """Return OpenAI's usage object."""
        usage = self.replies.usage([len(ids) for ids in self._completion.prompts])
        if self._completion.is_dry:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage

    def whole(self, reply: Reply, number: int) -> dict[str, Any]:
        """Return one complete choice."""
        is_dry, body = self._completion.is_dry, self._body
        ids = [] if is_dry else reply.token_ids
        entries = [] if is_dry else reply.logprobs
        text = self._echo(reply) + ("" if is_dry else reply.text)
        value = _text_choice(number, text) | self._ending(reply, reply)
        if self._style.null_fields:
            value |= dict.fromkeys(_NULLS)
        if body.logprobs is not None:
            value["logprobs"] = self._logprobs(reply, ids, entries, self._offsets(), begins=True)
        if body.prompt_logprobs is not None:
            prompt_logprobs = self.replies.prompt_logprobs(reply) or ()
            value["prompt_logprobs"] = self._completion.logprobs.prompt(prompt_logprobs)
        if body.return_token_ids:
            value["token_ids"] = ids
        return value | self._prompt_fields(reply)

    def piece(self, reply: Reply, output: Output) -> dict[str, Any] | None:
        """Return the choice object of one output; None if the choice would be empty."""
        number = self.replies.number(reply)
        begins, is_dry = number not in self.begun, self._completion.is_dry
        ids = () if is_dry else output.token_ids
        text = "" if is_dry else output.text
        if begins:
            text = self._echo(reply) + text
        shows_tokens = (
            self._body.logprobs is not None or self._body.return_token_ids or self._style.per_token
        )
        if not (text or output.finish_reason or (ids and shows_tokens)):
            return None
        piece = _text_choice(number, text)
        if output.finish_reason is not None:
            piece |= self._ending(output, reply)
        if begins:
            self.begun[number] = None if self._body.logprobs is None else self._offsets()
        offsets = self.begun[number]
        if offsets is not None:
            entries = () if is_dry else output.logprobs or ()
            piece["logprobs"] = self._logprobs(reply, ids, entries, offsets, begins=begins)
        if self._body.return_token_ids:
            piece["token_ids"] = ids
        return piece | self._prompt_fields(reply) if begins else piece

    def _prompt_fields(self, reply: Reply) -> dict[str, Any]:
        """Return the fields of a choice that repeat its prompt."""
        fields: dict[str, Any] = {}
        if self._body.return_token_ids:
            request = self._completion.requests[reply.prompt]
            fields["prompt_token_ids"] = request.prompt_ids if request.embeddings is None else None
        if self._body.return_prompt_text:
            fields["prompt_text"] = self._completion.shown[reply.prompt]
        return fields

    def _ending(self, ended: Reply | Output, reply: Reply) -> dict[str, Any]:
        if self._completion.is_dry and ended.finish_reason is FinishReason.STOP:
            # The extra token was an end of sequence; the answer ends at its limit of 0 tokens.
            return {"finish_reason": FinishReason.LENGTH, **dict.fromkeys(_STOPS)}
        matched = matched_stop(self._style, reply)
        ending: dict[str, Any] = {"finish_reason": ended.finish_reason}
        ending |= zip(_STOPS, (ended.stop_reason, matched), strict=True)
        if ended.score is not None:
            ending["beam_score"] = ended.score
        if self._body.return_hidden_states:
            num_prompt = len(self._completion.prompts[reply.prompt])
            ending["hidden_states"] = shown_states(reply, num_prompt)
        return ending

    def must_wait(self, prompt: int, output: Output) -> bool:
        """Return whether an output begins a choice whose echo has no log-probabilities yet."""
        if not self._completion.echoes or self._body.logprobs is None or not output.index:
            return False
        return self.replies.prompt_logprobs(self.replies.of(prompt, output)) is None

    def _echo(self, reply: Reply) -> str:
        echoes = self._completion.echoes
        return echoes[reply.prompt] if echoes else ""

    def _logprobs(
        self,
        reply: Reply,
        ids: Sequence[int],
        entries: Sequence[LogprobEntry],
        offsets: TextOffsets,
        *,
        begins: bool,
    ) -> dict[str, Any]:
        starts: list[int] = []
        shown = ids
        if begins and self._completion.echoes:
            prompt = self._completion.prompts[reply.prompt]
            starts = offsets.of_prompt(prompt, self._echo(reply))
            shown = (*prompt, *ids)
            entries = (*(self.replies.prompt_logprobs(reply) or ()), *entries)
        starts += offsets.of_output(ids)
        return self._completion.logprobs.completion(shown, entries, starts)

    def _offsets(self) -> TextOffsets:
        shows_special = not self._completion.sampling.skip_special_tokens
        return self._completion.logprobs.offsets(shows_special=shows_special)


_STOPS = ("stop_reason", "matched_stop")
_NULLS = ("prompt_logprobs", "prompt_token_ids", "token_ids")


def _text_choice(number: int, text: str) -> dict[str, Any]:
    return {"index": number, "text": text, "logprobs": None, "finish_reason": None}


async def prepare_completion_job(
    server: ServerState, body: CompletionBody, context: RequestContext
) -> CompletionJob:
    """Return the job of a body after all checks that need no engine.

    Raises InvalidRequest, PromptTooLong, UnknownModel.
    """
    completion = await prepare_completion(server, body, context)
    return CompletionJob(
        context=context,
        requests=completion.requests,
        streams=bool(body.stream),
        completion=completion,
        style=style_of(server, body),
    )
