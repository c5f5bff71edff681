"""Starts and stops a replica's background telemetry: logs, metrics push, spans, crash dumps."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.observing.crash_dump import CrashDump
from remora.deployments.observing.gc_log import GcLog
from remora.deployments.observing.memory_log import MemoryLog
from remora.deployments.observing.ray_metrics import RayMetrics, in_replica
from remora.deployments.observing.spans import Spans
from remora.deployments.observing.stats_log import StatsLog


class Telemetry:
    """The telemetry tasks and hooks that one replica's configuration enables.

    failed:  waits for the engine to fail, and returns the error

    Construct it on the replica's event loop. Raises ConfigError.
    """

    def __init__(
        self,
        server: ServerState,
        replica_id: str,
        failed: Callable[[], Awaitable[Exception]] = asyncio.Future,
    ) -> None:
        self._tasks: list[asyncio.Task[None]] = []
        self._hooks = ExitStack()
        metrics, debug = server.config.metrics, server.config.debug
        if metrics.log_stats_period_s is not None:
            self._start(StatsLog(server.client.stats).run(metrics.log_stats_period_s))
        if metrics.push_url is not None:
            # Imports an HTTP client, for which few replicas have a use.
            from remora.deployments.observing.metrics_push import MetricsPusher

            pusher = MetricsPusher(metrics, metrics.push_url, server.metrics.render, replica_id)
            self._start(pusher.run())
        if metrics.enabled and metrics.export_to_ray and in_replica():
            self._start(RayMetrics(server.metrics.collect).run())
        if metrics.log_gc_s is not None:
            self._hooks.callback(GcLog(metrics.log_gc_s).close)
        if metrics.trace_endpoint is not None:
            spans = Spans(metrics.trace_endpoint, server.plan.served_model_name, replica_id)
            server.calls.observers.add(spans)
            self._hooks.callback(spans.close)
        if debug.crash_dump_dir is not None:
            dump = CrashDump(Path(debug.crash_dump_dir), replica_id)
            server.calls.observers.add(dump)
            self._start(_write_after(failed, dump))
        if debug.trace_memory_s is not None:
            memory = MemoryLog(debug.trace_memory_frames)
            self._hooks.callback(memory.close)
            self._start(memory.run(debug.trace_memory_s))

    def _start(self, task: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(task))

    def close(self) -> None:
        """Stop all telemetry. Thread-safe."""
        for task in self._tasks:
            with suppress(RuntimeError):  # the event loop has been closed
                task.get_loop().call_soon_threadsafe(task.cancel)
        self._hooks.close()


async def _write_after(failed: Callable[[], Awaitable[Exception]], dump: CrashDump) -> None:
    # Synchronously, on the event loop: the process is about to end.
    dump.write(await failed())
