"""Resuming a stream on another replica after its replica has failed.

Only for greedy or seeded answers of one sequence without log-probabilities, where the same tokens
give the same bytes. A gateway collects the tokens of each chunk together with its bytes. If the
replica fails, another one takes these tokens as its own output, writes the same bytes again, skips
the bytes that the client has received, and continues. A checksum proves that the skipped bytes are
the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from remora.engine.types import FinishReason, Request, Resumption, SamplingParams, SequenceOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """The part of an answer that the client has received; empty at first.

    created:    creation time of the answer in seconds since 1970, which each chunk repeats
    tokens:     tokens of each chunk, as passed to `note`
    num_bytes:  length of the received body, without comments
    checksum:   CRC-32 of these bytes
    """

    created: int
    tokens: tuple[bytes, ...] = ()
    num_bytes: int = 0
    checksum: int = 0


@dataclass(frozen=True, slots=True)
class ResumableAnswer:
    """An answer of which a gateway keeps what it needs to continue it on another replica.

    begun:  what the client has received from another replica
    note:   called with the tokens of each further chunk
    """

    begun: Begun
    note: Callable[[bytes], None]

    def resumed(self, request: Request) -> Request:
        """Return the request, resumed after the output of another replica if it can be resumed."""
        if not _is_exact(request.sampling) or request.heal:
            return request
        lora_id = request.lora_id
        groups = [orjson.loads(group) for group in self.begun.tokens]
        # Output of another version of an adapter is not continued but generated anew; the checksum
        # shows whether it is the same.
        is_same = all(made_by == lora_id for made_by, _ in groups)
        given = tuple(_read(group, request.request_id) for _, group in groups) if is_same else ()

        def note_events(events: Sequence[SequenceOutput]) -> None:
            self.note(_write(lora_id, events))

        return replace(request, resumption=Resumption(given, note_events))


def _is_exact(sampling: SamplingParams) -> bool:
    is_exact = sampling.temperature == 0 or sampling.seed is not None
    has_lines = sampling.logprobs is not None or sampling.prompt_logprobs is not None
    return is_exact and sampling.beams is None and sampling.n == 1 and not has_lines


def _write(lora_id: int, events: Sequence[SequenceOutput]) -> bytes:
    written = [
        (event.token_ids, event.finish_reason, event.stop_token_id, event.num_cached_tokens)
        for event in events
    ]
    return orjson.dumps((lora_id, written))


def _read(group: Sequence[Any], request_id: str) -> tuple[SequenceOutput, ...]:
    return tuple(
        SequenceOutput(
            request_id=request_id,
            index=0,
            token_ids=tuple(token_ids),
            finish_reason=None if reason is None else FinishReason(reason),
            stop_token_id=stop_token_id,
            num_cached_tokens=num_cached_tokens,
        )
        for token_ids, reason, stop_token_id, num_cached_tokens in group
    )
