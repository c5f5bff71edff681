"""SGLang's objects for the choices of a call: `text`, `output_ids` and `meta_info`.

An object holds everything since the start, or what is new since the last one of the same choice.
The prompt's log-probabilities stand in each object of the former kind, in the first of the latter.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from remora.deployments.http.generation.choices import Choice, Choices
from remora.deployments.http.generation.logprobs import Line, LogprobWriter
from remora.deployments.http.generation.resumption import must_repeat
from remora.deployments.http.sglang.bodies import PromptOptions
from remora.engine.types import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt of a call and what is asked of it.

    name:    its `rid`
    is_dry:  whether no output is wanted (max_new_tokens 0): the engine still makes one token,
             which is left out
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


class AnswerWriter:
    """Writes the objects of one call.

    with_text:  whether log-probabilities carry their tokens' texts
    is_delta:   whether each object holds only what is new
    eos_ids:    tokens by which the model itself ends
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        choices: Choices,
        writer: LogprobWriter,
        *,
        started: float,
        with_text: bool,
        is_delta: bool,
        eos_ids: Collection[int],
    ) -> None:
        self._prompts = prompts
        self._choices = choices
        self._writer = writer
        self._started = started
        self._with_text = with_text
        self._is_delta = is_delta
        self._eos_ids = eos_ids
        self._sent: dict[int, _Sent] = {}

    def is_due(self, choice: Choice) -> bool:
        """Whether a stream says something now: first, last, and every `stream_interval` tokens."""
        prompt = self._prompts[choice.prompt]
        sent = self._sent.get(self._choices.number(choice))
        if choice.finish_reason is not None:
            return True
        if prompt.is_dry:
            return False
        interval = prompt.options.sampling.stream_interval or 1
        return sent is None or len(choice.token_ids) - sent.num_ids >= interval

    def write(self, choice: Choice) -> dict[str, Any]:
        """Return the object of a choice as far as it has come."""
        prompt = self._prompts[choice.prompt]
        sent = self._sent.setdefault(self._choices.number(choice), _Sent())
        meta: dict[str, Any] = {
            "id": prompt.name,
            "finish_reason": self._finish_reason(choice, is_dry=prompt.is_dry),
            "prompt_tokens": len(prompt.ids),
            "completion_tokens": 0 if prompt.is_dry else choice.num_output_tokens,
            "cached_tokens": choice.num_cached_tokens,
            "weight_version": "default",
        }
        if choice.finish_reason is not None or not must_repeat():
            meta["e2e_latency"] = time.monotonic() - self._started
        if choice.finish_reason is not None and choice.hidden_states is not None:
            states = choice.hidden_states.tolist()
            num_prompt = len(prompt.ids)
            meta["hidden_states"] = [states[:num_prompt], *states[num_prompt:]]
        if prompt.options.return_logprob:
            meta |= self._logprobs(choice, prompt, sent)
        new_text, new_ids = slice(None), slice(None)
        if self._is_delta:
            new_text, new_ids = slice(sent.num_texts, None), slice(sent.num_ids, None)
        text = "" if prompt.is_dry else "".join(choice.texts[new_text])
        ids = [] if prompt.is_dry else choice.token_ids[new_ids]
        sent.num_texts, sent.num_ids = len(choice.texts), len(choice.token_ids)
        return {"text": text, "output_ids": ids, "meta_info": meta}

    def _logprobs(self, choice: Choice, prompt: Prompt, sent: _Sent) -> dict[str, Any]:
        """Return the log-probabilities that the next object holds; only new ones are written."""
        has_top = prompt.options.top_logprobs_num > 0
        written = choice.written
        lines = [] if sent.has_prompt else self._prompt_lines(choice, prompt)
        sent.has_prompt = sent.has_prompt or bool(lines)
        new = self._both("input", prompt.ids[len(prompt.ids) - len(lines) :], lines, has_top)
        output = slice(sent.num_ids, 0 if prompt.is_dry else None)
        new |= self._both("output", choice.token_ids[output], choice.logprobs[output], has_top)
        if self._is_delta:
            return new
        # New lists: an object stays as it is while the choice goes on.
        for name, values in new.items():
            written[name] = [*written.get(name, ()), *values]
        return dict(written)

    def _both(
        self, side: str, ids: Sequence[int], lines: Sequence[Line], has_top: bool
    ) -> dict[str, list[Any]]:
        own = self._writer.native(ids, lines, with_text=self._with_text)
        values: dict[str, list[Any]] = {f"{side}_token_logprobs": own}
        if has_top:
            top = self._writer.native_top(lines, with_text=self._with_text)
            values[f"{side}_top_logprobs"] = top
        return values

    def _prompt_lines(self, choice: Choice, prompt: Prompt) -> list[Line]:
        """Return the log-probabilities of a prompt from `logprob_start_len` on."""
        # They come with the first output of any of the prompt's choices.
        start = prompt.options.logprob_start_len
        return [] if start < 0 else list(self._choices.prompt_logprobs(choice) or ())[start:]

    def _finish_reason(self, choice: Choice, *, is_dry: bool) -> dict[str, Any] | None:
        if choice.finish_reason is None:
            return None
        if choice.finish_reason is FinishReason.ABORT:
            return {"type": "abort", "message": "Aborted."}
        if is_dry:
            return {"type": "length", "length": 0}
        if choice.finish_reason is FinishReason.LENGTH:
            return {"type": "length", "length": choice.num_output_tokens}
        matched = choice.stop_reason
        last = choice.token_ids[-1] if choice.token_ids else None
        if matched is None and last in self._eos_ids:
            matched = last  # else a grammar that is complete has ended it
        return {"type": "stop", "matched": matched}
