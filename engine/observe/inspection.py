"""Watchers of a running engine, as configured; by default, none."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from remora.configs.errors import NotFinite
from remora.configs.schema import ServeConfig
from remora.engine.engine import Engine
from remora.engine.kv.events import CacheEvents
from remora.engine.kv.publisher import Publisher
from remora.engine.observe.profiling import Profiler
from remora.engine.observe.step_logs import StatusLines, StepTimes
from remora.engine.observe.step_records import StepRecords
from remora.engine.types import NOT_FINITE, StepPlan, StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """The configured watchers that others query.

    records:   the latest steps; None = not kept
    profiler:  None = no folder for traces
    events:    publishes events of the prefix cache; None = not published
    """

    records: StepRecords | None = None
    profiler: Profiler | None = None
    events: Publisher | None = None

    def close(self) -> None:
        """Stop the publisher."""
        if self.events is not None:
            self.events.close()


def inspect(engine: Engine, config: ServeConfig) -> Inspection:
    """Add the configured watchers to an engine before its first step. Raises ConfigError."""
    metrics, debug = config.metrics, config.debug
    records = None
    if debug.fail_on_nan:
        engine.watch(fail_on_nan)
    if metrics.log_step_interval is not None:
        engine.watch(StatusLines(metrics.log_step_interval, engine.stats))
    if debug.log_step_times:
        engine.watch(StepTimes())
    if metrics.max_step_records:
        records = StepRecords(
            engine.stats,
            max_records=metrics.max_step_records,
            window_s=metrics.step_records_s,
        )
        engine.watch(records)
    profiler = None
    if debug.profile_dir is not None:
        profiler = Profiler(Path(debug.profile_dir))
        engine.watch(profiler)
    return Inspection(records=records, profiler=profiler, events=_publish(engine, config))


def fail_on_nan(plan: StepPlan, result: StepResult) -> None:
    """Raise NotFinite if the logits of any row were not finite."""
    rows = [row for row, fault in result.bad_rows.items() if fault == NOT_FINITE]
    if rows:
        raise NotFinite(
            f"The logits of {len(rows)} of {len(plan.rows)} sequences were not finite; the engine "
            "stops because debug.fail_on_nan is set."
        )


def _publish(engine: Engine, config: ServeConfig) -> Publisher | None:
    keys = config.engine
    if keys.kv_events_endpoint is None:
        return None
    publisher = Publisher(keys.kv_events_endpoint, keys.kv_events_topic)
    engine.watch_cache(CacheEvents(publisher.emit, engine.plan.page_size))
    return publisher
