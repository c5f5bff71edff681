"""Looking into a running replica: profiles, dumps, memory."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file

from remora.configs.errors import ConfigError, EngineError
from remora.deployments import serve_context
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.llm_server import LLMServer
from remora.deployments.observing.crash_dump import CrashDump
from remora.deployments.observing.replay import read_ids
from remora.deployments.observing.request_trace import RequestTrace
from remora.deployments.observing.telemetry import Telemetry
from remora.engine.types import Request, SamplingParams
from tests.conftest import TinyCheckpoints
from tests.deployments.fakes import FakeServer, make_client, make_server_config
from tests.deployments.pooling_replica import running

BODY = {"prompt": "Paris is", "temperature": 0, "max_tokens": 8, "ignore_eos": True}


@asynccontextmanager
async def replica(
    path: Path, monkeypatch: pytest.MonkeyPatch, **sections: Any
) -> AsyncGenerator[tuple[LLMServer, httpx.AsyncClient], None]:
    monkeypatch.setattr(serve_context, "log_through_serve", lambda: None)
    monkeypatch.setattr(serve_context, "listens_locally", lambda: True)
    defaults: dict[str, Any] = {"model": {"dtype": "float32"}, "engine": {"kv_tokens": 2048}}
    async with running(path, **(defaults | sections)) as (client, server):
        yield server, client
    await asyncio.sleep(0.05)


@pytest.mark.observes("debug.profile_dir", "debug.crash_dump_dir")
async def test_steps_are_profiled_and_a_failure_leaves_the_last_requests(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profiles, dumps = tmp_path / "profiles", tmp_path / "dumps"
    debug = {"profile_dir": str(profiles), "crash_dump_dir": str(dumps)}
    async with replica(tiny_checkpoints("llama"), monkeypatch, debug=debug) as (server, client):
        begun = await client.post("/start_profile", json={"num_steps": 3})
        twice = await client.post("/start_profile")
        answer = await client.post("/v1/completions", json=BODY)
        whole = await client.get("/start_profile")
        await client.post("/v1/completions", json=BODY)
        stopped = await client.post("/stop_profile")
        none = await client.post("/stop_profile")
        assert list(dumps.iterdir()) == []
        server._engine._client.fail(EngineError("broken"))  # type: ignore[union-attr]
        while not (written := list(dumps.iterdir())):
            await asyncio.sleep(0.01)

    codes = [r.status_code for r in (begun, twice, whole, stopped, none)]
    assert codes == [200, 400, 200, 200, 400]
    counted, named = sorted(profiles.iterdir())
    assert named.name == stopped.json()["trace"]
    names = [event.get("name", "") for event in json.loads(counted.read_text())["traceEvents"]]
    assert len([name for name in names if name.startswith("step ")]) == 4  # and the rest of one

    reason, *calls = map(json.loads, written[0].read_text().splitlines())
    assert reason == {"reason": "broken"}
    assert len(calls) == 2
    assert calls[0]["answers"][0]["text"] == answer.json()["choices"][0]["text"]
    ids = server._served.tokenizer.encode("Paris is", add_special_tokens=True)
    assert calls[0]["requests"][0]["prompt_ids"] == ids
    assert calls[0]["requests"][0]["sampling"]["max_tokens"] == 8
    assert written[0].stat().st_mode & 0o777 == 0o600


async def test_without_a_folder_there_is_no_profiler() -> None:
    async with make_client() as client:
        answer = await client.post("/start_profile")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "not_enabled")


def test_a_dump_holds_what_runs_and_what_ended_within_five_minutes(tmp_path: Path) -> None:
    now = 0.0
    dump = CrashDump(tmp_path, "r", clock=lambda: now)
    request = Request(request_id="x", prompt_ids=[1], sampling=SamplingParams())
    traces = {name: RequestTrace(name, [request], {}) for name in ("old", "new", "running")}
    for trace in traces.values():
        dump.begun(trace)
    dump.ended(traces["old"])
    now = 200.0
    dump.ended(traces["new"])
    now = 400.0
    dump.write(EngineError("broken"))

    (path,) = tmp_path.iterdir()
    written = [json.loads(line).get("rid") for line in path.read_text().splitlines()]
    assert written == [None, "new", "running"]


def test_a_folder_that_cannot_be_made_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="crash_dump_dir"):
        CrashDump(tmp_path / "file" / "below", "r")


@pytest.mark.observes("debug.trace_memory_s", "debug.trace_memory_frames")
async def test_growing_memory_is_logged_with_its_callers(caplog: pytest.LogCaptureFixture) -> None:
    config = make_server_config(debug={"trace_memory_s": 0.2, "trace_memory_frames": 5})
    caplog.set_level(logging.INFO, "remora")
    telemetry = Telemetry(ServerState.over(FakeServer(config=config)), "r")
    assert tracemalloc.get_traceback_limit() == 5
    while not tracemalloc.is_tracing():
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    held = _hold()
    async with asyncio.timeout(20.0):
        while "in _hold" not in caplog.text and "bytes(2**21)" not in caplog.text:
            await asyncio.sleep(0.05)
    telemetry.close()
    await asyncio.sleep(0.01)

    assert len(held) == 2**21
    assert "held = _hold()" in caplog.text  # the caller
    assert not tracemalloc.is_tracing()


def _hold() -> bytes:
    return bytes(2**21)


_ABORT = """
import resource
from remora.deployments.observing.core_dump import allow_core_dumps, end_process
resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
if {dumps}:
    allow_core_dumps()
    assert len(set(resource.getrlimit(resource.RLIMIT_CORE))) == 1
end_process(dumps_core={dumps})
"""


@pytest.mark.parametrize(("dumps", "code"), [(True, -signal.SIGABRT), (False, 1)])
def test_a_failed_replica_aborts_with_its_stacks_or_leaves(
    tmp_path: Path, dumps: bool, code: int
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _ABORT.format(dumps=dumps)],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        env=os.environ,
    )

    assert ended.returncode == code
    assert (b"Fatal Python error: Aborted" in ended.stderr) is dumps


@pytest.mark.observes("debug.core_dump")
@pytest.mark.parametrize("dumps", [True, False])
async def test_who_ends_a_failed_replica_does_as_configured(
    monkeypatch: pytest.MonkeyPatch, dumps: bool
) -> None:
    from remora.deployments.ranks import replica as ranks

    class Client:
        async def failed(self) -> EngineError:
            return EngineError("broken")

        async def drain(self, timeout_s: float) -> bool:
            return True

    ended: list[bool] = []
    monkeypatch.setattr(ranks, "FLUSH_S", 0.0)
    monkeypatch.setattr("logging.shutdown", lambda: None)
    monkeypatch.setattr(ranks, "end_process", lambda *, dumps_core: ended.append(dumps_core))
    engine = ranks.ReplicaEngine(make_server_config(debug={"core_dump": dumps}))
    await engine._end_after_failure(Client())  # type: ignore[arg-type]

    assert ended == [dumps]


@pytest.mark.observes("debug.tensor_dump_input")
async def test_ids_of_a_file_are_run_at_the_start_and_dumped(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, dumps = tmp_path / "ids.json", tmp_path / "dumps"
    given.write_text("[5, 9, 17, 3, 44]")
    debug = {"tensor_dump_dir": str(dumps), "tensor_dump_input": str(given)}
    debug["crash_dump_dir"] = str(tmp_path / "crashes")
    engine = {"kv_tokens": 2048, "device": "cpu", "cpu_kernels": "torch"}
    async with replica(tiny_checkpoints("llama"), monkeypatch, debug=debug, engine=engine):
        passes = [load_file(path)["token_ids"].tolist() for path in sorted(dumps.iterdir())]

    assert passes[-1] == [5, 9, 17, 3, 44]
    assert os.listdir(tmp_path / "crashes") == []  # a closed replica has not crashed


@pytest.mark.parametrize("text", ["{}", "[]", '["a"]', "[1", None])
def test_what_holds_no_ids_is_a_config_error(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "ids.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"debug\.tensor_dump_input"):
        read_ids(str(path))
