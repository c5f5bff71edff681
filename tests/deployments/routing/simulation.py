"""Replicas and routers on a virtual clock: the real scheduler, KV cache, ledger and policies.

Only the model is missing: a step takes as long as SmolLM2 took on two cores when it was measured
(tests/benchmarks/results/2026-11-21-cpu.md), and every token is the same. Everything is drawn from
seeds, so a run can be repeated to the last digit. Adapters take time to load and a place in memory;
rows that use one cost no more than others.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

import numpy as np

from remora.deployments.routing.key import RouteKey
from remora.deployments.routing.ledger import Ledger
from remora.deployments.routing.policies import make_policy
from remora.deployments.routing.report import Report
from remora.engine.engine import Engine
from remora.engine.kv.hashes import page_hashes
from remora.engine.types import Namespace, Request, SamplingParams, StepPlan, StepResult
from tests.deployments.routing.adapter_memory import AdapterMemory
from tests.deployments.routing.loads import TOKEN, Call
from tests.engine.fakes import make_plan

PAGE_SIZE = 16
# 118 tok/s with one row, 1,507 tok/s of prompt in steps of 512, 47 ms a step with 64 rows.
STEP_S, TOKEN_S = 0.008, 0.00062
REPORT_S = 0.5
# From a replica by way of Serve's controller, which looks every 0.1 s, to a router.
REPORT_WAY_S = 0.1
MAX_IMBALANCE = 1.5
LOAD_S = 0.3


class _Runner:
    """Answers every row with the same token and knows what that costs."""

    def __init__(self) -> None:
        self.cost_s = 0.0

    def begin(self, plan: StepPlan) -> None:
        self.plan = plan
        self.cost_s = STEP_S + TOKEN_S * int(plan.num_tokens.sum())

    def sample(self, ended: Collection[int] = ()) -> None:
        pass

    def finish(self) -> StepResult:
        rows = self.plan.rows[self.plan.samples]
        ids = np.full(len(rows), TOKEN, np.int64)
        return StepResult(step_id=self.plan.step_id, rows=rows, token_ids=ids)

    def close(self) -> None:
        pass


class Replica:
    """An engine whose steps take virtual time."""

    def __init__(
        self, name: str, adapters: AdapterMemory, *, kv_tokens: int, max_pages: int
    ) -> None:
        self.name = name
        self.adapters = adapters
        self.runner = _Runner()
        plan = make_plan(
            page_size=PAGE_SIZE,
            num_pages=kv_tokens // PAGE_SIZE,
            max_model_len=8192,
            max_running_requests=64,
            max_step_tokens=512,
            prefill_chunk_tokens=512,
            max_queued_requests=10_000,
        )
        self.engine = Engine(plan, self.runner, eos_token_ids=(0,), vocab_size=50_000)
        self.open: dict[str, Call] = {}
        self.is_stepping = False
        self._max_pages = max_pages
        self._inbox: list[tuple[str, Call]] = []

    def take(self, name: str, call: Call) -> None:
        """Queue a request for the next step."""
        self._inbox.append((name, call))
        self.open[name] = call

    def begin_step(self) -> tuple[float, list[tuple[str, bool]]] | None:
        """Run a step; returns what it takes, and who gets a token (and whether the last)."""
        for name, call in self._inbox:
            sampling = SamplingParams(max_tokens=call.num_output, temperature=0.0, ignore_eos=True)
            self.engine.add(Request(request_id=name, prompt_ids=call.prompt, sampling=sampling))
        self._inbox = []
        if not self.engine.has_work:
            return None
        outputs = self.engine.step()
        return self.runner.cost_s, [(o.request_id, o.finish_reason is not None) for o in outputs]

    def report(self, now_s: float) -> Report:
        """Return what it would tell now."""
        stats = self.engine.stats()
        waiting = sum(len(call.prompt) for _, call in self._inbox)
        return Report(
            made_at_s=now_s,
            num_queued_tokens=stats.num_queued_tokens + waiting,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting + len(self._inbox),
            kv_usage=stats.kv_usage,
            page_hashes=self.engine.page_hashes(self._max_pages),
            adapters=self.adapters.resident,
        )


class Simulation:
    """Routers of one policy before a few replicas.

    reads_prompts:  whether routers know how long a prompt is, as behind a gateway
    max_adapters:   that a replica holds at a time
    """

    def __init__(
        self,
        policy: str,
        *,
        num_replicas: int,
        num_routers: int = 1,
        kv_tokens: int = 32_768,
        max_pages: int = 8192,
        reads_prompts: bool = True,
        max_adapters: int = 16,
        seed: int = 0,
    ) -> None:
        self.now_s = 0.0
        self._policy, self._reads_prompts = policy, reads_prompts
        self.finished: list[Call] = []
        self._chance = random.Random(seed)
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self.replicas = {
            name: Replica(
                name,
                AdapterMemory(max_adapters, load_s=LOAD_S, later=self._later),
                kv_tokens=kv_tokens,
                max_pages=max_pages,
            )
            for name in (f"replica-{n}" for n in range(num_replicas))
        }
        self._routers = [
            (
                make_policy(
                    policy,
                    max_imbalance=MAX_IMBALANCE,
                    page_size=PAGE_SIZE,
                    chance=random.Random(seed * 97 + n),
                ),
                Ledger(max_pages=max_pages, clock=lambda: self.now_s),
            )
            for n in range(num_routers)
        ]
        for _, ledger in self._routers:
            ledger.keep(self.replicas)
        self._num_expected = 0

    def run(self, calls: Iterable[tuple[float, Call]]) -> list[Call]:
        """Let calls arrive at their times, and those that follow them; returns all, ended."""
        for at_s, call in calls:
            self._expect(at_s, call)
        for replica in self.replicas.values():
            self._at(self._chance.uniform(0, REPORT_S), partial(self._make_report, replica))
        while len(self.finished) < self._num_expected:
            self.now_s, _, event = heapq.heappop(self._events)
            event()
        return self.finished

    # -- events --------------------------------------------------------------------------------

    def _at(self, at_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), event))

    def _later(self, after_s: float, event: Callable[[], None]) -> None:
        self._at(self.now_s + after_s, event)

    def _expect(self, at_s: float, call: Call) -> None:
        self._num_expected += 1
        self._at(at_s, lambda: self._arrive(call))

    def _arrive(self, call: Call) -> None:
        call.arrived_s = self.now_s
        call.router = self._chance.randrange(len(self._routers))
        call.key = RouteKey(
            session=call.session,
            page_hashes=page_hashes(Namespace(), call.prompt, PAGE_SIZE)
            if self._policy == "prefix"
            else b"",
            num_tokens=len(call.prompt) if self._reads_prompts else 0,
            adapter=call.adapter,
        )
        policy, ledger = self._routers[call.router]
        call.replica = policy.rank(ledger.views(self.replicas), call.key)[0]
        name = f"call-{next(self._order)}"
        ledger.sent(name, call.replica, call.key)
        replica = self.replicas[call.replica]
        enter = partial(self._enter, replica, name, call)
        if call.adapter is None:
            enter()
        else:
            replica.adapters.use(call.adapter, enter)

    def _enter(self, replica: Replica, name: str, call: Call) -> None:
        replica.take(name, call)
        if not replica.is_stepping:
            self._step(replica)

    def _step(self, replica: Replica) -> None:
        step = replica.begin_step()
        replica.is_stepping = step is not None
        if step is not None:
            cost_s, told = step
            self._at(self.now_s + cost_s, lambda: self._end_step(replica, told))

    def _end_step(self, replica: Replica, told: Sequence[tuple[str, bool]]) -> None:
        for name, is_last in told:
            call = replica.open[name]
            if call.first_token_s is None:
                call.first_token_s = self.now_s
            if is_last:
                del replica.open[name]
                self._routers[call.router][1].ended(name, replica.name)
                if call.adapter is not None:
                    replica.adapters.release(call.adapter)
                self._end(call)
        self._step(replica)

    def _end(self, call: Call) -> None:
        self.finished.append(call)
        if call.after is not None:
            pause_s, make_next = call.after
            self._expect(self.now_s + pause_s, make_next(call))

    def _make_report(self, replica: Replica) -> None:
        stats = replica.report(self.now_s).as_stats()
        for _, ledger in self._routers:
            self._at(
                self.now_s + self._chance.uniform(0.2, 1) * REPORT_WAY_S,
                partial(ledger.take_report, replica.name, stats),
            )
        period_s = REPORT_S * self._chance.uniform(0.9, 1.1)
        self._at(self.now_s + period_s, partial(self._make_report, replica))

    # -- figures -------------------------------------------------------------------------------

    def first_token_s(self, share: float) -> float:
        """Return the quantile of the time to the first token."""
        waits = sorted((c.first_token_s or 0.0) - c.arrived_s for c in self.finished)
        return waits[min(len(waits) - 1, int(share * len(waits)))]

    @property
    def hit_rate(self) -> float:
        """Prompt tokens found in a cache, of all."""
        stats = [replica.engine.stats() for replica in self.replicas.values()]
        return sum(s.cached_tokens_total for s in stats) / sum(s.prompt_tokens_total for s in stats)

    @property
    def num_loads(self) -> int:
        """How often an adapter was loaded."""
        return sum(replica.adapters.num_loads for replica in self.replicas.values())

    @property
    def imbalance(self) -> float:
        """Tokens computed by the busiest replica, as a multiple of the mean."""
        work = [
            stats.prompt_tokens_total - stats.cached_tokens_total + stats.generated_tokens_total
            for stats in (replica.engine.stats() for replica in self.replicas.values())
        ]
        return max(work) * len(work) / sum(work)
