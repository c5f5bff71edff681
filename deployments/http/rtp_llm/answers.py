"""Responses of RTP-LLM's / and /batch_infer, whole and streamed.

An event of a stream has the text so far, or with `return_incremental` the new part of it. An event
of several answers has all of them, so it is sent when each answer that goes on has new tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from remora.deployments.http.core.sse import Chunk, ChunkWriter
from remora.deployments.http.generation.endpoint import Job
from remora.deployments.http.generation.logprobs import finite
from remora.deployments.http.generation.replies import Replies, Reply
from remora.deployments.http.generation.request_tracker import OutputStream
from remora.deployments.http.rtp_llm.generate_config import RtpConfig
from remora.deployments.observing.reply_clock import ReplyClock
from remora.engine.types import FloatArray, Output, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class RtpJob(Job):
    """A checked request.

    is_batch:    whether the answers are in a list, one for each prompt
    """

    config: RtpConfig
    is_batch: bool

    async def result(self, outputs: OutputStream) -> dict[str, Any]:
        """Return the whole response."""
        answers = RtpAnswers(self)
        async for prompt, output in outputs:
            answers.add(prompt, output)
        return answers.write()

    def writer(self) -> RtpWriter:
        """Return the writer of a streamed response."""
        return RtpWriter(self)


class RtpWriter(ChunkWriter):
    """Writes a chunk with all answers whenever each unfinished one has new tokens."""

    def __init__(self, job: RtpJob) -> None:
        self._answers = RtpAnswers(job)
        self._unfinished = set(range(len(self._answers.replies.all)))
        self._waiting = set(self._unfinished)

    def chunks(self, prompt: int, output: Output) -> Sequence[Chunk]:
        """Return the chunk that the output completes, if any."""
        number = self._answers.add(prompt, output)
        self._waiting.discard(number)
        if output.finish_reason is not None:
            self._unfinished.discard(number)
        if self._waiting:
            return ()
        self._waiting = set(self._unfinished)
        return (self._answers.write(),)


@dataclass(slots=True)
class _Sent:
    """How much of an answer earlier events had."""

    num_texts: int = 0
    num_tokens: int = 0


class RtpAnswers:
    """The answers of a request so far, and how they are written."""

    def __init__(self, job: RtpJob) -> None:
        self._job = job
        self.replies = Replies(len(job.requests), job.config.n)
        self._sent = [_Sent() for _ in self.replies]
        self._clock = ReplyClock(job.context.started_ns)

    def add(self, prompt: int, output: Output) -> int:
        """Append an output to its answer, and return the answer's number."""
        self._clock.note(output)
        return self.replies.number(self.replies.add(prompt, output))

    def write(self) -> dict[str, Any]:
        """Return the answers to all prompts as one object."""
        n = self._job.config.n
        found = [
            self._answer(request, self.replies.all[place * n : place * n + n])
            for place, request in enumerate(self._job.requests)
        ]
        for reply, sent in zip(self.replies, self._sent, strict=True):
            sent.num_texts, sent.num_tokens = len(reply.texts), len(reply.token_ids)
        return {"response_batch": found} if self._job.is_batch else found[0]

    def _answer(self, request: Request, replies: Sequence[Reply]) -> dict[str, Any]:
        """Return the answers to one prompt, the best of which comes first."""
        config, is_list = self._job.config, self._job.config.is_list
        shown = replies if is_list else replies[:1]
        texts = [self._text(reply) for reply in shown]
        answer: dict[str, Any] = {
            "response": texts if is_list else texts[0],
            "finished": all(reply.finish_reason is not None for reply in replies),
        }
        if config.aux_info is False:
            answer["aux_info"] = [] if is_list else {}
        else:
            about = [self._about(request, reply) for reply in shown]
            if (config.num_beams or 1) > 1:
                about[0]["beam_responses"] = [self._text(reply) for reply in replies]
            answer["aux_info"] = about if is_list else about[0]
        if config.return_output_ids:
            answer["output_ids"] = [self._ids(reply) for reply in shown]
        if config.return_input_ids:
            answer["input_ids"] = [list(request.prompt_ids)]
        states = replies[0].hidden_states
        if states is not None:
            answer |= self._states(states)
        return answer

    def _text(self, reply: Reply) -> str:
        prefix, start = self._job.config.out_prefix or "", self._start(reply).num_texts
        return ("" if start else prefix) + "".join(reply.texts[start:])

    def _ids(self, reply: Reply) -> list[int]:
        return reply.token_ids[self._start(reply).num_tokens :]

    def _start(self, reply: Reply) -> _Sent:
        """Return the part of an answer that is left out of the next event."""
        is_new_only = self._job.streams and self._job.config.return_incremental
        return self._sent[self.replies.number(reply)] if is_new_only else _Sent()

    def _states(self, states: FloatArray) -> dict[str, Any]:
        """Return the state of the last token that has one, or of all tokens, or both."""
        found: dict[str, Any] = {}
        if self._job.config.return_hidden_states:
            found["hidden_states"] = states[-1].tolist() if len(states) else []
        if self._job.config.return_all_hidden_states:
            found["all_hidden_states"] = states.tolist()
        return found

    def _about(self, request: Request, reply: Reply) -> dict[str, Any]:
        """Return `aux_info` of an answer; times are in milliseconds."""
        config, number = self._job.config, self.replies.number(reply)
        # Another replica that continues a stream writes the same events, except for the last.
        is_timed = self._job.context.answer is None or reply.finish_reason is not None
        clock = self._clock if is_timed else ReplyClock(0)
        start = self._start(reply).num_tokens
        return {
            "cost_time": clock.first_ms + clock.output_ms,
            "first_token_cost_time": clock.first_ms,
            "wait_time": clock.queue_ms,
            "iter_count": reply.num_output_tokens - (reply.drafts.num_accepted if is_timed else 0),
            "input_len": len(request.prompt_ids) - request.kept_tokens,
            "prefix_len": request.kept_tokens,
            "output_len": reply.num_output_tokens,
            "step_output_len": len(reply.token_ids) - self._sent[number].num_tokens,
            "reuse_len": reply.num_cached_tokens,
            "local_reuse_len": reply.num_cached_tokens,
            "remote_reuse_len": 0,
            "pd_sep": False,
            "cum_log_probs": _sums(reply) if config.return_cum_log_probs else [],
            "beam_responses": [],
            "softmax_probs": [
                math.exp(entry.logprob)
                for entry in (reply.logprobs[start:] if config.return_softmax_probs else ())
            ],
        }


def _sums(reply: Reply) -> list[float]:
    """Return the sum of the log-probabilities of an answer's tokens."""
    return [finite(sum(entry.logprob for entry in reply.logprobs))]
