"""What became of one call, for those who want to know: logs, dumps, spans.

Kept only while somebody wants it; `RequestObservers.begin` says so for each call anew, so that what
an operator switches on or off counts from the next call on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from remora.engine.types import Output, Request


@dataclass(slots=True, eq=False)
class SequenceTrace:
    """One of the sequences of a call.

    finish_reason:  None until it has ended by itself
    """

    num_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reason: str | None = None
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """What it says so far."""
        return "".join(self.texts)


@dataclass(slots=True, eq=False)
class RequestTrace:
    """One call: an HTTP request, or a call of a handle.

    requests:       one for each prompt
    observers:      who was told that it began, and will be told of its end
    started_at:     seconds since 1970; all others are seconds since then
    queue_s:        until the first step of the first sequence that made a token
    first_token_s:  None until there is a token
    whole_s:        None while it runs
    error:          why it ended before its sequences did
    sequences:      by the place of the prompt and the index among its n
    """

    rid: str
    requests: Sequence[Request]
    observers: Sequence[RequestObserver] = ()
    started_at: float = field(default_factory=time.time)
    queue_s: float | None = None
    first_token_s: float | None = None
    whole_s: float | None = None
    error: str | None = None
    sequences: dict[tuple[int, int], SequenceTrace] = field(default_factory=dict)
    _started: float = field(default_factory=time.monotonic)

    def note(self, prompt: int, output: Output) -> None:
        """Take in an output."""
        if self.first_token_s is None:
            self.first_token_s = time.monotonic() - self._started
            self.queue_s = output.queue_s
        sequence = self.sequences.setdefault((prompt, output.index), SequenceTrace())
        sequence.num_tokens = output.num_output_tokens
        sequence.num_cached_tokens = output.num_cached_tokens
        sequence.texts.append(output.text)
        if output.finish_reason is not None:
            sequence.finish_reason = output.finish_reason.value

    def end(self, error: str | None) -> None:
        """Note the end."""
        self.whole_s = time.monotonic() - self._started
        self.error = error

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(request.prompt_ids) for request in self.requests)

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(sequence.num_tokens for sequence in self.sequences.values())


class RequestObserver(Protocol):
    """Somebody who wants to know of calls. Called on the event loop; must not wait."""

    @property
    def is_on(self) -> bool:
        """Whether the next call is of interest."""
        ...

    def begun(self, trace: RequestTrace) -> None:
        """A call has begun."""
        ...

    def ended(self, trace: RequestTrace) -> None:
        """It has ended, in whatever way."""
        ...


class RequestObservers:
    """All who want to know."""

    def __init__(self, observers: Sequence[RequestObserver] = ()) -> None:
        self._observers = tuple(observers)

    def add(self, observer: RequestObserver) -> None:
        """Tell one more, of calls that begin from now on."""
        self._observers = (*self._observers, observer)

    def begin(self, rid: str, requests: Sequence[Request]) -> RequestTrace | None:
        """Return the trace of a call that begins; None: nobody wants one."""
        interested = tuple(observer for observer in self._observers if observer.is_on)
        if not interested:
            return None
        trace = RequestTrace(rid, requests, interested)
        for observer in interested:
            observer.begun(trace)
        return trace

    def end(self, trace: RequestTrace | None, error: str | None) -> None:
        """Tell the end of a call."""
        if trace is None:
            return
        trace.end(error)
        for observer in trace.observers:
            observer.ended(trace)
