"""A runner without a model: its KV memory holds token ids, so a wrong page gives a wrong token."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from remora.configs.planning.kv_budget import pages_needed
from remora.configs.planning.plan import EnginePlan
from remora.configs.planning.rounding import ROUNDINGS
from remora.configs.planning.window_plan import WindowRoom
from remora.engine.client import LocalEngineClient
from remora.engine.embeddings import PromptEmbeddings
from remora.engine.engine import Engine
from remora.engine.types import (
    NOT_FINITE,
    LogprobRows,
    Request,
    RowFault,
    RowInit,
    SamplingParams,
    StepPlan,
    StepResult,
    TokenArray,
)

MakeClient = Callable[..., LocalEngineClient]

VOCAB = 50
NO_TOKEN = -7


def next_token(context: list[int], adapter: int = 0) -> int:
    """The fake model: a function of context and adapter, and never 0, the end of sequence."""
    state = len(context) + 1000 * adapter
    for token in context:
        state = (state * 31 + token + 7) % 1_000_003
    return state % (VOCAB - 1) + 1


def expected_output(prompt: list[int], count: int, adapter: int = 0) -> list[int]:
    """What the fake model generates for `prompt`, undisturbed."""
    context = list(prompt)
    for _ in range(count):
        context.append(next_token(context, adapter))
    return context[len(prompt) :]


def make_logprobs(token_ids: TokenArray) -> LogprobRows:
    """Lines that say nothing but which tokens they are of."""
    count = len(token_ids)
    return LogprobRows(
        token_ids=token_ids,
        logprobs=np.zeros(count, np.float32),
        ranks=np.ones(count, np.int32),
        top_ids=np.zeros((count, 0), np.int64),
        top_logprobs=np.zeros((count, 0), np.float32),
    )


def drafts_of(plan: StepPlan) -> dict[int, list[int]]:
    """The drafts of each row that has some."""
    drafts, rest = {}, plan.draft_ids.tolist()
    for row, count in zip(plan.rows.tolist(), plan.num_drafts.tolist(), strict=False):
        if count:
            drafts[row], rest = rest[:count], rest[count:]
    assert not rest, "drafts of no row"
    return drafts


class FakeRunner:
    """Executes plans as a rank would, reading every context token back through the page table.

    All work is put off until `finish`, as a device that lags behind would.
    window:  of layers with a page pool of their own: their window is read back too
    """

    def __init__(self, page_size: int = 4, window: int | None = None) -> None:
        self.page_size = page_size
        self.window = window
        self.window_memory: dict[int, tuple[int, int]] = {}
        self.window_tables: dict[int, list[int]] = {}
        self.memory: dict[int, tuple[int, int]] = {}  # token and adapter that it was computed by
        self.adapters = {0: 0}  # slot -> lora_id
        self.tables: dict[int, list[int]] = {}
        self.rows: dict[int, RowInit] = {}
        self.tokens: dict[int, list[int]] = {}
        self.plans: list[StepPlan] = []
        self.bad_rows: set[int] = set()
        self.fault: RowFault = NOT_FINITE
        self.error: Exception | None = None
        self.begun: StepPlan | None = None
        self.work: deque[Callable[[], StepResult | None]] = deque()
        self.num_ended = 0
        self.is_closed = False

    def begin(self, plan: StepPlan) -> None:
        if self.error is not None:
            raise self.error
        assert self.begun is None, "a step was begun before the one before was sampled"
        self.begun = plan
        self.plans.append(plan)
        self.work.append(partial(self.take_in, plan))
        self.work.append(partial(self.forward, plan))

    def sample(self, ended: Collection[int] = ()) -> None:
        assert self.begun is not None
        assert set(ended) <= set(self.begun.rows.tolist())
        self.num_ended += len(ended)
        self.work.append(partial(self.choose, self.begun, frozenset(ended)))
        self.begun = None

    def finish(self) -> StepResult:
        while (done := self.work.popleft()()) is None:
            pass
        return done

    def take_in(self, plan: StepPlan) -> None:
        for row in plan.dropped.tolist():
            del self.tables[row], self.tokens[row]
        self.adapters |= {load.slot: load.lora_id for load in plan.loads}
        for init in plan.added:
            assert init.row not in self.tables, "a row was started twice without being dropped"
            self.tables[init.row], self.tokens[init.row] = [], init.token_ids.tolist()
            self.window_tables[init.row] = []
            self.rows[init.row] = init
        for row, page in zip(plan.page_rows.tolist(), plan.page_ids.tolist(), strict=True):
            self.tables[row].append(page)
        if self.window is not None:
            assert len(plan.window_ids) == len(plan.page_ids)
            for row, page in zip(plan.page_rows.tolist(), plan.window_ids.tolist(), strict=True):
                self.window_tables[row].append(page)
        counts = plan.num_tokens.tolist()
        assert counts == sorted(counts, key=lambda count: count > 1), "one-token rows come first"

    def forward(self, plan: StepPlan) -> None:
        drafts = drafts_of(plan)
        for place, row in enumerate(plan.rows.tolist()):
            known = [*self.tokens[row], *drafts.get(row, ())]
            self.compute(row, known, int(plan.starts[place]), int(plan.num_tokens[place]))

    def choose(self, plan: StepPlan, ended: Collection[int] = ()) -> StepResult:
        rows: list[int] = []
        sampled: list[int] = []
        drafts = drafts_of(plan)
        logprobs = {}
        for row in plan.rows[plan.samples].tolist():
            run = [NO_TOKEN] if row in ended else self.new_tokens(row, drafts.get(row, []))
            self.tokens[row] += run
            rows += [row] * len(run)
            sampled += run
            if self.rows[row].sampling.logprobs is not None:
                logprobs[row] = make_logprobs(np.array(run))
        scored = {}
        for place, row in enumerate(plan.rows.tolist()):
            init, start = self.rows[row], int(plan.starts[place])
            if init.prompt_logprobs is not None and start + 1 < init.num_prompt_tokens:
                stop = min(start + int(plan.num_tokens[place]) + 1, init.num_prompt_tokens)
                scored[row] = make_logprobs(init.token_ids[start + 1 : stop])
        return StepResult(
            step_id=plan.step_id,
            rows=np.array(rows, dtype=np.int32),
            token_ids=np.array(sampled, dtype=np.int64),
            logprobs=logprobs,
            prompt_logprobs=scored,
            bad_rows={row: self.fault for row in rows if row in self.bad_rows},
        )

    def new_tokens(self, row: int, drafts: list[int]) -> list[int]:
        """Sample until a token is not the next draft, reading drafts that were right."""
        known, adapter = list(self.tokens[row]), self.adapter(row)
        first = len(known)
        for draft in (*drafts, None):
            known.append(next_token(self.read(row, known), adapter))
            if known[-1] != draft:
                break
        return known[first:]

    def compute(self, row: int, known: list[int], start: int, count: int) -> None:
        for position in range(start, start + count):
            self.memory[self.slot(row, position)] = known[position], self.adapter(row)
        if self.window is not None:
            self.compute_windowed(row, known, range(start, start + count), self.window)

    def compute_windowed(self, row: int, known: list[int], positions: range, window: int) -> None:
        what = {at: (known[at], self.adapter(row)) for at in range(positions.stop)}
        for at in positions:
            slot = self.slot(row, at, self.window_tables)
            assert slot >= self.page_size, "the dump page was written to"
            self.window_memory[slot] = what[at]
        for at in range(max(0, positions.start - window + 1), positions.stop):
            found = self.window_memory[self.slot(row, at, self.window_tables)]
            assert found == what[at], "what the window sees is another's"

    def read(self, row: int, known: list[int]) -> list[int]:
        context = [self.memory[self.slot(row, at)] for at in range(len(known))]
        expected = [(token, self.adapter(row)) for token in known]
        assert context == expected, "KV memory holds another sequence's or adapter's tokens"
        return known

    def adapter(self, row: int) -> int:
        return self.adapters[self.rows[row].adapter_slot]

    def slot(self, row: int, position: int, tables: dict[int, list[int]] | None = None) -> int:
        page = (tables or self.tables)[row][position // self.page_size]
        return page * self.page_size + position % self.page_size

    def close(self) -> None:
        self.is_closed = True


def make_plan(**changes: object) -> EnginePlan:
    """A small plan: 4 rows, pages of 4 tokens."""
    values: dict[str, object] = {
        "model_path": Path("fake"),
        "served_model_name": "fake",
        "load_format": "dummy",
        "device": "cpu",
        "dtype": "float32",
        "quantization": "none",
        "cpu_kernels": "auto",
        "num_threads": 1,
        "page_size": 4,
        "num_pages": 32,
        "kv_bytes": 0,
        "weight_bytes": 0,
        "max_model_len": 128,
        "max_running_requests": 4,
        "max_step_tokens": 16,
        "prefill_chunk_tokens": 8,
        "max_queued_requests": 8,
        "prefix_cache": True,
        "conservativeness": 1.0,
        "step_timeout_s": 30.0,
        "random_seed": 0,
        "low_priority_first": False,
        "priority_preemption_gap": None,
    }
    values |= changes
    values.setdefault("formats", ROUNDINGS.get(str(values["quantization"])))
    return EnginePlan(**values)  # type: ignore[arg-type]


def make_engine(
    plan: EnginePlan | None = None, runner: FakeRunner | None = None, **options: Any
) -> Engine:
    """Make an engine over the fake model; `options` as of Engine."""
    plan = plan or make_plan()
    runner = runner or FakeRunner(plan.page_size)
    return Engine(plan, runner, eos_token_ids=[0], vocab_size=VOCAB, **options)


def make_request(
    name: str, prompt: list[int] | PromptEmbeddings, sampling: SamplingParams, **fields: Any
) -> Request:
    """A request whose prompt is ids, or embeddings."""
    if not isinstance(prompt, PromptEmbeddings):
        return Request(request_id=name, prompt_ids=prompt, sampling=sampling, **fields)
    fields["embeddings"] = prompt
    return Request(request_id=name, prompt_ids=prompt.ids, sampling=sampling, **fields)


def make_window_room(*, window: int = 6, num_pages: int, overlap: bool = False) -> WindowRoom:
    """Pages of layers with a window, for `make_plan`'s pages and chunks."""
    ahead = window + (16 if overlap else 8)
    row_pages = pages_needed(ahead, 4) + 1
    return WindowRoom(layers=(True,), window=window, num_pages=num_pages, row_pages=row_pages)
