"""SGLang's response objects, one per choice: `text`, `output_ids` and `meta_info`.

An object is cumulative, or holds only what is new since the previous object of the same choice.
Every cumulative object holds the prompt's log-probabilities; otherwise only the first one does.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from remora.deployments.http.generation.logprobs import LogprobEntry, LogprobWriter
from remora.deployments.http.generation.replies import Replies, Reply
from remora.deployments.http.generation.weight_update import Weights
from remora.deployments.http.sglang.bodies import PromptOptions
from remora.engine.spec.counts import DraftCounts
from remora.engine.types import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt of a request, with its options.

    name:    its `rid`
    is_dry:  no output is wanted (max_new_tokens 0); the engine still generates one token, which is
             omitted
    """

    name: str
    ids: list[int]
    options: PromptOptions
    is_dry: bool


@dataclass(slots=True, eq=False)
class _Sent:
    """How much of a choice earlier objects held."""

    num_texts: int = 0
    num_ids: int = 0
    has_prompt: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """Settings and state that all objects of one request share.

    started:         arrival of the request, on the monotonic clock
    with_text:       whether log-probabilities include the tokens' texts
    eos_ids:         the model's end-of-sequence tokens
    weights:         provides the version of the weights
    must_repeat:     whether another replica must write the same bytes, so that chunks omit times
                     and counts of steps
    shows_drafts:    whether the model verifies drafts
    """

    started: float
    with_text: bool
    eos_ids: Collection[int]
    logprobs: LogprobWriter
    weights: Weights
    must_repeat: bool
    shows_drafts: bool


class AnswerWriter:
    """Writes the response objects of one request.

    is_delta:  whether each object holds only new output
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        replies: Replies,
        options: AnswerOptions,
        *,
        is_delta: bool,
    ) -> None:
        self._prompts = prompts
        self._replies = replies
        self._options = options
        self._is_delta = is_delta
        # No request spans a weight update, so the version is fixed once the first output exists.
        self._weight_version = options.weights.version
        self._sent: dict[int, _Sent] = {}

    def is_due(self, reply: Reply) -> bool:
        """Return whether a chunk is due: first, last, and every `stream_interval` tokens."""
        prompt = self._prompts[reply.prompt]
        sent = self._sent.get(self._replies.number(reply))
        if reply.finish_reason is not None:
            return True
        if prompt.is_dry:
            return False
        interval = prompt.options.sampling.stream_interval or 1
        return sent is None or len(reply.token_ids) - sent.num_ids >= interval

    def write(self, reply: Reply) -> dict[str, Any]:
        """Return the current object of a choice."""
        prompt = self._prompts[reply.prompt]
        sent = self._sent.setdefault(self._replies.number(reply), _Sent())
        meta: dict[str, Any] = {
            "id": prompt.name,
            "finish_reason": self._finish_reason(reply, is_dry=prompt.is_dry),
            "prompt_tokens": len(prompt.ids),
            "completion_tokens": 0 if prompt.is_dry else reply.num_output_tokens,
            "cached_tokens": reply.num_cached_tokens,
            "weight_version": self._weight_version,
        }
        if reply.finish_reason is not None or not self._options.must_repeat:
            meta["e2e_latency"] = time.monotonic() - self._options.started
            if self._options.shows_drafts:
                meta |= _drafts(reply.drafts)
        if reply.score is not None:
            meta["beam_score"] = reply.score
        if reply.finish_reason is not None and reply.hidden_states is not None:
            states = reply.hidden_states.tolist()
            num_prompt = len(prompt.ids)
            meta["hidden_states"] = [states[:num_prompt], *states[num_prompt:]]
        if prompt.options.return_logprob:
            meta |= self._logprobs(reply, prompt, sent)
        new_text, new_ids = slice(None), slice(None)
        if self._is_delta:
            new_text, new_ids = slice(sent.num_texts, None), slice(sent.num_ids, None)
        text = "" if prompt.is_dry else "".join(reply.texts[new_text])
        ids = [] if prompt.is_dry else reply.token_ids[new_ids]
        sent.num_texts, sent.num_ids = len(reply.texts), len(reply.token_ids)
        return {"text": text, "output_ids": ids, "meta_info": meta}

    def _logprobs(self, reply: Reply, prompt: Prompt, sent: _Sent) -> dict[str, Any]:
        """Return the log-probabilities of the next object; formats only the new ones."""
        written = reply.written
        lines = [] if sent.has_prompt else self._prompt_lines(reply, prompt)
        sent.has_prompt = sent.has_prompt or bool(lines)
        new = self._both("input", prompt.ids[len(prompt.ids) - len(lines) :], lines, prompt)
        output = slice(sent.num_ids, 0 if prompt.is_dry else None)
        new |= self._both("output", reply.token_ids[output], reply.logprobs[output], prompt)
        if self._is_delta:
            return new
        # New lists: objects returned earlier must not change.
        for name, values in new.items():
            written[name] = [*written.get(name, ()), *values]
        return dict(written)

    def _both(
        self, side: str, ids: Sequence[int], lines: Sequence[LogprobEntry], prompt: Prompt
    ) -> dict[str, list[Any]]:
        writer, with_text = self._options.logprobs, self._options.with_text
        own = writer.native(ids, lines, with_text=with_text)
        values: dict[str, list[Any]] = {f"{side}_token_logprobs": own}
        if prompt.options.top_logprobs_num > 0:
            values[f"{side}_top_logprobs"] = writer.native_top(lines, with_text=with_text)
        if prompt.options.token_ids_logprob:
            values[f"{side}_token_ids_logprobs"] = writer.native_asked(lines, with_text=with_text)
        return values

    def _prompt_lines(self, reply: Reply, prompt: Prompt) -> list[LogprobEntry]:
        """Return the log-probabilities of a prompt from `logprob_start_len` on."""
        # They arrive with the first output of any of the prompt's choices.
        start = prompt.options.logprob_start_len
        return [] if start < 0 else list(self._replies.prompt_logprobs(reply) or ())[start:]

    def _finish_reason(self, reply: Reply, *, is_dry: bool) -> dict[str, Any] | None:
        if reply.finish_reason is None:
            return None
        if reply.finish_reason is FinishReason.ABORT:
            return {"type": "abort", "message": "Aborted."}
        if is_dry:
            return {"type": "length", "length": 0}
        if reply.finish_reason is FinishReason.LENGTH:
            return {"type": "length", "length": reply.num_output_tokens}
        matched = reply.stop_reason
        last = reply.token_ids[-1] if reply.token_ids else None
        if matched is None and last in self._options.eos_ids:
            matched = last  # otherwise a completed grammar ended it
        return {"type": "stop", "matched": matched}


def _drafts(counts: DraftCounts) -> dict[str, Any]:
    """Return the drafts of a choice so far; the mean length is of its verify steps only."""
    return {
        "spec_verify_ct": counts.num_rows,
        "spec_accept_token_num": counts.num_accepted,
        "spec_draft_token_num": counts.num_drafts,
        "spec_accept_rate": counts.acceptance_rate,
        "spec_accept_length": counts.tokens_per_row,
    }
