"""What replicas say without the variables of `remora serve`, and terminals with them."""

from __future__ import annotations

import logging
import traceback
import tracemalloc

import pytest
from ray._private.ray_logging import LogDeduplicator

from remora.deployments.observing import memory_log
from remora.deployments.serve_environment import ENVIRONMENT, WITHOUT_TRACEBACKS, unset_warning
from tests.configs.test_banner import make_banner

(SKIPPED,) = WITHOUT_TRACEBACKS.values()


def test_nothing_is_said_under_remora_serve_or_when_the_operator_has_chosen() -> None:
    assert unset_warning(ENVIRONMENT) is None
    assert unset_warning(dict.fromkeys(ENVIRONMENT, "of the operator")) is None


def test_what_is_missing_is_named_with_its_price() -> None:
    name = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
    text = unset_warning({key: value for key, value in ENVIRONMENT.items() if key != name})

    assert text is not None
    assert f"{name}=remora.deployments.http.core.serve_proxy:middlewares (" in text
    assert text.count("=") == 1


def shown(text: str) -> list[str]:
    """Return the lines that Ray copies to a terminal, of what a process has logged."""
    batch = {"ip": "1", "pid": 1, "is_err": True, "lines": text.split("\n")}
    (found, *_) = LogDeduplicator(5, None, SKIPPED).deduplicate(batch)
    return list(found["lines"])


def chained() -> str:
    try:
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise ValueError("outer\nin two lines") from error
    except ValueError:
        return traceback.format_exc()


@pytest.mark.parametrize("who", ["", "\x1b[36mray::A.f()\x1b[39m (pid=7, ip=::1, actor_id=9)\n"])
def test_terminals_get_an_error_without_its_traceback(who: str) -> None:
    logged = f"ERROR 2026-01-01 remora_LLMServer r1 -- it failed\n{who}{chained()}INFO next"

    assert shown(logged) == [
        "ERROR 2026-01-01 remora_LLMServer r1 -- it failed",
        "KeyError: 'inner'",
        "ValueError: outer",
        "in two lines",
        "INFO next",
    ]


def test_terminals_get_no_lines_about_ports_of_replicas() -> None:
    who = "INFO 2026-01-01 remora_LLMServer r1 -- "
    logged = [
        "Allocated port 30000 for RequestProtocol.HTTP",
        "Calling user-provided callback from import path 'remora.deployments.x:middlewares'.",
        "Successfully started RequestProtocol.HTTP server on port 30000",
        "Started HTTP server on port 30000",
        "HTTPOptions.host='127.0.0.1' won't accept connections from HAProxy on other nodes; a",
        "draining: timeout_s=5",
    ]

    assert shown("\n".join(f"{who}{line}" for line in logged)) == [f"{who}{logged[-1]}"]


def test_terminals_get_the_errors_of_a_group() -> None:
    try:
        raise ExceptionGroup("several", [OSError("one")])
    except ExceptionGroup:
        lines = shown(traceback.format_exc())

    assert [line.strip(" |") for line in lines] == [
        "ExceptionGroup: several (1 sub-exception)",
        "OSError: one",
    ]


def test_terminals_get_all_other_lines(caplog: pytest.LogCaptureFixture) -> None:
    tracemalloc.start(3)
    before, held = tracemalloc.take_snapshot(), [[number] for number in range(99)]
    with caplog.at_level(logging.INFO, memory_log.__name__):
        memory_log._log_growth(before, tracemalloc.take_snapshot())
    tracemalloc.stop()
    assert held
    ours = [
        *make_banner().splitlines(),
        *caplog.messages[-1].splitlines(),
        "Fatal Python error: Aborted",
        '  File "/x/y.py", line 3 in run',
        "api.keys: unknown; did you mean api.key?",
    ]

    assert shown("\n".join(ours)) == ours


def test_a_message_of_ray_that_is_a_traceback_is_not_copied() -> None:
    (found, *_) = LogDeduplicator(5, None, SKIPPED).deduplicate(
        {"pid": "raylet", "is_err": False, "lines": [f"An actor has failed:\n{chained()}"]}
    )

    assert found["lines"] == []
