"""From the engine's tokens to the caller's outputs: text, stop strings, finish reasons, logprobs.

Runs on the caller's side, outside of the engine loop. Tokens are processed one by one, so the total
output does not depend on how the engine groups events. Stop strings are found here and not in the
engine: `take_stopped` returns the sequences that the engine must still abort. Only beam search must
know where its paths end, and finds them by the same `OutputText`.
"""

from __future__ import annotations

from collections.abc import Iterable

from remora.engine.sampling.logprobs import concat_logprobs, to_token_logprobs
from remora.engine.spec.counts import NONE_VERIFIED
from remora.engine.tokens.output_text import OutputText
from remora.engine.tokens.tokenizer import Tokenizer
from remora.engine.types import (
    FinishReason,
    FloatArray,
    Output,
    Request,
    SequenceOutput,
    TokenLogprob,
)


class OutputProcessor:
    """Converts the SequenceOutputs of one request to Outputs."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        """`tokenizer`: None = no text is produced and no stop string is searched."""
        self._sequences = [
            _SequenceText(index, request, tokenizer) for index in range(request.sampling.n)
        ]
        self._num_unfinished = request.sampling.n
        self._stopped: list[int] = []

    @property
    def is_finished(self) -> bool:
        """Whether all n sequences have ended for the caller."""
        return self._num_unfinished == 0

    def process(self, events: Iterable[SequenceOutput]) -> list[Output]:
        """Take in events; return one Output for each index with new content."""
        touched: dict[int, _SequenceText] = {}
        for event in events:
            sequence = self._sequences[event.index]
            if sequence.is_finished:
                continue
            touched[event.index] = sequence
            if sequence.take(event):
                self._num_unfinished -= 1
                if event.finish_reason is None:
                    self._stopped.append(event.index)
        return [sequence.give() for sequence in touched.values()]

    def take_stopped(self) -> list[int]:
        """Return, once, the indexes that a stop string ended while the engine continues."""
        stopped, self._stopped = self._stopped, []
        return stopped


class _SequenceText:
    """One of the n sequences: the state so far, and the part not returned yet."""

    def __init__(self, index: int, request: Request, tokenizer: Tokenizer | None) -> None:
        sampling = request.sampling
        self.index = index
        self.is_finished = False
        self._sampling = sampling
        self._grown = OutputText(request, tokenizer)
        self._wants_prompt_logprobs = index == 0 and sampling.prompt_logprobs is not None
        self._num_cached_tokens = 0
        self._queue_s = 0.0
        self._drafts = NONE_VERIFIED
        self._predicted = 0, 0
        self._score: float | None = None
        self._finish_reason: FinishReason | None = None
        self._stop_reason: str | int | None = None
        self._token_ids: list[int] = []
        self._text = ""
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        self._hidden_states: FloatArray | None = None
        self._pooled: FloatArray | None = None

    def take(self, event: SequenceOutput) -> bool:
        """Take in one event, ignoring tokens after a stop string; return whether it is the last."""
        self._num_cached_tokens = max(self._num_cached_tokens, event.num_cached_tokens)
        self._queue_s = event.queue_s
        if any(event.predicted):  # a stop string ends the text before the engine's last event
            self._predicted = event.predicted
        if self._wants_prompt_logprobs and event.token_ids:
            self._wants_prompt_logprobs = False
            self._prompt_logprobs = _prompt_lines(event)
        if event.hidden_states is not None:
            self._hidden_states = event.hidden_states
        self._pooled, self._score = event.pooled, event.score
        num_taken = self._take_tokens(event)
        if event.token_ids:
            # A step's last token is no draft, and those after a stop string are no output.
            num_cut = max(0, len(event.token_ids) - 1 - num_taken)
            drafts = event.drafts
            self._drafts = drafts._replace(num_accepted=drafts.num_accepted - num_cut)
        if event.logprobs is not None:
            self._logprobs += to_token_logprobs(event.logprobs)[:num_taken]
        if event.finish_reason is not None and not self.is_finished:
            self._finish(event)
        return self.is_finished

    def give(self) -> Output:
        """Return the changes since the last call."""
        output = Output(
            index=self.index,
            token_ids=tuple(self._token_ids),
            text=self._text,
            logprobs=None if self._sampling.logprobs is None else tuple(self._logprobs),
            prompt_logprobs=self._prompt_logprobs,
            hidden_states=self._hidden_states,
            pooled=self._pooled,
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
            num_output_tokens=self._grown.num_tokens,
            num_cached_tokens=self._num_cached_tokens,
            queue_s=self._queue_s,
            drafts=self._drafts,
            predicted=self._predicted,
            score=self._score,
        )
        self._token_ids, self._text, self._logprobs = [], "", []
        self._prompt_logprobs = None
        return output

    def _take_tokens(self, event: SequenceOutput) -> int:
        """Take tokens until a stop string is complete; return how many were taken."""
        for place, token_id in enumerate(event.token_ids):
            self._token_ids.append(token_id)
            is_stop_token = event.stop_token_id is not None and place == len(event.token_ids) - 1
            is_shown = not is_stop_token or self._sampling.include_stop_in_output
            self._text += self._grown.push(token_id, is_shown=is_shown)
            if self._has_stopped():
                return place + 1
        return len(event.token_ids)

    def _finish(self, event: SequenceOutput) -> None:
        self._text += self._grown.finish()
        if self._has_stopped():
            return
        self.is_finished = True
        self._finish_reason = event.finish_reason
        if event.stop_token_id in self._sampling.stop_token_ids:
            self._stop_reason = event.stop_token_id

    def _has_stopped(self) -> bool:
        """End the output if a stop text was found."""
        if self._grown.stop is None:
            return False
        self.is_finished = True
        self._finish_reason, self._stop_reason = FinishReason.STOP, self._grown.stop
        return True


def _prompt_lines(event: SequenceOutput) -> tuple[TokenLogprob | None, ...]:
    """Return a line for each prompt token; the first has none."""
    if not event.prompt_logprobs:
        return (None,)
    return (None, *to_token_logprobs(concat_logprobs(event.prompt_logprobs)))
