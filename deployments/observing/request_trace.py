"""Traces of requests, for logs, crash dumps and spans.

A trace is recorded only while an observer is on. `RequestObservers.begin` checks this for each
request, so a changed setting takes effect with the next request.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from remora.engine.types import Output, Request


@dataclass(slots=True, eq=False)
class SequenceTrace:
    """One output sequence of a request.

    finish_reason:  None while it runs, or if it was cut off
    """

    num_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reason: str | None = None
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.texts)


@dataclass(slots=True, eq=False)
class RequestTrace:
    """One HTTP request, or one call of a Serve handle.

    requests:       one engine request per prompt
    parent:         W3C headers of the caller's trace; empty = none
    observers:      notified of the start and the end
    started_at:     seconds since 1970; all other times are seconds since the start
    queue_s:        time until the first step of the first sequence that produced a token
    first_token_s:  None until the first token
    whole_s:        None while it runs
    error:          why it ended before its sequences finished
    sequences:      by (number of the prompt, index among its n)
    """

    rid: str
    requests: Sequence[Request]
    parent: Mapping[str, str]
    observers: Sequence[RequestObserver] = ()
    started_at: float = field(default_factory=time.time)
    queue_s: float | None = None
    first_token_s: float | None = None
    whole_s: float | None = None
    error: str | None = None
    sequences: dict[tuple[int, int], SequenceTrace] = field(default_factory=dict)
    _started: float = field(default_factory=time.monotonic)

    def note(self, prompt: int, output: Output) -> None:
        """Record an output."""
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
        """Record the end."""
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
    """Is notified of requests, on the event loop; must not block."""

    @property
    def is_on(self) -> bool:
        """Whether to trace the next request."""
        ...

    def begun(self, trace: RequestTrace) -> None:
        """Handle the start of a request."""
        ...

    def ended(self, trace: RequestTrace) -> None:
        """Handle the end of a request: finished, failed or cancelled."""
        ...


class RequestObservers:
    """The observers of one replica's requests."""

    def __init__(self, observers: Sequence[RequestObserver] = ()) -> None:
        self._observers = tuple(observers)

    def add(self, observer: RequestObserver) -> None:
        """Notify one more observer, of requests that begin from now on."""
        self._observers = (*self._observers, observer)

    def begin(
        self, rid: str, requests: Sequence[Request], parent: Mapping[str, str]
    ) -> RequestTrace | None:
        """Return the trace of a new request; None if no observer is on."""
        interested = tuple(observer for observer in self._observers if observer.is_on)
        if not interested:
            return None
        trace = RequestTrace(rid, requests, parent, interested)
        for observer in interested:
            observer.begun(trace)
        return trace

    def end(self, trace: RequestTrace | None, error: str | None) -> None:
        """Notify the observers of a request's end."""
        if trace is None:
            return
        trace.end(error)
        for observer in trace.observers:
            observer.ended(trace)
