"""What is logged of requests, steps, throughput and collections, and by whose configuration."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from remora.configs.errors import ConfigError
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.observing.log_files import apply_log_config
from remora.deployments.observing.stats_log import StatsLog
from remora.deployments.observing.telemetry import Telemetry
from remora.deployments.serve_context import limit_access_log
from remora.engine.types import EngineStats
from tests.deployments.fakes import FakeEngine, FakeServer, make_client, make_server_config

CHAT = "/v1/chat/completions"
LONG = "prompt " * 100


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, "remora"):
        yield caplog


async def ask(caplog: pytest.LogCaptureFixture, **metrics: Any) -> list[str]:
    """Send one request; return the lines about it."""
    config = make_server_config(metrics=metrics)
    server = FakeServer(FakeEngine(text="Paris. " * 100), config=config)
    body = {"messages": [{"role": "user", "content": LONG}], "temperature": 0.25, "n": 2}
    async with make_client(server) as client:
        assert (await client.post(CHAT, json=body)).status_code == 200
    return [r.getMessage() for r in caplog.records if "request_log" in r.name]


@pytest.mark.observes("metrics.log_requests")
@pytest.mark.parametrize(
    ("detail", "chars"), [("metadata", None), ("sampling", None), ("clipped", 256), ("full", 700)]
)
async def test_a_request_is_logged_in_the_detail_asked_for(
    logged: pytest.LogCaptureFixture, detail: str, chars: int | None
) -> None:
    (logged_text,) = await ask(logged, log_requests=detail)

    line = json.loads(logged_text.removeprefix("request "))
    assert (line["sequences"], line["output_tokens"]) == (2, 1400)
    assert line["finish_reasons"] == ["stop", "stop"]
    assert line.get("sampling", {}).get("temperature") == (None if detail == "metadata" else 0.25)
    assert [len(text) for text in line.get("answers", [])] == ([] if chars is None else [chars] * 2)
    if chars is not None:
        assert line["texts"][0].startswith("<|user|>prompt")
        assert (len(line["texts"][0]) > 700) is (detail == "full")


async def test_nothing_of_a_request_is_logged_by_default(logged: pytest.LogCaptureFixture) -> None:
    assert await ask(logged) == []


@pytest.mark.observes("metrics.log_responses")
@pytest.mark.parametrize(("how", "chars"), [("clipped", 256), ("full", 700)])
async def test_answers_are_logged_when_asked_for(
    logged: pytest.LogCaptureFixture, how: str, chars: int
) -> None:
    (line,) = await ask(logged, log_responses=how)

    answers = json.loads(line.removeprefix("response "))["answers"]
    assert list(map(len, answers)) == [chars] * 2


@pytest.mark.observes("metrics.log_clip_chars")
async def test_the_length_of_clipped_texts_is_a_setting(logged: pytest.LogCaptureFixture) -> None:
    (line,) = await ask(logged, log_responses="clipped", log_clip_chars=5)

    assert json.loads(line.removeprefix("response "))["answers"] == ["Paris"] * 2


@pytest.mark.observes("metrics.log_request_times")
async def test_where_a_requests_time_went_is_logged(logged: pytest.LogCaptureFixture) -> None:
    (line,) = await ask(logged, log_request_times=True)

    times = json.loads(line.removeprefix("times "))
    parts = times["queue_s"] + times["prefill_s"] + times["decode_s"]
    assert times["whole_s"] == pytest.approx(parts, abs=1e-4)
    assert times["decode_s"] > 0


async def test_a_request_that_fails_is_logged_with_its_reason(
    logged: pytest.LogCaptureFixture,
) -> None:
    config = make_server_config(metrics={"log_requests": "metadata", "log_request_times": True})
    server = FakeServer(FakeEngine(error=RuntimeError("broken"), fail_at=0), config=config)
    async with make_client(server) as client:
        await client.post(CHAT, json={"messages": [{"role": "user", "content": "Hi"}]})

    request, times = (r.getMessage() for r in logged.records if "request_log" in r.name)
    assert '"error":"error"' in request
    assert '"prefill_s":null' in times


def stats(**values: float) -> EngineStats:
    return replace(FakeEngine().stats(), **values)  # type: ignore[arg-type]


@pytest.mark.observes("metrics.log_stats_period_s")
async def test_throughput_is_logged_each_period_and_not_when_switched_off(
    logged: pytest.LogCaptureFixture,
) -> None:
    async def lines(period_s: float | None, until: int = 0) -> int:
        server = FakeServer(
            config=make_server_config(metrics={"log_stats_period_s": period_s}),
        )
        counters = iter(range(1, 10**6))
        server.client.stats = lambda: stats(steps_total=next(counters))  # type: ignore[method-assign]
        logged.clear()
        telemetry = Telemetry(ServerState.over(server), "r")
        async with asyncio.timeout(10.0):
            await asyncio.sleep(0.2)
            while logged.text.count("throughput: ") < until:
                await asyncio.sleep(0.01)
        telemetry.close()
        await asyncio.sleep(0)
        return logged.text.count("throughput: ")

    assert await lines(None) == 0
    assert await lines(0.05, until=2) >= 2
    assert await lines(10.0) == 0


def test_throughput_is_that_since_the_last_line_and_idle_engines_are_silent(
    logged: pytest.LogCaptureFixture,
) -> None:
    looks = iter(
        [
            stats(),
            stats(steps_total=3, prompt_tokens_total=80, cached_tokens_total=20, num_running=2),
            stats(steps_total=3, prompt_tokens_total=80, cached_tokens_total=20),
        ]
    )
    clock = iter([0.0, 4.0, 8.0])
    line = StatsLog(lambda: next(looks), lambda: next(clock))
    line.log_once()
    line.log_once()

    (record,) = (r.getMessage() for r in logged.records)
    assert "prompt 20.0 tokens/s" in record
    assert "prefix cache hits 25.0 %" in record


@pytest.mark.observes("metrics.log_gc_s")
async def test_a_slow_garbage_collection_is_warned_about(logged: pytest.LogCaptureFixture) -> None:
    async def warnings(threshold_s: float | None) -> int:
        config = make_server_config(metrics={"log_gc_s": threshold_s})
        telemetry = Telemetry(ServerState.over(FakeServer(config=config)), "r")
        logged.clear()
        gc.collect()
        telemetry.close()
        return logged.text.count("gc: slow collection")

    assert await warnings(1e-9) >= 1
    assert await warnings(3600.0) == 0
    assert await warnings(None) == 0


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.mark.observes("metrics.access_log_level")
def test_the_access_log_follows_its_own_level(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("ray.serve")

    def lines(level: str | None) -> list[str]:
        limit_access_log(level)
        handler = Lines()
        logger.addHandler(handler)
        with caplog.at_level(logging.INFO, "ray.serve"):
            logger.info("GET /health 200", extra={"serve_access_log": True})
            logger.info("started")
        logger.removeHandler(handler)
        return handler.lines

    try:
        assert lines("WARNING") == ["started"]
        assert lines("INFO") == lines(None) == ["GET /health 200", "started"]
    finally:
        limit_access_log(None)


@pytest.mark.observes("metrics.access_log_skip")
def test_paths_may_be_left_out_of_the_access_log() -> None:
    logger, handler = logging.getLogger("ray.serve"), Lines()
    logger.addHandler(handler)
    try:
        limit_access_log(None, ["/health"])
        for line in ("GET /health 200 1.0ms", "GET /healthy 404 1.0ms", "POST /a 200 1.0ms"):
            logger.warning(line, extra={"serve_access_log": True})
        logger.warning("GET /health is slow")
    finally:
        limit_access_log(None)
        logger.removeHandler(handler)

    assert handler.lines == ["GET /healthy 404 1.0ms", "POST /a 200 1.0ms", "GET /health is slow"]


YAML = """
handlers:
  file: {{class: logging.FileHandler, filename: {path}, formatter: short}}
formatters:
  short: {{format: "%(levelname)s>%(message)s"}}
loggers:
  remora: {{level: WARNING, handlers: [file]}}
"""
INI = """
[loggers]
keys=root,ours
[handlers]
keys=file
[formatters]
keys=short
[logger_root]
handlers=
[logger_ours]
qualname=remora
level=WARNING
handlers=file
[handler_file]
class=FileHandler
args=({path!r},)
formatter=short
[formatter_short]
format=%(levelname)s>%(message)s
"""


@pytest.mark.observes("metrics.log_config")
@pytest.mark.parametrize(("name", "text"), [("log.yaml", YAML), ("log.ini", INI)])
def test_handlers_and_levels_follow_a_file(tmp_path: Path, name: str, text: str) -> None:
    config, written = tmp_path / name, tmp_path / "lines"
    config.write_text(text.format(path=str(written)))
    root = logging.getLogger()
    handlers = root.handlers[:]

    apply_log_config(str(config))
    root.handlers = handlers
    logging.getLogger("remora.some.room").info("unseen")
    logging.getLogger("remora.some.room").warning("seen")

    for handler in logging.getLogger("remora").handlers:
        handler.close()
    assert written.read_text() == "WARNING>seen\n"


@pytest.mark.parametrize("text", ["[1]", "{handlers: {a: {class: no.such.Class}}}", "a: [", None])
def test_a_file_that_is_no_logging_configuration_is_a_config_error(
    tmp_path: Path, text: str | None
) -> None:
    path = tmp_path / "log.yaml"
    if text is not None:
        path.write_text(text)

    with pytest.raises(ConfigError, match=r"metrics\.log_config"):
        apply_log_config(str(path))
