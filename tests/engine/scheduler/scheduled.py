"""An engine over a fake model, and what comes out of it.

The model's next token depends on every token it reads back through the page table, so shared, stale
or swapped pages show as wrong output.
"""

from __future__ import annotations

from collections import defaultdict

from hypothesis import strategies as st

from remora.configs.planning.lora_slots import LoRASlotConfig
from remora.configs.planning.plan import EnginePlan
from remora.engine.engine import Engine
from remora.engine.types import FinishReason, Request, SamplingParams, SequenceOutput
from tests.engine.fakes import VOCAB, FakeRunner, make_plan

TWO_SLOTS = LoRASlotConfig(num_slots=2, max_rank=1, targets=())


PROMPTS = st.lists(st.integers(1, 2), min_size=1, max_size=30)


def make_request(
    name: str,
    prompt: list[int],
    max_tokens: int = 5,
    *,
    priority: int = 0,
    salt: str = "",
    n: int = 1,
    prompt_logprobs: int | None = None,
    adapter: int = 0,
) -> Request:
    """A greedy request."""
    sampling = SamplingParams(
        max_tokens=max_tokens, temperature=0.0, n=n, prompt_logprobs=prompt_logprobs
    )
    return Request(
        request_id=name,
        prompt_ids=prompt,
        sampling=sampling,
        priority=priority,
        cache_salt=salt,
        lora_id=adapter,
    )


class Harness:
    """An engine, and what came out of it per sequence."""

    def __init__(
        self, *, overlap: bool = False, made: EnginePlan | None = None, **plan: object
    ) -> None:
        self.plan = made or make_plan(**plan)
        room = self.plan.windows
        shape = self.plan.page_size, None if room is None else room.window
        self.runner = FakeRunner(*shape)
        self.engine = Engine(
            self.plan,
            self.runner,
            eos_token_ids=[0],
            vocab_size=VOCAB,
            overlap=overlap,
        )
        self.tokens: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.ends: dict[tuple[str, int], FinishReason] = {}
        self.scored: dict[tuple[str, int], list[int]] = defaultdict(list)

    def take(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            key = (output.request_id, output.index)
            assert key not in self.ends, "output after the end"
            self.tokens[key] += output.token_ids
            self.scored[key] += [t for p in output.prompt_logprobs for t in p.token_ids.tolist()]
            if output.finish_reason is not None:
                self.ends[key] = output.finish_reason

    def step(self) -> None:
        self.take(self.engine.step())
        self.engine.check_integrity()

    def run(self, max_steps: int = 2000) -> None:
        for _ in range(max_steps):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("the engine makes no progress")
