"""The engine, one step at a time: requests in, tokens out.

Joins scheduler and runner. With `overlap`, a step is planned and begun before the tokens of the one
before are known: a pipeline of depth 1. Single-threaded: the caller of `step` chooses the thread
(loop.py runs it in its own, llm.py in the caller's). Knows no text, no asyncio, no HTTP.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from remora.configs.errors import ConfigError, InvalidRequest, InvalidSampling
from remora.configs.planning.plan import EnginePlan
from remora.engine.beams.fit import beams_for, check_beams
from remora.engine.beams.pages import BeamPages
from remora.engine.embeddings import check_rows
from remora.engine.kv.cache import KVCache
from remora.engine.kv.radix import Listener
from remora.engine.kv.window import WindowPages
from remora.engine.protocols import Runner
from remora.engine.sampling.params import SamplingParams, sequence_seed
from remora.engine.sampling.sampler import check_token_ids
from remora.engine.scheduler.adapter_slots import AdapterSlots
from remora.engine.scheduler.admission import check_fits
from remora.engine.scheduler.admission_pace import AdmissionPace
from remora.engine.scheduler.beam_searches import BeamSearches
from remora.engine.scheduler.outputs import output_of
from remora.engine.scheduler.plan_builder import PlanBuilder
from remora.engine.scheduler.scheduler import Scheduler
from remora.engine.scheduler.sequence import Sequence
from remora.engine.scheduler.timeouts import Timeouts
from remora.engine.spec.speculation import Speculation
from remora.engine.tokens.tokenizer import Tokenizer
from remora.engine.types import EngineStats, Request, SequenceOutput, StepPlan, StepResult

_SEED_SPACE = 2**64


class Engine:
    """Scheduler, KV pages and a runner."""

    def __init__(
        self,
        plan: EnginePlan,
        runner: Runner,
        *,
        overlap: bool = False,
        eos_token_ids: Iterable[int],
        vocab_size: int,
        clock: Callable[[], float] = time.monotonic,
        speculation: Speculation | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """Begin without requests.

        overlap:      whether the runner begins a step before the result of the one before is known
        speculation:  drafts tokens; not together with `overlap`, because the number of tokens that
                      a step yields is not known before its result
        tokenizer:    for stop texts of beams; None = they end none
        """
        if overlap and speculation is not None:
            raise ConfigError("speculation does not work while steps overlap")
        self.plan = plan
        self._runner = runner
        self._overlap = overlap
        self._is_in_flight = False
        self._watchers: list[Callable[[StepPlan, StepResult], object]] = []
        self._vocab_size = vocab_size
        self._clock = clock
        self._kv = KVCache(
            plan.num_pages,
            page_size=plan.page_size,
            prefix_cache=plan.prefix_cache,
            eviction=plan.prefix_eviction,
            windows=_windows(plan),
        )
        stop_ids = frozenset(eos_token_ids)
        self._scheduler = Scheduler(
            self._kv,
            max_running=plan.max_running_requests,
            max_step_tokens=plan.max_step_tokens,
            chunk_tokens=plan.prefill_chunk_tokens,
            eos_token_ids=stop_ids,
            conservativeness=plan.conservativeness,
            priority_preemption_gap=plan.priority_preemption_gap,
            adapters=_slots(plan),
            rules=plan.scheduling,
            seed=plan.random_seed,
            speculation=speculation,
            searches=BeamSearches(stop_ids, tokenizer),
        )
        self._pace = AdmissionPace(
            interval_steps=plan.scheduling.admission_interval_steps,
            interval_s=plan.scheduling.admission_interval_s,
            clock=clock,
        )
        self._timeouts: Timeouts | None = None
        rules = plan.scheduling
        if rules.waiting_timeout_s is not None or rules.running_timeout_s is not None:
            self._timeouts = Timeouts(rules.waiting_timeout_s, rules.running_timeout_s)
        self._open: dict[str, dict[int, Sequence]] = {}
        self._random = random.Random(plan.random_seed)
        self._held: list[Sequence] | None = None
        self._num_arrived = 0
        self._num_steps = 0
        self._step_time_s = 0.0
        self._last_step_s = 0.0

    @property
    def has_work(self) -> bool:
        """Whether `step` would do something."""
        return self._scheduler.has_work or self._is_in_flight

    def add(self, request: Request) -> None:
        """Queue a request's n sequences. Raises PromptTooLong or InvalidRequest, and adds none."""
        self.check(request)
        if request.request_id in self._open:
            raise InvalidRequest(f"Request id {request.request_id!r} is in use already.", "rid")
        sampling = request.sampling
        seed = sampling.seed
        if seed is None:
            seed = self._random.randrange(_SEED_SPACE)
        prompt = request.kept_prompt_ids
        room = self.plan.max_sequence_tokens - len(prompt)
        arrived_s = self._clock()
        leader: Sequence | None = None
        sequences: dict[int, Sequence] = {}
        max_tokens = room if sampling.max_tokens is None else sampling.max_tokens
        beams: BeamPages | None = None
        if sampling.beams is not None:
            max_tokens, beams = beams_for(request, max_tokens, self.plan)
        num_sequences = sampling.n if beams is None else 1
        shares = self._shares_prompt(num_sequences, len(prompt))
        namespace = request.namespace
        if shares and not self.plan.prefix_cache:
            namespace = replace(namespace, request_id=request.request_id)
        for index in range(num_sequences):
            self._num_arrived += 1
            sequences[index] = Sequence(
                request=request,
                index=index,
                seed=sequence_seed(seed, index),
                order=self._num_arrived,
                priority=self._priority(request),
                max_tokens=max_tokens,
                token_ids=[*prompt, *request.given_ids],
                num_prompt_tokens=len(prompt),
                namespace=namespace,
                leader=leader,
                arrived_s=arrived_s,
                beams=beams,
            )
            if shares:
                leader = sequences[0]  # the others borrow its prompt pages
            if self._held is None:
                self._scheduler.add(sequences[index])
            else:
                self._held.append(sequences[index])
        self._open[request.request_id] = sequences

    def _shares_prompt(self, num_sequences: int, num_prompt_tokens: int) -> bool:
        """Return whether a request's sequences share the pages of their prompt."""
        is_several = num_sequences > 1 and num_prompt_tokens > self.plan.page_size
        return is_several and self.plan.share_prompts

    def _priority(self, request: Request) -> int:
        if not self.plan.scheduling.use_priorities:
            return 0
        return -request.priority if self.plan.low_priority_first else request.priority

    def _check_processor(self, sampling: SamplingParams) -> None:
        name, known = sampling.custom_logit_processor, self.plan.logit_processors
        if name is not None and name not in known:
            raise InvalidSampling(
                f"custom_logit_processor is {name!r}; "
                + (f"use one of {', '.join(known)}." if known else "this server has none."),
                "custom_logit_processor",
            )

    def check(self, request: Request) -> None:
        """Raise PromptTooLong or InvalidRequest if the request can never run. Thread-safe."""
        check_fits(request, self.plan)
        check_token_ids(request, self._vocab_size)
        self._check_processor(request.sampling)
        check_beams(request, self.plan)
        _check_embeddings(request, self.plan)
        if request.heal and (
            request.grammar is not None
            or request.reasoning is not None
            or request.sampling.prompt_logprobs is not None
        ):
            raise InvalidRequest(
                "Token healing does not work together with a constraint on the output, reasoning "
                "or prompt log-probabilities; leave one of them out.",
                "token_healing",
            )
        if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < self._vocab_size:
            raise InvalidRequest(
                f"The prompt holds token ids outside the model's: 0 to {self._vocab_size - 1}.",
                "prompt",
            )

    def is_waiting(self, request_id: str) -> bool:
        """Return whether an open request has no sequence that is running or has ended."""
        sequences = self._open.get(request_id, {})
        waiting = [*self._scheduler.waiting, *(self._held or ())]
        return bool(sequences) and all(seq in waiting for seq in sequences.values())

    def abort(self, request_id: str, index: int | None = None) -> list[SequenceOutput]:
        """End a request, or one of its sequences, unless it has ended already."""
        sequences = self._open.get(request_id, {})
        chosen = [
            seq
            for seq in sequences.values()
            if not seq.is_finished and (index is None or seq.index == index)
        ]
        for seq in chosen:
            if self._held and seq in self._held:
                self._held.remove(seq)
                self._scheduler.add(seq)
        outputs = [output for seq in chosen for output in self._scheduler.abort(seq)]
        self._forget_finished(request_id)
        return outputs

    def hold(self) -> None:
        """Hold new requests back until `go_on`; open ones run to their ends."""
        if self._held is None:
            self._held = []

    def go_on(self) -> None:
        """Queue the held requests in the order of arrival."""
        held, self._held = self._held or (), None
        for seq in held:
            self._scheduler.add(seq)

    def pause(self, *, retracting: bool) -> list[SequenceOutput]:
        """Finish the step in flight, for a time without steps that `unpause` ends.

        retracting:  whether running sequences leave their rows and pages and wait again; beam
                     searches keep theirs
        """
        outputs = self._forgetting(self._run(None)) if self._is_in_flight else []
        if retracting:
            for seq in [seq for seq in self._scheduler.running if not seq.is_pinned]:
                self._scheduler.preempt(seq, PlanBuilder(0))
        return outputs

    def unpause(self) -> None:
        """Forget the time without steps."""
        if self._timeouts is not None:
            self._timeouts.restart()

    def _end_expired(self, timeouts: Timeouts, now_s: float) -> list[SequenceOutput]:
        """End the requests with a sequence that is over a limit of time."""
        scheduler = self._scheduler
        outputs = []
        for seq, fault in timeouts.expired(scheduler.waiting, scheduler.running, now_s):
            if not seq.is_finished:
                self.abort(seq.request.request_id)
                outputs.append(output_of(seq, error=fault))
        return outputs

    def abort_all(self) -> list[SequenceOutput]:
        """End every open request."""
        return [output for request_id in list(self._open) for output in self.abort(request_id)]

    def restart(self) -> None:
        """Go on without requests, cached prefixes and loaded adapters; counters and pins stay.

        Also after a step has failed, once the runner has dropped all rows.
        """
        self.go_on()
        self.abort_all()
        self._scheduler.in_flight.clear()
        self._is_in_flight = False
        self._scheduler.adapters.clear()
        self._kv.flush()

    def step(self) -> list[SequenceOutput]:
        """Run one step. Raises what the runner raises; the engine is unusable afterwards."""
        started = self._clock()
        expired = [] if self._timeouts is None else self._end_expired(self._timeouts, started)
        is_due = self._pace.is_due(is_busy=bool(self._scheduler.running))
        plan = self._scheduler.schedule(admitting=is_due)
        if plan is None and not self._is_in_flight:
            return expired
        if plan is not None and plan.added:
            self._scheduler.in_flight[-1].note_start(started)
        outputs = expired + self._forgetting(self._run(plan))
        self._num_steps += plan is not None
        self._last_step_s = self._clock() - started
        self._step_time_s += self._last_step_s
        return outputs

    def _run(self, plan: StepPlan | None) -> list[SequenceOutput]:
        """Begin a step, take in the result of the one in flight, then sample the new one.

        With overlap the device has the next forward pass before the host reads tokens, and
        sampling knows all tokens before: counts, and what a grammar allows.
        """
        outputs: list[SequenceOutput] = []
        if plan is not None:
            self._runner.begin(plan)
        if self._is_in_flight:
            outputs = self._take(self._runner.finish())
        self._is_in_flight = plan is not None and self._overlap
        if self._is_in_flight:
            self._runner.sample(self._scheduler.in_flight[-1].ended_rows())
        elif plan is not None:
            self._runner.sample()
            outputs = self._take(self._runner.finish())
        return outputs

    def _take(self, result: StepResult) -> list[SequenceOutput]:
        """Take in the result of the oldest step in flight."""
        for watcher in self._watchers:
            watcher(self._scheduler.in_flight[0].plan, result)
        return self._scheduler.apply(result)

    def watch(self, callback: Callable[[StepPlan, StepResult], object]) -> None:
        """Call back with each step's plan and result, before `step` returns its outputs."""
        self._watchers.append(callback)

    def watch_cache(self, listener: Listener) -> None:
        """Report pages that the prefix cache stores and removes to `listener`."""
        self._kv.listen(listener)

    @property
    def adapters(self) -> AdapterSlots:
        """Adapters by slot. An adapter may be forgotten only when no open request uses it."""
        return self._scheduler.adapters

    def flush_cache(self) -> bool:
        """Drop the prefix cache; returns False, and keeps it, while sequences are open."""
        if self._scheduler.has_work:
            return False
        self._kv.flush()
        return True

    def page_hashes(self, limit: int) -> bytes:
        """Return the hashes (kv/hashes.py) of up to `limit` cached pages, latest used first."""
        return self._kv.newest_hashes(limit)

    def stats(self) -> EngineStats:
        """Return the counters as of the last step."""
        scheduler, kv = self._scheduler, self._kv
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) + len(self._held or ()),
            num_queued_tokens=scheduler.num_queued_tokens,
            num_pages=kv.num_pages,
            num_free_pages=kv.num_free,
            num_cached_pages=kv.num_cached,
            num_held_pages=kv.num_held,
            prompt_tokens_total=scheduler.num_prompt_tokens,
            cached_tokens_total=scheduler.num_cached_tokens,
            generated_tokens_total=scheduler.num_generated_tokens,
            preemptions_total=scheduler.num_preemptions,
            evicted_pages_total=kv.num_evicted,
            aborted_total=scheduler.num_aborted,
            finished_total=scheduler.num_finished,
            steps_total=self._num_steps,
            step_time_total_s=self._step_time_s,
            last_step_s=self._last_step_s,
            tenants=scheduler.shares.stats(scheduler.running, scheduler.waiting),
            **_window_stats(kv.windows),
            **_draft_stats(scheduler.speculation),
        )

    def check_integrity(self) -> None:
        """Raise InvariantViolated unless every page, row and queue is consistent."""
        self._scheduler.check_integrity()

    def close(self) -> None:
        """Close the runner."""
        self._runner.close()

    def _forgetting(self, outputs: list[SequenceOutput]) -> list[SequenceOutput]:
        """Return the outputs of a step; requests that have finished by them are no longer open."""
        for output in outputs:
            if output.finish_reason is not None:
                self._forget_finished(output.request_id)
        return outputs

    def _forget_finished(self, request_id: str) -> None:
        sequences = self._open.get(request_id)
        if sequences is not None and all(seq.is_finished for seq in sequences.values()):
            del self._open[request_id]
            namespace = next(iter(sequences.values())).namespace
            if namespace.request_id:
                self._kv.drop(namespace)


def _check_embeddings(request: Request, plan: EnginePlan) -> None:
    given = request.embeddings
    if given is None:
        return
    check_rows(given.rows, hidden_size=plan.embedding_size, dtype=plan.dtype, param="prompt")
    if len(given) != len(request.prompt_ids):
        raise InvalidRequest(
            f"The prompt has {len(request.prompt_ids)} tokens and {len(given)} embeddings; give "
            "one for each.",
            "prompt",
        )
    for is_asked, what in (
        (request.sampling.prompt_logprobs is not None, "log-probabilities of the prompt"),
        (request.heal, "token healing"),
        (request.prediction_ids, "a predicted output"),
    ):
        if is_asked:
            raise InvalidRequest(
                f"A prompt given as embeddings has no token ids, so {what} cannot be had with it; "
                "leave that out, or send text or token ids.",
                "prompt",
            )


def _windows(plan: EnginePlan) -> WindowPages | None:
    room = plan.windows
    if room is None:
        return None
    return WindowPages(
        room.num_pages,
        window=room.window,
        page_size=plan.page_size,
        row_pages=room.row_pages,
    )


def _window_stats(windows: WindowPages | None) -> dict[str, Any]:
    if windows is None:
        return {}
    return {
        "num_window_pages": windows.num_pages,
        "num_free_window_pages": windows.num_free,
        "num_held_window_pages": windows.num_held,
        "evicted_window_pages_total": windows.num_evicted,
    }


def _draft_stats(speculation: Speculation | None) -> dict[str, Any]:
    if speculation is None:
        return {}
    counts = speculation.counts
    return {
        "draft_tokens_total": counts.num_drafts,
        "accepted_drafts_total": counts.num_accepted,
        "drafted_rows_total": counts.num_rows,
        "drafts_by_source": tuple(speculation.by_source.items()),
        "draft_time_total_s": speculation.draft_s,
        "verify_steps_total": speculation.num_verify_steps,
        "verify_time_total_s": speculation.verify_s,
        "tried_drafts": tuple(speculation.tried_at),
        "right_drafts": tuple(speculation.right_at),
    }


def _slots(plan: EnginePlan) -> AdapterSlots:
    room = plan.adapters
    return AdapterSlots(0) if room is None else AdapterSlots(room.num_slots, eviction=room.eviction)
