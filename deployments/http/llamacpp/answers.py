"""Responses of llama.cpp's /completion and /infill, whole and streamed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from remora.deployments.http.core.sse import Chunk, ChunkWriter
from remora.deployments.http.generation.endpoint import Job
from remora.deployments.http.generation.logprobs import finite
from remora.deployments.http.generation.replies import Replies, Reply
from remora.deployments.http.generation.request_tracker import OutputStream
from remora.deployments.http.llamacpp.bodies import LlamaBody
from remora.deployments.observing.reply_clock import ReplyClock
from remora.engine.types import FinishReason, Output, TokenLogprob

if TYPE_CHECKING:
    from remora.engine.tokens.tokenizer import Tokenizer

_STOP_TYPES = {FinishReason.LENGTH: "limit", FinishReason.ABORT: "none", None: "limit"}
# A line after the first one, up to its first character that is no indentation.
_INDENTED = re.compile(r"\n([ \t]*)[^ \t]")
_LINE = "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaJob(Job):
    """A checked request.

    settings:    `generation_settings` of the response
    n_ctx:       longest sequence in tokens
    is_list:     whether the whole response is a list of answers
    is_dry:      whether no output is wanted; the engine still generates one token
    """

    body: LlamaBody
    model: str
    tokenizer: Tokenizer
    settings: Mapping[str, Any]
    n_ctx: int
    is_list: bool
    is_dry: bool

    def replies(self) -> Replies:
        """Return an empty set of replies."""
        return Replies(len(self.requests), self.requests[0].sampling.n)

    async def result(self, outputs: OutputStream) -> Any:
        """Return the whole response."""
        replies, clock = self.replies(), ReplyClock(self.context.started_ns)
        texts, pending = dict[int, str](), {replies.number(reply) for reply in replies}
        async for prompt, output in outputs:
            clock.note(output)
            reply = replies.of(prompt, output)
            number = replies.number(reply)
            if number not in pending:
                continue
            reply.add(output)
            cut = self._cut(reply, clock)
            if cut is not None:
                texts[number], reply.finish_reason = cut, None
            if cut is not None or output.finish_reason is not None:
                pending.remove(number)
            if texts and not pending:
                break  # the caller ends what still runs
        answers = []
        for reply in replies:
            number = replies.number(reply)
            text = "" if self.is_dry else texts.get(number, reply.text)
            answer = self.ending(reply, number, clock, text, tokens=self._tokens(reply))
            if self.body.n_probs and not self.is_dry:
                answer["completion_probabilities"] = self.probabilities(reply.logprobs)
            answers.append(self.selected(answer))
        return answers if self.is_list else answers[0]

    def writer(self) -> LlamaWriter:
        """Return the writer of a streamed response."""
        return LlamaWriter(self)

    def _cut(self, reply: Reply, clock: ReplyClock) -> str | None:
        """Return the text up to a limit that has been reached; None = no limit is reached."""
        indent, limit_ms = self.body.n_indent or 0, self.body.t_max_predict_ms or 0
        if indent <= 0 and limit_ms <= 0:
            return None
        text = reply.text
        for match in _INDENTED.finditer(text):
            if len(match[1]) < indent:
                return text[: match.end(1)]
        is_late = 0 < limit_ms < clock.output_ms and reply.finish_reason is None
        return text if is_late and _LINE in text else None

    def _tokens(self, reply: Reply) -> list[int]:
        return reply.token_ids if self.body.return_tokens and not self.is_dry else []

    def part(self, reply: Reply, number: int, output: Output, clock: ReplyClock) -> Chunk:
        """Return a chunk of a streamed response."""
        chunk: Chunk = {
            "index": number,
            "content": output.text,
            "tokens": list(output.token_ids),
            "stop": False,
            "id_slot": number,
            "tokens_predicted": reply.num_output_tokens,
            "tokens_evaluated": len(self.requests[reply.prompt].prompt_ids),
        }
        if self.body.timings_per_token:
            chunk["timings"] = self._timings(reply, clock)
        if self.body.n_probs and output.logprobs:
            chunk["completion_probabilities"] = self.probabilities(output.logprobs)
        return chunk

    def ending(
        self, reply: Reply, number: int, clock: ReplyClock, text: str, *, tokens: list[int]
    ) -> dict[str, Any]:
        """Return a whole answer, or the last chunk of a streamed one."""
        prompt_ids = self.requests[reply.prompt].prompt_ids
        num_tokens = len(prompt_ids) + reply.num_output_tokens
        stop_type, word = self._stop(reply)
        return {
            "index": number,
            "content": text,
            "tokens": tokens,
            "id_slot": number,
            "stop": True,
            "model": self.model,
            "tokens_predicted": 0 if self.is_dry else reply.num_output_tokens,
            "tokens_evaluated": len(prompt_ids),
            "generation_settings": self.settings,
            "prompt": self.tokenizer.decode(prompt_ids, skip_special_tokens=False),
            "has_new_line": not self.is_dry and _LINE in reply.text,
            "truncated": stop_type == "limit" and num_tokens >= self.n_ctx,
            "stop_type": stop_type,
            "stopping_word": word,
            "tokens_cached": reply.num_cached_tokens,
            "timings": self._timings(reply, clock),
        }

    def _stop(self, reply: Reply) -> tuple[str, str]:
        """Return why a reply ended, and the text that ended it."""
        if self.is_dry or reply.finish_reason is not FinishReason.STOP:
            return ("limit" if self.is_dry else _STOP_TYPES[reply.finish_reason]), ""
        if isinstance(reply.stop_reason, str):
            return "word", reply.stop_reason
        return "eos", ""

    def selected(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Return the fields that `response_fields` names; `a/b` is the field b of a."""
        chosen: dict[str, Any] = {}
        for name in self.body.response_fields or ():
            value: Any = answer
            for part in name.split("/"):
                value = value.get(part) if isinstance(value, dict) else None
            if value is not None:
                chosen[name] = value
        return chosen if self.body.response_fields else answer

    def probabilities(self, entries: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        """Return `completion_probabilities` of tokens."""
        return [
            self._probability(entry.token_id, entry.logprob)
            | {"top_logprobs": [self._probability(*top) for top in entry.top]}
            for entry in entries
        ]

    def _probability(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "id": token_id,
            "token": self.tokenizer.token_text(token_id),
            "bytes": list(self.tokenizer.token_bytes(token_id)),
            "logprob": finite(logprob),
        }

    def _timings(self, reply: Reply, clock: ReplyClock) -> dict[str, Any]:
        num_prompt = len(self.requests[reply.prompt].prompt_ids) - reply.num_cached_tokens
        num_output = 0 if self.is_dry else reply.num_output_tokens
        timings = {
            "cache_n": reply.num_cached_tokens,
            **_rates("prompt", num_prompt, clock.prompt_ms),
            **_rates("predicted", num_output, clock.output_ms),
        }
        if reply.drafts.num_drafts:
            timings["draft_n"] = reply.drafts.num_drafts
            timings["draft_n_accepted"] = reply.drafts.num_accepted
        return timings


class LlamaWriter(ChunkWriter):
    """Writes a chunk for each output, then one that holds everything but the text."""

    def __init__(self, job: LlamaJob) -> None:
        self._job = job
        self._replies = job.replies()
        self._clock = ReplyClock(job.context.started_ns)

    def chunks(self, prompt: int, output: Output) -> Sequence[Chunk]:
        """Return the chunks of one output."""
        job, clock = self._job, self._clock
        clock.note(output)
        reply = self._replies.add(prompt, output)
        number = self._replies.number(reply)
        chunks = []
        if (output.token_ids or output.text) and not job.is_dry:
            chunks.append(job.part(reply, number, output, clock))
        if output.finish_reason is not None:
            chunks.append(job.selected(job.ending(reply, number, clock, "", tokens=[])))
        return chunks


def _rates(name: str, num_tokens: int, spent_ms: float) -> dict[str, float]:
    spent_ms = max(1e-3, spent_ms)
    return {
        f"{name}_n": num_tokens,
        f"{name}_ms": spent_ms,
        f"{name}_per_token_ms": spent_ms / max(1, num_tokens),
        f"{name}_per_second": 1e3 * num_tokens / spent_ms,
    }
