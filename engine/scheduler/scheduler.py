"""What runs in the next step.

One rule: every sequence has `num_computed` tokens behind it and some pending; a step hands out
tokens under a budget until computed catches up. Decode, chunked prefill, prefix hits and recompute
after preemption are all this rule. Decode rows come first, then started prompts, then new ones,
admitted by the peak estimate. When pages run out, a sequence is preempted and queued again.

A step may be planned while the one before is still in flight: its tokens are *in flight*, the
outputs that it will sample are *pending*. Lengths are planned with both. Results arrive later, in
order; a sequence that ended or was preempted meanwhile ignores them. Pages and rows are reused at
once: steps run one after the other, so the new owner's step follows the old owner's.

Knows sequences and page counts. Knows nothing of tensors, threads, text or time.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Container, Iterable

from remora.configs.errors import InvariantViolated
from remora.configs.planning.scheduling_plan import BY_ARRIVAL, SchedulingPlan
from remora.engine.kv.cache import KVCache
from remora.engine.scheduler.adapter_slots import AdapterSlots
from remora.engine.scheduler.admission import (
    ReserveRatio,
    Start,
    can_start,
    is_within_fraction,
    uncached_tokens,
)
from remora.engine.scheduler.admission_order import WaitingOrder
from remora.engine.scheduler.admission_pace import Refusal
from remora.engine.scheduler.beam_searches import BeamSearches, every_output
from remora.engine.scheduler.fair_shares import MAX_SCORED_TOKENS, FairShares
from remora.engine.scheduler.in_flight import InFlightStep
from remora.engine.scheduler.integrity import (
    check_adapters,
    check_pages,
    check_rows,
    check_tokens,
)
from remora.engine.scheduler.outputs import news_of, output_of
from remora.engine.scheduler.plan_builder import PlanBuilder
from remora.engine.scheduler.priority import waiting_key
from remora.engine.scheduler.sequence import Sequence, running_rows
from remora.engine.spec.speculation import Speculation
from remora.engine.types import (
    FinishReason,
    LogprobRows,
    SequenceOutput,
    StepPlan,
    StepResult,
)

# Sequences that may start before one that waits for an adapter slot; then all wait until a running
# sequence frees a slot.
MAX_SKIPPED = 32


class Scheduler:
    """Waiting and running sequences of one engine."""

    def __init__(
        self,
        kv: KVCache,
        *,
        max_running: int,
        max_step_tokens: int,
        chunk_tokens: int,
        eos_token_ids: Iterable[int],
        conservativeness: float = 1.0,
        priority_preemption_gap: int | None = None,
        adapters: AdapterSlots | None = None,
        rules: SchedulingPlan = BY_ARRIVAL,
        seed: int = 0,
        speculation: Speculation | None = None,
        searches: BeamSearches | None = None,
    ) -> None:
        self.kv = kv
        self.speculation = speculation
        self.adapters = adapters or AdapterSlots(0)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = self.num_finished = self.num_aborted = 0
        self.num_prompt_tokens = self.num_cached_tokens = self.num_generated_tokens = 0
        self.reserve = ReserveRatio(conservativeness, rules.reserve)
        self._rules = rules
        self._order = WaitingOrder(rules.policy, seed=seed)
        self._max_step_tokens = max_step_tokens
        self._chunk_tokens = chunk_tokens
        self._eos_token_ids = frozenset(eos_token_ids)
        self._preemption_gap = priority_preemption_gap
        self._free_rows = list(range(max_running - 1, -1, -1))
        self._dropped_rows: list[int] = []
        self.in_flight: deque[InFlightStep] = deque()
        self._num_steps = self._num_waiting_tokens = self._num_evictions = 0
        self._prompts: set[Sequence] = set()
        self._refusal = Refusal()
        self.shares = FairShares()
        self._searches = searches or BeamSearches(self._eos_token_ids)

    # -- requests ----------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        return bool(self.waiting or self.running)

    @property
    def num_queued_tokens(self) -> int:
        """Tokens to compute before every open sequence decodes, given the cache at arrival."""
        return self._num_waiting_tokens + sum(
            seq.num_pending
            for seq in self._prompts
            if seq.num_pending > 1 or not seq.prompt_is_computed
        )

    def add(self, seq: Sequence) -> None:
        """Queue a sequence that fits an empty engine."""
        if seq.request.tenant.name or self.shares.is_on:
            self.shares.arrive(seq.request.tenant, self._backlogged(), self.running)
        insort(self.waiting, seq, key=waiting_key)
        self._refusal.forget()
        seq.num_queued_tokens = uncached_tokens(seq, self.kv)
        self._num_waiting_tokens += seq.num_queued_tokens

    def abort(self, seq: Sequence) -> list[SequenceOutput]:
        """End a waiting or running sequence and free its pages. Only between steps."""
        self.num_aborted += 1
        self._end(seq, FinishReason.ABORT)
        return every_output(output_of(seq), seq)

    def _backlogged(self) -> set[str]:
        """Return the tenants that have prompts to compute."""
        prompts = [seq for seq in self._prompts if seq.num_pending > 1]
        return {seq.request.tenant.name for seq in (*self.waiting, *prompts)}

    def check_integrity(self) -> None:
        """Raise InvariantViolated unless rows, queues and pages are consistent."""
        check_pages(self.running, self.kv)
        check_rows(self.running, self.waiting, self._free_rows)
        check_tokens(self.running, self.waiting, self._prompts, self._num_waiting_tokens)
        check_adapters(self.running, self.adapters)
        self._searches.check_integrity()

    # -- before a step -----------------------------------------------------------------------

    def schedule(self, *, admitting: bool = True) -> StepPlan | None:
        """Plan the next step; None when there is nothing to do before a result arrives.

        admitting:  whether waiting sequences may start; must be true when nothing runs
        """
        rules = self._rules
        step = PlanBuilder(
            self._max_step_tokens,
            max_prompt_tokens=rules.max_prefill_tokens,
            max_prompts=rules.max_prefill_requests,
            max_scored_tokens=MAX_SCORED_TOKENS if self.shares.is_on else None,
        )
        preemptions_before = self.num_preemptions
        decoding, extending = running_rows(self.running, self._prompts)
        if rules.mixed_steps:
            self._decode(decoding, step)
        if self.shares.is_on:
            admitting &= self.num_preemptions == preemptions_before
            self._compute_in_turn(extending, step, admitting=admitting)
        else:
            for seq in extending:
                self._extend(seq, step)
            if admitting and self.num_preemptions == preemptions_before:
                self._admit(step)  # not after preemptions: the victim would return at once
        if not rules.mixed_steps and not step.has_tokens:
            self._decode(decoding, step)
        if self.speculation is not None:
            self._draft(self.speculation, step)
        if not step.has_tokens:
            if self.has_work and not self.in_flight:
                raise InvariantViolated("sequences are waiting, and no step can be planned")
            return None
        self._num_steps += 1
        step.move(*self._searches.take_moves())
        plan, rows = step.launch(self._num_steps, self._dropped_rows)
        self._dropped_rows = []
        self.in_flight.append(InFlightStep(plan, rows))
        return plan

    def _decode(self, decoding: list[Sequence], step: PlanBuilder) -> None:
        """Plan one token for each sequence; those without room on their last page come last."""
        page_size = self.kv.page_size
        ready: list[Sequence] = []
        growing: list[Sequence] = []
        for seq in decoding:
            has_room = seq.num_computed + seq.num_in_flight_tokens < (
                len(seq.table.pages) * page_size
            )
            (ready if has_room else growing).append(seq)
        ready = ready[: step.budget]
        step.plan_next(ready)
        self.shares.charge_each(ready)
        for seq in growing:
            if seq.row is not None and step.budget > 0:  # not preempted for one before it
                self._plan_tokens(seq, 1, step, of_prompt=False)

    def _draft(self, speculation: Speculation, step: PlanBuilder) -> None:
        """Add drafts to decoding rows, within the tokens and the free pages that are left."""
        for seq, draft_ids in speculation.propose(step.decoding(), step.budget):
            num_tokens = seq.num_planned + 1 + len(draft_ids)
            pages = self.kv.try_grow(seq.table, num_tokens, evicting=False)
            if pages is not None:
                step.plan_drafts(seq, draft_ids, pages)

    def _extend(self, seq: Sequence, step: PlanBuilder) -> None:
        count = min(seq.num_pending, self._chunk_tokens, step.prompt_room(seq))
        if seq.row is not None and count > 0:
            self._plan_tokens(seq, count, step, of_prompt=True)

    def _plan_tokens(
        self, seq: Sequence, count: int, step: PlanBuilder, *, of_prompt: bool
    ) -> None:
        """Give a running sequence its share of the step; preempts until it has its pages."""
        while (pages := self.kv.try_grow(seq.table, seq.num_planned + count)) is None:
            victim = self.shares.victim(other for other in self.running if not other.is_pinned)
            self._evict(victim, step)
            if victim is seq:
                return
        step.plan(seq, count, pages, of_prompt=of_prompt)
        if self.shares.is_on:
            self.shares.charge(seq.request.tenant, count)

    def _compute_in_turn(
        self, extending: list[Sequence], step: PlanBuilder, *, admitting: bool
    ) -> None:
        """Share the step's prompt tokens among tenants: of started prompts and of waiting ones."""
        evictions_before = self._num_evictions
        waiting = self._order.arrange(self.waiting, self.kv) if admitting else []
        turns = self.shares.in_turn([*extending, *waiting], self.running)
        started, skipped = set(extending), list[Sequence]()
        for seq in turns:
            if seq in started:
                self._extend(seq, step)
            elif admitting and step.prompt_room(seq) and self._num_evictions == evictions_before:
                result = self._start(seq, step, skipped)
                admitting = result is not Start.FULL
                if result is Start.BLOCKED:
                    turns.block(seq.request.tenant)
                    self.shares.yield_turn(seq.request.tenant, turns.backlogged)
            if step.budget == 0:
                return

    def _admit(self, step: PlanBuilder) -> None:
        """Start waiting sequences, in order, while rows, budget and the peak estimate allow.

        The first that does not fit ends the round: passing it could starve it. A sequence that
        lacks only an adapter slot may be skipped MAX_SKIPPED times.
        """
        skipped: list[Sequence] = []
        if not self.waiting or step.prompt_room() == 0 or self._refusal.holds(self._num_steps):
            return
        for seq in self._order.arrange(self.waiting, self.kv):
            if self._start(seq, step, skipped) is not Start.DONE:
                return

    def _start(self, seq: Sequence, step: PlanBuilder, skipped: list[Sequence]) -> Start:
        """Start a waiting sequence if it may start now.

        skipped:  sequences of this round that wait for an adapter slot
        """
        whole = not self._rules.chunked_prefill
        room = step.prompt_room(whole=whole)
        if room == 0:
            return Start.FULL
        if seq.waits_for_leader:
            return Start.DONE
        if seq.request.lora_id and not self.adapters.has_room(seq.request.lora_id):
            if seq.num_skipped >= MAX_SKIPPED:
                return Start.BLOCKED
            skipped.append(seq)
            return Start.DONE
        if not is_within_fraction(seq, self.running, self.kv, self.reserve):
            return Start.BLOCKED
        if whole and uncached_tokens(seq, self.kv) > room:
            return Start.FULL
        if not self._try_admit(seq, step) and not self._preempt_for(seq, step):
            return Start.FULL
        for other in skipped:
            other.num_skipped += other.request.tenant.name == seq.request.tenant.name
        return Start.DONE

    def _try_admit(self, seq: Sequence, step: PlanBuilder) -> bool:
        if len(self._free_rows) < seq.num_rows:
            return False
        if not seq.computes_prompt:
            known = seq.token_ids[: seq.num_tokens - 1]  # at least one token must be computed
            seq.num_computed = self.kv.attach_prefix(seq.table, seq.namespace, known)
        room = step.prompt_room(seq, whole=not self._rules.chunked_prefill)
        count = min(seq.num_pending, self._chunk_tokens, room)
        fits = not self.running or can_start(seq, self.running, self.kv, self.reserve)
        if not fits and not self.shares.is_on:
            self._refusal.note(self._num_steps)
        pages = self.kv.try_grow(seq.table, seq.num_computed + count) if fits else None
        if pages is None or not (seq.beams is None or seq.beams.reserve(self.kv)):
            self._forget_pages(seq)
            return False
        self._leave_queue(seq)
        self._order.on_start(seq, self.waiting)
        self._prompts.add(seq)
        for starting in (seq, *self._searches.start(seq)):
            self._take_row(starting, step)
        self.kv.note_hit(seq.table)
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = seq.num_computed
            self.num_prompt_tokens += seq.num_prompt_tokens
            self.num_cached_tokens += seq.num_computed
        step.start(seq, seq.table.pages[: seq.table.num_matched])
        step.plan(seq, count, pages, of_prompt=True)
        if self.shares.is_on:
            self.shares.charge(seq.request.tenant, count)
        return True

    def _take_row(self, seq: Sequence, step: PlanBuilder) -> None:
        self.running.append(seq)
        seq.row = self._free_rows.pop()
        seq.num_starts += 1
        lora_id = seq.request.lora_id
        if lora_id:
            seq.adapter_slot, is_new = self.adapters.acquire(lora_id)
            if is_new:
                step.load(seq.adapter_slot, lora_id)

    # -- preemption --------------------------------------------------------------------------

    def _preempt_for(self, seq: Sequence, step: PlanBuilder) -> bool:
        """Preempt for higher priority or a tenant's share, if that makes enough room."""
        weaker = self.shares.giving_way(self.running, seq, self._preemption_gap)
        weaker = [other for other in weaker if not other.is_pinned]
        for count in range(1, len(weaker) + 1):
            leaving = weaker[:count]
            staying = [other for other in self.running if other not in leaving]
            if not staying or can_start(seq, staying, self.kv, self.reserve):
                for victim in leaving:
                    self.preempt(victim, step)
                return self._try_admit(seq, step)
        return False

    def _evict(self, seq: Sequence, step: PlanBuilder) -> None:
        """Preempt because memory is short, and raise the reserve."""
        seq.num_evictions += 1
        self._num_evictions += 1
        self.preempt(seq, step)
        self.reserve.on_preemption(
            sum(other.num_output_tokens for other in self.running),
            sum(other.max_tokens for other in self.running),
            len(self.running),
        )

    def preempt(self, seq: Sequence, step: PlanBuilder) -> None:
        """Take a sequence's pages and row, and queue it again."""
        self.num_preemptions += 1
        is_new = step.starts(seq)
        num_planned = step.cancel(seq)
        if self.shares.is_on:
            self.shares.charge(seq.request.tenant, -num_planned)
        self._leave_row(seq)
        if is_new:
            self._dropped_rows.pop()  # no rank knows it
        self._forget_pages(seq)
        self.add(seq)

    def _forget_pages(self, seq: Sequence) -> None:
        if seq.beams is not None:
            seq.beams.release(self.kv)
        self.kv.retire(seq.table, seq.namespace, seq.token_ids, seq.num_computed)
        seq.num_computed = seq.num_in_flight_tokens = seq.num_pending_outputs = 0
        if seq.wants_prompt_logprobs:
            seq.prompt_logprob_parts = []

    def _leave_queue(self, seq: Sequence) -> None:
        self.waiting.remove(seq)
        self._num_waiting_tokens -= seq.num_queued_tokens

    def _leave_row(self, seq: Sequence) -> None:
        if seq.row is None:
            raise InvariantViolated(f"{seq.request.request_id} has no row to free")
        for mate in self._searches.end(seq):
            self._leave_row(mate)
        self.running.remove(seq)
        self._prompts.discard(seq)
        self._refusal.forget()
        self._free_rows.append(seq.row)
        self._dropped_rows.append(seq.row)
        seq.row = None
        if seq.adapter_slot:
            self.adapters.release(seq.request.lora_id)
            seq.adapter_slot = 0

    def _end(self, seq: Sequence, reason: FinishReason, *, keep_cached: bool = True) -> None:
        if seq.is_finished:
            raise InvariantViolated(f"{seq.request.request_id} was ended twice")
        seq.finish_reason = reason
        if seq.row is None:
            self._leave_queue(seq)
        else:
            self._leave_row(seq)
        if seq.beams is not None:
            seq.beams.release(self.kv)
        if keep_cached and not seq.is_pinned:
            self.kv.retire(seq.table, seq.namespace, seq.token_ids, seq.num_computed)
        else:
            self.kv.release(seq.table)
        if self.speculation is not None:
            self.speculation.end(seq)
        if not self.has_work:
            self.reserve.on_idle()

    # -- after a step ------------------------------------------------------------------------

    def apply(self, result: StepResult) -> list[SequenceOutput]:
        """Apply the oldest step's result; returns an output for each sequence that has news."""
        step = self.in_flight.popleft()
        plan = step.plan
        if result.step_id != plan.step_id:
            raise InvariantViolated(f"step {plan.step_id} was answered as {result.step_id}")
        self.reserve.on_step()
        runs, counts = result.runs(), plan.num_tokens.tolist()
        drafted: Container[int] = ()
        if self.speculation is not None:
            drafted = step.settle_drafts(self.speculation, result, runs, counts)
        logprobs, completed, windows = result.logprobs, result.completed, self.kv.windows
        has_extras = bool(result.hidden_states or result.prompt_logprobs or result.bad_rows)
        outputs = []
        for (row, (seq, start)), count in zip(step.rows.items(), counts, strict=True):
            if seq.row is None or seq.num_starts != start:  # as in `holds`
                continue
            if has_extras:
                seq.take_extras(row, count, result)
            seq.num_computed += count
            seq.num_in_flight_tokens -= count
            run = runs.get(row)
            if run is not None:
                seq.num_pending_outputs -= 1
            if row in result.bad_rows and seq.beams is None:
                self.num_aborted += 1
                self._end(seq, FinishReason.ABORT, keep_cached=False)
                outputs.append(output_of(seq, error=result.bad_rows[row]))
                continue
            if (count > 1 and row not in drafted) or seq.num_computed == seq.num_prompt_tokens:
                self._publish(seq)
            if windows is not None:
                self.kv.slide(seq.table, seq.num_computed)
            if run is not None:
                outputs.append(
                    self._accept(seq, run, logprobs.get(row), is_complete=row in completed)
                )
        for root, ends in self._searches.apply(step, result):
            self.num_generated_tokens += root.num_rows
            if ends and (reason := ends[0].finish_reason) is not None:
                self.num_aborted += reason is FinishReason.ABORT
                self.num_finished += 0 if reason is FinishReason.ABORT else len(ends)
                self._end(root, reason)
                outputs += ends
        if self._prompts:
            self._prompts.difference_update(
                [seq for seq in self._prompts if seq.num_pending <= 1 and seq.prompt_is_computed]
            )
        return outputs

    def _publish(self, seq: Sequence) -> None:
        self.kv.publish(seq.table, seq.namespace, seq.token_ids, seq.num_computed)
        kept = seq.request.kept_tokens
        if kept and seq.prompt_is_computed:
            self.kv.keep(seq.namespace, seq.token_ids[:kept])

    def _accept(
        self,
        seq: Sequence,
        run: tuple[int, ...],
        logprobs: LogprobRows | None,
        *,
        is_complete: bool,
    ) -> SequenceOutput:
        """Append new tokens, and end the sequence if the last of them is its last."""
        sampling = seq.request.sampling
        token_ids = seq.token_ids
        is_first = len(token_ids) == seq.num_prompt_tokens
        token_ids += run
        token = run[-1]  # only this one can be the last: drafts never are
        self.num_generated_tokens += len(run)
        is_stop_token = token in sampling.stop_token_ids or (
            token in self._eos_token_ids and (is_complete or not sampling.ignore_eos)
        )
        if is_complete or is_stop_token or len(token_ids) == seq.longest:
            stopped = is_complete or is_stop_token
            self.num_finished += 1
            self._end(seq, FinishReason.STOP if stopped else FinishReason.LENGTH)
        return news_of(
            seq, run, logprobs, is_first=is_first, stop_token_id=token if is_stop_token else None
        )
