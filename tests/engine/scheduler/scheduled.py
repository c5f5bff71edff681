"""An engine over a fake model, and what comes out of it.

The model's next token depends on every token it reads back through the page table, so shared, stale
or swapped pages show as wrong output.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from hypothesis import strategies as st

from remora.configs.planning.lora_slots import LoRASlotConfig
from remora.configs.planning.plan import EnginePlan
from remora.engine.spec.counts import DraftCounts
from remora.engine.spec.speculation import Speculation
from remora.engine.types import FinishReason, Request, SamplingParams, SequenceOutput
from tests.engine.fakes import FakeRunner, make_engine, make_plan

TWO_SLOTS = LoRASlotConfig(num_slots=2, max_rank=1, targets=())


PROMPTS = st.lists(st.integers(1, 2), min_size=1, max_size=30)


def make_request(
    name: str,
    prompt: list[int],
    max_tokens: int = 5,
    *,
    n: int = 1,
    prompt_logprobs: int | None = None,
    **fields: Any,
) -> Request:
    """Make a greedy request; `fields` as of Request."""
    sampling = SamplingParams(
        max_tokens=max_tokens, temperature=0.0, n=n, prompt_logprobs=prompt_logprobs
    )
    return Request(request_id=name, prompt_ids=prompt, sampling=sampling, **fields)


class Harness:
    """An engine, and what came out of it per sequence.

    runner:     instead of the fake model
    tokenizer:  for stop texts of beams
    """

    def __init__(
        self,
        *,
        overlap: bool = False,
        made: EnginePlan | None = None,
        runner: Any = None,
        speculation: Speculation | None = None,
        tokenizer: Any = None,
        **plan: object,
    ) -> None:
        self.plan = made or make_plan(**plan)
        window = self.plan.windows.window if self.plan.windows else None
        self.runner = runner or FakeRunner(self.plan.page_size, window)
        self.engine = make_engine(
            self.plan, self.runner, overlap=overlap, speculation=speculation, tokenizer=tokenizer
        )
        self.tokens: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.ends: dict[tuple[str, int], FinishReason] = {}
        self.described: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.scored: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.stops: dict[tuple[str, int], int | None] = {}
        self.errors: dict[tuple[str, int], str] = {}
        self.num_runs: dict[tuple[str, int], int] = defaultdict(int)
        self.drafts: dict[tuple[str, int], DraftCounts] = {}

    def add(self, name: str, prompt: list[int], max_tokens: int = 5, **fields: Any) -> None:
        self.engine.add(make_request(name, prompt, max_tokens, **fields))

    def abort(self, name: str) -> None:
        self.take(self.engine.abort(name))

    def take(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            key = (output.request_id, output.index)
            assert key not in self.ends, "output after the end"
            self.tokens[key] += output.token_ids
            self.num_runs[key] += bool(output.token_ids)
            self.drafts[key] = output.drafts
            if output.logprobs is not None:
                self.described[key] += output.logprobs.token_ids.tolist()
            self.scored[key] += [t for p in output.prompt_logprobs for t in p.token_ids.tolist()]
            if output.finish_reason is not None:
                self.ends[key], self.stops[key] = output.finish_reason, output.stop_token_id
            if output.error is not None:
                self.errors[key] = str(output.error)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.take(self.engine.step())
            self.engine.check_integrity()

    def run(self, max_steps: int = 3000) -> None:
        for _ in range(max_steps):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("the engine makes no progress")
