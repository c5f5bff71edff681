"""Steps of any shape, and what of them must arrive at another rank."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from remora.engine.beams.moves import BeamMoves
from remora.engine.embeddings import EmbeddedTokens
from remora.engine.parallel.wire import Step
from remora.engine.types import RowInit, SamplingParams, SlotLoad, StepPlan

INT32 = st.integers(0, 2**31 - 1)
TOKENS = st.integers(0, 2**63 - 1)


def _int32(numbers: list[int]) -> Any:
    return np.array(numbers, np.int32)


@st.composite
def _embedded(draw: st.DrawFn) -> EmbeddedTokens | None:
    width = draw(st.integers(1, 3))
    row = st.lists(st.floats(width=32, allow_nan=False), min_size=width, max_size=width)
    rows = draw(st.lists(st.tuples(TOKENS, row), max_size=4))
    if not rows:
        return None
    return EmbeddedTokens(
        np.array([place for place, _ in rows], np.int64),
        np.array([numbers for _, numbers in rows], np.float32),
    )


@st.composite
def make_steps(draw: st.DrawFn) -> Step:
    """A step with any numbers in it: the wire does not ask whether they make sense."""
    places = draw(st.lists(st.tuples(INT32, INT32, INT32, st.booleans()), max_size=9))
    pages = draw(st.lists(st.tuples(INT32, INT32), max_size=9))
    windows = draw(st.one_of(st.just([]), st.just([page for page, _ in pages])))
    sampled = draw(st.lists(st.tuples(INT32, TOKENS), max_size=9))
    drafts = draw(st.one_of(st.just([]), st.just([1] * len(places))))
    moves = draw(st.lists(st.tuples(INT32, INT32, INT32, TOKENS), max_size=4))
    copies = draw(st.lists(st.tuples(INT32, INT32), max_size=4)) if moves else []
    prompts = draw(st.lists(st.lists(TOKENS, max_size=20), max_size=4))
    added = tuple(
        RowInit(
            row=draw(INT32),
            token_ids=np.array(prompt, np.int64),
            num_prompt_tokens=draw(st.integers(0, len(prompt))),
            seed=draw(TOKENS),
            adapter_slot=draw(INT32),
            sampling=SamplingParams(temperature=0.5),
        )
        for prompt in prompts
    )
    plan = StepPlan(
        step_id=draw(TOKENS),
        added=added,
        dropped=_int32(draw(st.lists(INT32, max_size=3))),
        page_rows=_int32([page[0] for page in pages]),
        page_ids=_int32([page[1] for page in pages]),
        window_ids=_int32(windows),
        rows=_int32([place[0] for place in places]),
        starts=_int32([place[1] for place in places]),
        num_tokens=_int32([place[2] for place in places]),
        samples=np.array([place[3] for place in places], np.bool_),
        num_drafts=_int32(drafts),
        draft_ids=np.array([draw(TOKENS) for _ in drafts], np.int64),
        embedded=draw(_embedded()),
        loads=tuple(
            SlotLoad(slot, lora_id)
            for slot, lora_id in draw(st.lists(st.tuples(INT32, TOKENS), max_size=3))
        ),
        moves=BeamMoves(
            rows=_int32([move[0] for move in moves]),
            sources=_int32([move[1] for move in moves]),
            num_kept=_int32([move[2] for move in moves]),
            token_ids=np.array([move[3] for move in moves], np.int64),
            copies=np.array(copies, np.int32).reshape(-1, 2).T,
        )
        if moves
        else None,
    )
    return Step(
        plan, _int32([row for row, _ in sampled]), np.array([t for _, t in sampled], np.int64)
    )


def as_sent(step: Step) -> Any:
    """What a follower needs of a step, as something that can be compared."""
    plan = step.plan
    arrays: tuple[Any, ...] = (
        plan.page_rows,
        plan.page_ids,
        plan.window_ids,
        plan.rows,
        plan.starts,
        plan.num_tokens,
        plan.samples,
        plan.num_drafts,
        plan.draft_ids,
    )
    moves = plan.moves
    if moves is not None:
        arrays += moves.rows, moves.sources, moves.token_ids, moves.num_kept, moves.copies
    if plan.embedded is not None:
        arrays += plan.embedded.places, plan.embedded.rows
    return (
        plan.step_id,
        plan.loads,
        [
            (init.row, init.token_ids.tolist(), init.num_prompt_tokens, init.adapter_slot)
            for init in plan.added
        ],
        [array.tolist() for array in arrays],
        [array.dtype for array in arrays],
        step.rows.tolist(),
        step.token_ids.tolist(),
    )
