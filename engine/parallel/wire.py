"""The messages between ranks as bytes: little-endian numbers, no objects.

A frame is `[length: u32][kind: u8][payload]`. A step's payload is a header of counts, then numbers
of 8 bytes, of 4 and of 1. It holds only what a forward pass needs: no sampling parameters, and no
ended rows, whose state is replaced when they start again.

Decoded arrays are views of the payload and valid as long as it is. Knows no sockets.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from remora.engine.beams.moves import NO_COPIES, BeamMoves
from remora.engine.embeddings import EmbeddedTokens
from remora.engine.sampling.params import SamplingParams
from remora.engine.types import IntArray, RowInit, SlotLoad, StepPlan, TokenArray

HEAD = struct.Struct("<IB")
MAX_FRAME_BYTES = 2**28
MAX_REASON_BYTES = 4096

STEP, LOGITS, FAILED, JOIN_GROUP = 1, 2, 3, 4

_STEP = struct.Struct("<Q13I")
_LOGITS = struct.Struct("<II")
_PORT = struct.Struct("<H")
_Number = TypeVar("_Number", bound=np.generic)

_NO_ROWS = np.empty(0, np.int32)
_SAMPLING = SamplingParams()
_NONE_EMBEDDED = EmbeddedTokens(np.empty(0, np.int64), np.empty((0, 0), np.float32))
_NO_MOVES = BeamMoves(
    rows=_NO_ROWS,
    sources=_NO_ROWS,
    token_ids=np.empty(0, np.int64),
    num_kept=_NO_ROWS,
    copies=NO_COPIES,
)


@dataclass(frozen=True, slots=True)
class Step:
    """Run a forward pass, after appending the tokens of the step before.

    rows, token_ids:  [num_sampled] new tokens in order, and the row of each
    """

    plan: StepPlan
    rows: IntArray
    token_ids: TokenArray


@dataclass(frozen=True, slots=True)
class Logits:
    """Compute the logits of tokens [first, last) of the latest step."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Failed:
    """From a follower: it has failed.

    second_hand:  because it lost another rank, which reports its own failure
    """

    reason: str
    second_hand: bool = False


@dataclass(frozen=True, slots=True)
class JoinGroup:
    """All ranks are connected: join the tensor group at this address."""

    host: str
    port: int


Message = Step | Logits | Failed | JoinGroup


def encode_step(plan: StepPlan, rows: IntArray, token_ids: TokenArray) -> bytes:
    """Return the frame of a Step."""
    added = plan.added
    facts = [
        (init.row, len(init.token_ids), init.num_prompt_tokens, init.adapter_slot) for init in added
    ]
    loads, moves = plan.loads, plan.moves or _NO_MOVES
    embedded = plan.embedded or _NONE_EMBEDDED
    counts = (
        len(loads),
        len(added),
        sum(fact[1] for fact in facts),
        len(plan.page_ids),
        len(plan.window_ids),
        len(plan.rows),
        len(plan.num_drafts),
        len(plan.draft_ids),
        len(moves.rows),
        moves.copies.shape[1],
        *embedded.rows.shape,
    )
    payload = b"".join(
        (
            _STEP.pack(plan.step_id, *counts, len(rows)),
            np.array([load.lora_id for load in loads], "<i8").tobytes(),
            *(np.ascontiguousarray(init.token_ids, "<i8").tobytes() for init in added),
            token_ids.astype("<i8", copy=False).tobytes(),
            plan.draft_ids.astype("<i8", copy=False).tobytes(),
            moves.token_ids.astype("<i8", copy=False).tobytes(),
            embedded.places.astype("<i8", copy=False).tobytes(),
            np.array([load.slot for load in loads], "<i4").tobytes(),
            np.array(facts, "<i4").tobytes(),
            *(
                numbers.astype("<i4", copy=False).tobytes()
                for numbers in (
                    plan.page_rows,
                    plan.page_ids,
                    plan.window_ids,
                    plan.rows,
                    plan.starts,
                    plan.num_tokens,
                    plan.num_drafts,
                    rows,
                    moves.rows,
                    moves.sources,
                    moves.num_kept,
                    moves.copies,
                )
            ),
            np.ascontiguousarray(embedded.rows, "<f4").tobytes(),
            plan.samples.tobytes(),
        )
    )
    return HEAD.pack(len(payload), STEP) + payload


def encode_logits(first: int, last: int) -> bytes:
    """Return the frame of a Logits."""
    return HEAD.pack(_LOGITS.size, LOGITS) + _LOGITS.pack(first, last)


def encode_failed(failed: Failed) -> bytes:
    """Return the frame of a Failed; the reason is cut to MAX_REASON_BYTES."""
    payload = bytes([failed.second_hand]) + failed.reason.encode()[:MAX_REASON_BYTES]
    return HEAD.pack(len(payload), FAILED) + payload


def encode_join_group(message: JoinGroup) -> bytes:
    """Return the frame of a JoinGroup."""
    payload = _PORT.pack(message.port) + message.host.encode()
    return HEAD.pack(len(payload), JOIN_GROUP) + payload


def decode(kind: int, payload: memoryview) -> Message:
    """Return the message of a frame. Raises ValueError for an unknown or short frame."""
    if kind == STEP and len(payload) >= _STEP.size:
        return _decode_step(payload)
    if kind == LOGITS and len(payload) == _LOGITS.size:
        return Logits(*_LOGITS.unpack(payload))
    if kind == FAILED and len(payload) > 0:
        return Failed(bytes(payload[1:]).decode(errors="replace"), bool(payload[0]))
    if kind == JOIN_GROUP and len(payload) > _PORT.size:
        host = bytes(payload[_PORT.size :]).decode(errors="replace")
        return JoinGroup(host, *_PORT.unpack_from(payload))
    raise ValueError(f"invalid frame of kind {kind} with {len(payload)} bytes")


def _decode_step(payload: memoryview) -> Step:
    step_id, *counts = _STEP.unpack_from(payload)
    num_loads, num_added, num_tokens, num_pages, num_windows, num_rows, *counts = counts
    num_drafting, num_drafts, num_moves, num_copies, num_given, hidden_size, num_sampled = counts
    numbers = _Numbers(payload, _STEP.size)
    lora_ids = numbers.take(num_loads, np.int64)
    known = numbers.take(num_tokens, np.int64)
    token_ids = numbers.take(num_sampled, np.int64)
    draft_ids = numbers.take(num_drafts, np.int64)
    moved_ids = numbers.take(num_moves, np.int64)
    places = numbers.take(num_given, np.int64)
    slots = numbers.take(num_loads, np.int32)
    facts = numbers.take(4 * num_added, np.int32).reshape(num_added, 4)
    page_rows, page_ids = numbers.take(num_pages, np.int32), numbers.take(num_pages, np.int32)
    window_ids = numbers.take(num_windows, np.int32)
    rows, starts, num_each = (numbers.take(num_rows, np.int32) for _ in range(3))
    drafts_each = numbers.take(num_drafting, np.int32)
    sampled_rows = numbers.take(num_sampled, np.int32)
    moved, sources, num_kept = (numbers.take(num_moves, np.int32) for _ in range(3))
    copies = numbers.take(2 * num_copies, np.int32).reshape(2, num_copies)
    given = numbers.take(num_given * hidden_size, np.float32).reshape(num_given, hidden_size)
    samples = numbers.take(num_rows, np.bool_)
    numbers.check_end()
    plan = StepPlan(
        step_id=step_id,
        added=tuple(_rows_of(facts, known)),
        dropped=_NO_ROWS,
        page_rows=page_rows,
        page_ids=page_ids,
        window_ids=window_ids,
        rows=rows,
        starts=starts,
        num_tokens=num_each,
        samples=samples,
        num_drafts=drafts_each,
        draft_ids=draft_ids,
        embedded=EmbeddedTokens(places, given) if num_given else None,
        moves=BeamMoves(
            rows=moved, sources=sources, token_ids=moved_ids, num_kept=num_kept, copies=copies
        )
        if num_moves
        else None,
        loads=tuple(
            SlotLoad(slot, lora_id)
            for slot, lora_id in zip(slots.tolist(), lora_ids.tolist(), strict=True)
        ),
    )
    return Step(plan, sampled_rows, token_ids)


def _rows_of(facts: IntArray, known: TokenArray) -> Iterator[RowInit]:
    first = 0
    for row, count, num_prompt_tokens, adapter_slot in facts.tolist():
        yield RowInit(
            row=row,
            token_ids=known[first : first + count],
            num_prompt_tokens=num_prompt_tokens,
            seed=0,
            sampling=_SAMPLING,
            adapter_slot=adapter_slot,
        )
        first += count


class _Numbers:
    """Reads arrays from a payload, one after another."""

    def __init__(self, payload: memoryview, at: int) -> None:
        self._payload = payload
        self._at = at

    def take(self, count: int, dtype: type[_Number]) -> npt.NDArray[_Number]:
        found = np.frombuffer(self._payload, dtype, count, self._at)
        self._at += found.nbytes
        return found

    def check_end(self) -> None:
        if self._at != len(self._payload):
            raise ValueError(f"step of {len(self._payload)} bytes; expected {self._at}")
