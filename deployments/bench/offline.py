"""Run the engine in this process step by step, and measure every step.

Needs neither Ray nor a web framework. Outputs are not detokenized: only the engine is measured.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from remora.configs.errors import ConfigError
from remora.configs.planning.loading import Loading
from remora.configs.planning.plan import EnginePlan
from remora.configs.schema import ServeConfig
from remora.deployments.bench.drafts import NOTE, DraftTotals, draft_figures
from remora.deployments.bench.report.record import Result
from remora.deployments.bench.roofline import Bounds, ModelWork, bound_share, model_work
from remora.deployments.bench.stats import Slo, Trace, figures_of
from remora.deployments.bench.workloads import Kind, Workload, token_prompts
from remora.engine.launch import BuiltEngine, build_engine
from remora.engine.models.config import DecoderConfig
from remora.engine.models.implementation import Ours, implementation_of
from remora.engine.types import Request, SamplingParams, StepPlan, StepResult
from remora.lora.setup import configured

WARM_UP = Workload(name="warm-up", num_requests=2, input_tokens=16, output_tokens=4)
_NOT_SERVED = {
    Kind.EMBEDDING: "not served yet: the engine makes no embeddings",
    Kind.JSON_SCHEMA: "not served yet: the engine knows no JSON schemas",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The size of one step, and the duration of its parts."""

    num_rows: int
    num_tokens: int
    total_s: float
    forward_s: float
    sample_s: float
    draft_s: float = 0.0
    num_drafts: int = 0

    @property
    def schedule_s(self) -> float:
        """Time outside of forward pass, sampling and drafting: the engine's own work."""
        return max(self.total_s - self.forward_s - self.sample_s - self.draft_s, 0.0)

    @property
    def is_decode(self) -> bool:
        """Whether every row computed one token, and its drafts."""
        return self.num_tokens == self.num_rows + self.num_drafts


@dataclass(slots=True)
class OfflineRun:
    """Measurements of requests that ran together.

    drafts:  figures of speculative decoding
    """

    traces: list[Trace]
    seconds: float
    steps: list[StepTime]
    drafts: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class _Progress:
    """The outputs of one request so far."""

    stamps_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_cached: int = 0
    error: str | None = None


def work_of_plan(plan: EnginePlan, step_bytes: float | None = None) -> ModelWork:
    """Return the work per token of a plan's model. Raises ConfigError.

    step_bytes:  bytes of weights that a step reads, as the built engine reports them
    """
    return model_work(
        _decoder_config(plan.model_path, plan.loading),
        dtype=plan.dtype,
        quantization=plan.quantization,
        rounding=plan.formats,
        step_bytes=step_bytes,
    )


def _decoder_config(path: Path, loading: Loading) -> DecoderConfig:
    chosen = implementation_of(path, loading)
    if isinstance(chosen, Ours):
        return chosen.config
    raise ConfigError(
        f"{path} is run by transformers, and remora bench measures only families that remora "
        "implements; `remora doctor model` shows the reason"
    )


class OfflineEngine:
    """An engine in this process. Raises ConfigError if it cannot be built."""

    def __init__(self, config: ServeConfig, *, show_progress: bool = True) -> None:
        self.built: BuiltEngine = build_engine(
            config, adapting=configured(config.lora), show_progress=show_progress
        )
        self._engine = self.built.engine
        self._done: list[tuple[StepPlan, StepResult]] = []
        self._engine.watch(lambda plan, result: self._done.append((plan, result)))
        self._numbers = itertools.count()
        try:
            self.work: ModelWork = work_of_plan(self.built.plan, self.built.step_weight_bytes)
        except ConfigError:
            self.close()
            raise

    def close(self) -> None:
        """Stop the engine's threads and processes."""
        self._engine.close()

    def why_not(self, workload: Workload) -> str | None:
        """Return why the workload cannot run here; None if it can."""
        if workload.kind in _NOT_SERVED:
            return _NOT_SERVED[workload.kind]
        plan = self.built.plan
        needed = workload.input_tokens + workload.output_tokens
        if needed > plan.max_sequence_tokens:
            return f"needs {needed} tokens per sequence; the engine has {plan.max_sequence_tokens}"
        return None

    def run(
        self, workload: Workload, *, seed: int = 0, on_finish: Callable[[], object] = lambda: None
    ) -> OfflineRun:
        """Run the workload once, on an empty prefix cache.

        on_finish:  called at the end of each request
        """
        self._engine.flush_cache()
        requests = self._requests(workload, seed)
        seen = {request.request_id: _Progress() for request in requests}
        steps: list[StepTime] = []
        before = DraftTotals.of_stats(self._engine.stats())
        started = time.perf_counter()
        try:
            for request in requests:
                self._engine.add(request)
            while self._engine.has_work:
                self._step(seen, steps, on_finish)
        except BaseException:  # includes Ctrl-C: the engine must stay usable
            self._engine.abort_all()
            raise
        ended = time.perf_counter()
        return OfflineRun(
            traces=[
                Trace(
                    started_s=started,
                    stamps_s=one.stamps_s,
                    num_prompt_tokens=workload.input_tokens,
                    num_cached_tokens=one.num_cached,
                    num_output_tokens=one.num_tokens,
                    error=one.error,
                )
                for one in seen.values()
            ],
            seconds=ended - started,
            steps=steps,
            drafts=draft_figures(before, DraftTotals.of_stats(self._engine.stats())),
        )

    def _step(
        self, seen: dict[str, _Progress], steps: list[StepTime], on_finish: Callable[[], object]
    ) -> None:
        started = time.perf_counter()
        self._done.clear()
        outputs = self._engine.step()
        ended = time.perf_counter()
        for plan, result in self._done:
            steps.append(
                StepTime(
                    num_rows=len(plan.rows),
                    num_tokens=int(plan.num_tokens.sum()),
                    total_s=ended - started,
                    forward_s=result.forward_s,
                    sample_s=result.sample_s,
                    draft_s=result.draft_s,
                    num_drafts=len(plan.draft_ids),
                )
            )
        for output in outputs:
            one = seen[output.request_id]
            if output.token_ids:
                one.stamps_s.append(ended)
                one.num_tokens += len(output.token_ids)
            one.num_cached = max(one.num_cached, output.num_cached_tokens)
            one.error = one.error if output.error is None else str(output.error)
            if output.finish_reason is not None:
                on_finish()

    def _requests(self, workload: Workload, seed: int) -> list[Request]:
        sampling = SamplingParams(
            max_tokens=workload.output_tokens, temperature=0.0, ignore_eos=True
        )
        prompts = token_prompts(workload, seed=seed, vocab_size=self.built.facts.vocab_size)
        return [
            Request(request_id=f"bench-{next(self._numbers)}", prompt_ids=prompt, sampling=sampling)
            for prompt in prompts
        ]


def measure(
    engine: OfflineEngine,
    workload: Workload,
    *,
    repeats: int,
    seed: int = 0,
    slo: Slo | None = None,
    on_finish: Callable[[], object] = lambda: None,
) -> Result:
    """Warm up, run the workload `repeats` times with the same prompts, and take medians."""
    reason = engine.why_not(workload)
    if reason is not None:
        return Result(workload=workload.name, shape=workload.shape, skipped=reason)
    engine.run(WARM_UP.resized(inputs=min(WARM_UP.input_tokens, workload.input_tokens)))
    runs = [
        run_figures(engine.run(workload, seed=seed, on_finish=on_finish), slo)
        for _ in range(repeats)
    ]
    notes = (NOTE,) if any("draft_rows" in figures for figures in runs) else ()
    return Result.of_runs(workload.name, workload.shape, runs, notes)


def run_figures(run: OfflineRun, slo: Slo | None = None) -> dict[str, float]:
    """Return the figures of one run."""
    return figures_of(run.traces, run.seconds, slo) | step_figures(run.steps) | run.drafts


def step_figures(steps: Sequence[StepTime]) -> dict[str, float]:
    """Return medians of the decode steps and their parts; of all steps if none only decoded."""
    chosen = [step for step in steps if step.is_decode] or list(steps)
    if not chosen:
        return {}
    parts = {
        "step_ms": [step.total_s for step in chosen],
        "schedule_ms": [step.schedule_s for step in chosen],
        "forward_ms": [step.forward_s for step in chosen],
        "sample_ms": [step.sample_s for step in chosen],
    }
    if any(step.draft_s for step in chosen):
        parts["draft_ms"] = [step.draft_s for step in chosen]
    figures = {name: statistics.median(values) * 1e3 for name, values in parts.items()}
    outside = sum(step.schedule_s + step.sample_s for step in chosen)
    return figures | {"overhead_share": outside / sum(step.total_s for step in chosen)}


def with_bound(result: Result, workload: Workload, work: ModelWork, bounds: Bounds) -> Result:
    """Return the result with the share of the machine's bound that it reached."""
    single = workload.num_requests == 1 and not workload.is_prefill
    if result.skipped or (single and "decode_tok_s" not in result.figures):
        return result
    share = bound_share(
        result.figures,
        work,
        bounds,
        num_requests=workload.num_requests,
        num_inputs=workload.input_tokens,
        num_outputs=workload.output_tokens,
    )
    return replace(result, figures=result.figures | {"bound_share": share})
