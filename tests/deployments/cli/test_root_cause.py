"""The line that says why a server did not start, from messages as Ray and Serve write them."""

from __future__ import annotations

import pytest

from remora.deployments.cli.root_cause import root_cause

RAN = '  File "/x/ray/serve/_private/replica.py", line 1928, in run\n    raise RuntimeError()\n'
ACTOR = "\x1b[36mray::ServeReplica:remora:LLMServer.initialize_and_get_metadata()\x1b[39m (pid=7)\n"
INNER = (
    "Traceback (most recent call last):\n"
    '  File "/x/remora/deployments/llm_server.py", line 90, in __init__\n'
    "    self._open(\n"
    "    ~~~~~~~~~~^\n"
)


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        ("The node timed out.\nFurther lines", "The node timed out."),
        ("", ""),
        (
            "The actor died because of an error raised in its creation task, "
            f"{ACTOR}{RAN}ValueError: no such port\nRequest: 1",
            "ValueError: no such port",
        ),
        (
            f"The deployment failed to start 3 times in a row. Error:\n{ACTOR}{RAN}"
            f"RuntimeError: {INNER}remora.configs.errors.ConfigError: model.path: bad\nlora: too\n",
            "model.path: bad\nlora: too",
        ),
        (f"{INNER}torch.OutOfMemoryError: 3 GiB\nframe #0: x\n", "OutOfMemoryError: 3 GiB"),
        (f"{INNER}KeyError: 'a'\n\nThe above:\n\n{INNER}OSError: no room", "OSError: no room"),
        (f"{INNER}AssertionError", "AssertionError"),
        (
            "The actor died unexpectedly before finishing this task.\n\tclass_name: X\n"
            "\tactor_id: 1\nThe actor is dead because its worker process has died. Exit type: X",
            "The actor is dead because its worker process has died. Exit type: X",
        ),
        ("It failed to start 3 times. Error:\nReplica was unhealthy.", "Replica was unhealthy."),
    ],
)
def test_the_cause_is_the_error_that_came_first(message: str, cause: str) -> None:
    assert root_cause(message) == cause
