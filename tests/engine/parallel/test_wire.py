"""What rank 0 says arrives as it was said, without what only the sampler needs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.engine.parallel.wire import (
    HEAD,
    STEP,
    Failed,
    JoinGroup,
    Logits,
    Message,
    Step,
    decode,
    encode_failed,
    encode_join_group,
    encode_logits,
    encode_step,
)
from remora.engine.types import SamplingParams, StepPlan
from tests.engine.parallel.plans import as_sent, make_steps
from tests.engine.sampling.sampled import make_row


def sent(frame: bytes) -> Message:
    length, kind = HEAD.unpack(frame[: HEAD.size])
    payload = memoryview(frame)[HEAD.size :]
    assert length == len(payload)
    return decode(kind, payload)


@given(make_steps())
def test_any_step_survives(step: Step) -> None:
    arrived = sent(encode_step(step.plan, step.rows, step.token_ids))

    assert isinstance(arrived, Step)
    assert as_sent(arrived) == as_sent(step)


@given(
    st.builds(Logits, st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
    | st.builds(Failed, st.text(max_size=1000), st.booleans())
    | st.builds(JoinGroup, st.text(min_size=1, max_size=1000), st.integers(0, 2**16 - 1))
)
def test_other_messages_survive(message: Logits | Failed | JoinGroup) -> None:
    match message:
        case Logits():
            frame = encode_logits(message.first, message.last)
        case Failed():
            frame = encode_failed(message)
        case JoinGroup():
            frame = encode_join_group(message)

    assert sent(frame) == message


def test_a_long_reason_is_cut() -> None:
    arrived = sent(encode_failed(Failed("x" * 100_000)))

    assert isinstance(arrived, Failed)
    assert 1000 < len(arrived.reason) < 10_000


@given(st.integers(0, 255), st.binary(max_size=200))
def test_nonsense_is_refused_or_read_but_never_more(kind: int, payload: bytes) -> None:
    try:
        message = decode(kind, memoryview(payload))
    except (ValueError, OverflowError):
        return

    assert isinstance(message, Message)


@given(make_steps(), st.integers(1, 8))
def test_a_step_that_is_cut_short_or_too_long_is_refused(step: Step, count: int) -> None:
    payload = encode_step(step.plan, step.rows, step.token_ids)[HEAD.size :]

    for wrong in (payload[:-count], payload + bytes(count)):
        with pytest.raises(ValueError, match=r"step|buffer|frame"):
            decode(STEP, memoryview(wrong))


def test_secrets_of_a_request_stay_with_rank_0() -> None:
    init = make_row(1, [5], seed=77, stop=("a stop string",))
    empty = np.empty(0, np.int32)
    plan = StepPlan(
        step_id=3,
        added=(init,),
        dropped=np.array([4], np.int32),
        page_rows=empty,
        page_ids=empty,
        rows=empty,
        starts=empty,
        num_tokens=empty,
        samples=np.empty(0, np.bool_),
    )

    arrived = sent(encode_step(plan, empty, np.empty(0, np.int64)))

    assert isinstance(arrived, Step)
    assert arrived.plan.added[0].sampling == SamplingParams()
    assert arrived.plan.added[0].seed == 0
    assert len(arrived.plan.dropped) == 0
