"""Servers that take each other's weights over sockets: real engines, the whole HTTP interface."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from remora.configs.errors import ConfigError, InvalidRequest
from remora.deployments.http.app import build_http_app
from remora.deployments.http.core.auth import Access, Keys
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.http.generation.weight_update import InstanceUpdate, Update
from remora.deployments.live_weights import instance, setup
from remora.deployments.live_weights.fleet import Fleet
from remora.deployments.live_weights.replica import WeightsState
from remora.deployments.live_weights.setup import ReplicaFleet
from remora.engine.client import LocalEngineClient
from remora.engine.launch import LaunchedEngine, build_engine
from remora.engine.types import Request, SamplingParams
from tests.conftest import TinyCheckpoints
from tests.deployments.fakes import FakeServer
from tests.deployments.http.openai.test_openai_client import listening_app
from tests.engine.live.running import PROMPTS, config_of, write_negated

TAKE = "/update_weights_from_instance"
KEY = "the-admin-key"
Answers = list[tuple[int, ...]]
Hook = Callable[[str], Awaitable[None]]


class Server:
    """A server with one engine; `before` is awaited before each request for a part."""

    def __init__(self, path: Path, *, kernels: str = "auto", **model: Any) -> None:
        self.config = config_of(path, model=model, engine={"cpu_kernels": kernels})
        built = build_engine(self.config, show_progress=False)
        self.client = LocalEngineClient(built.engine, None)
        launched = LaunchedEngine(built=built, client=self.client)
        fleet = ReplicaFleet.configured(self.config, launched, None, None)
        assert fleet is not None
        self.fleet, self.rank = fleet, built.live
        self.before: Hook | None = None
        self.url = ""
        self._number = 0

    async def answers(self) -> Answers:
        found = []
        for prompt in PROMPTS:
            self._number += 1
            request = Request(
                request_id=str(self._number),
                prompt_ids=prompt,
                sampling=SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True),
            )
            outputs = [output async for output in self.client.generate(request)]
            found.append(tuple(token for output in outputs for token in output.token_ids))
        return found

    def app(self) -> ASGIApp:
        state = ServerState.over(FakeServer(weights=self.fleet.weights, config=self.config))
        inner = build_http_app(state, access=lambda: Access(admin_keys=Keys([KEY])))

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if self.before is not None and scope["path"] == "/weights":
                await self.before(dict(scope["headers"])[b"range"].decode())
            await inner(scope, receive, send)

        return app

    async def post(self, path: str, body: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(base_url=self.url, headers=headers, timeout=120) as client:
            return await client.post(path, json=body)

    async def take(self, other: str, **more: Any) -> httpx.Response:
        return await self.post(TAKE, {"url": other, "api_key": KEY, **more})

    def left(self) -> list[Path]:
        """Return the files of uploads."""
        uploads = self.fleet.replica._live.uploads._folder
        return [file for file in uploads.rglob("*") if file.is_file()]

    def close(self) -> None:
        self.fleet.close()
        self.client.close()


@pytest.fixture(scope="module")
def old(tiny_checkpoints: TinyCheckpoints) -> Path:
    return tiny_checkpoints("llama")


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(instance, "PART_BYTES", 30_000)
    monkeypatch.setattr(setup, "cache_dir", lambda: tmp_path / "cache")


@pytest.fixture
def new(old: Path, tmp_path: Path) -> Path:
    return write_negated(old, tmp_path / "new")


@asynccontextmanager
async def pair(
    old: Path, new: Path, *, kernels: str = "auto", **model: Any
) -> AsyncIterator[tuple[Server, Server]]:
    """Run a server of the old weights, and another of the new ones, which it may take.

    model:  more keys of the first server
    """
    async with AsyncExitStack() as stack:
        other = Server(new, share_weights=True, weight_version="second")
        stack.callback(other.close)
        other.url = await stack.enter_async_context(listening_app(other.app()))
        given: dict[str, Any] = {"weight_instances": [other.url], **model}
        own = Server(old, kernels=kernels, **given)
        stack.callback(own.close)
        own.url = await stack.enter_async_context(listening_app(own.app()))
        yield own, other


async def check_refused(own: Server, answer: httpx.Response, code: str, *reasons: str) -> None:
    """Check that an update was refused, and that nothing is left of it."""
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, code), error
    assert all(reason in error["message"] for reason in reasons), error["message"]
    assert KEY not in error["message"]
    weights = own.fleet.weights
    assert (weights.version, weights.num_updates) == ("default", 0)
    assert own.left() == []
    assert own.fleet.replica._live.uploads._open == {}


@pytest.mark.observes("model.weight_instances", "model.share_weights")
@pytest.mark.parametrize("kernels", ["auto", "torch"])
async def test_the_others_weights_answer_from_then_on(old: Path, new: Path, kernels: str) -> None:
    async with pair(old, new, kernels=kernels) as (own, other):
        before, wanted = await own.answers(), await other.answers()
        asked: list[str] = []

        async def note(given: str) -> None:
            asked.append(given)

        other.before = note
        answer = await own.take(other.url)
        assert (answer.status_code, answer.json()["weight_version"]) == (200, "second")
        assert len(asked) > 2
        assert wanted != before
        assert await own.answers() == wanted
        assert own.fleet.weights.num_updates == 1
        assert [file.name for file in own.left()] == ["model.safetensors"]
        answer = await own.take(other.url + "/", weight_version="mine")
        assert answer.json()["weight_version"] == "mine"
        assert await own.answers() == wanted


async def test_weights_of_updates_are_taken_too_and_survive_sleep(old: Path, new: Path) -> None:
    """The other server has tensors from an upload; the taken ones are read again after sleep."""
    async with pair(old, old) as (own, other):
        before = await other.answers()
        content = (new / "model.safetensors").read_bytes()
        await other.fleet.weights.add_part("sent", 0, content)
        await other.fleet.weights.update(Update(upload="sent", version="third"))
        wanted = await other.answers()
        assert (await own.take(other.url)).json()["weight_version"] == "third"
        assert wanted != before
        assert (await own.post("/release_memory_occupation", {})).status_code == 200
        assert (await own.post("/resume_memory_occupation", {})).status_code == 200
        assert await own.answers() == wanted


async def test_a_shared_file_is_the_checkpoint(old: Path) -> None:
    async with pair(old, old) as (_, other):
        part, content = await other.fleet.weights.read_part(0, 1000, None), b""
        while len(content) < part.total_bytes:
            part = await other.fleet.weights.read_part(len(content), 12_345, part.tag)
            content += part.content
        found, wanted = load(content), load((old / "model.safetensors").read_bytes())
        assert found.keys() == wanted.keys()
        assert all(found[name].equal(wanted[name]) for name in wanted)


@pytest.mark.parametrize("change", ["update", "label", "files"])
async def test_weights_that_change_while_they_are_read_are_not_mixed(
    old: Path, new: Path, change: str
) -> None:
    async with pair(old, new) as (own, other):
        before = await own.answers()
        weights = other.fleet.weights
        second = asyncio.Event()

        async def change_in_between(given: str) -> None:
            if given.startswith("bytes=0-") or second.is_set():
                return
            second.set()
            if change == "update":
                await weights.add_part("sent", 0, (old / "model.safetensors").read_bytes())
                await weights.update(Update(upload="sent"))
            elif change == "label":
                await weights.relabel("other")
            else:
                shutil.copy(old / "model.safetensors", new / "model.safetensors")

        other.before = change_in_between
        answer = await own.take(other.url)
        assert second.is_set()
        if change == "files":
            await check_refused(own, answer, "instance_refused", "have changed since")
        else:
            await check_refused(own, answer, "instance_changed", other.url)
            other.before = None
            assert (await own.take(other.url)).status_code == 200
            return
        assert await own.answers() == before


async def test_what_the_other_server_refuses_is_said(old: Path, new: Path) -> None:
    async with pair(old, new) as (own, other):
        before = await own.answers()
        answer = await own.take(other.url, api_key="another")
        await check_refused(own, answer, "instance_refused", "answered 403", "admin key")
        answer = await own.take(other.url, api_key=None)
        await check_refused(own, answer, "instance_refused", "answered 401")
        await other.post("/release_memory_occupation", {})
        answer = await own.take(other.url)
        await check_refused(own, answer, "instance_refused", "answered 503", "sleeps")
        assert await own.answers() == before


async def test_only_listed_servers_are_asked(old: Path, new: Path) -> None:
    async with pair(old, new) as (own, other):

        async def fail(given: str) -> None:
            raise AssertionError("it was asked")

        other.before = fail
        for url in (own.url, other.url + "/more", other.url.replace("127.0.0.1", "localhost")):
            await check_refused(own, await own.take(url), "instance_not_allowed", url)


async def test_another_model_is_refused_before_its_weights_are_sent(
    old: Path, tmp_path: Path
) -> None:
    """The shapes are the same, and the configuration is not."""
    another = Path(shutil.copytree(old, tmp_path / "another"))
    config = json.loads((another / "config.json").read_text())
    (another / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.125}))
    async with pair(old, another) as (own, other):
        asked: list[str] = []

        async def note(given: str) -> None:
            asked.append(given)

        other.before = note
        answer = await own.take(other.url)
        await check_refused(own, answer, "instance_differs", "config.json", "differ")
        assert len(asked) == 1


async def test_more_than_the_limit_is_refused_before_it_is_sent(old: Path, new: Path) -> None:
    async with pair(old, new, weight_upload_limit=100_000) as (own, other):
        answer = await own.take(other.url)
        await check_refused(own, answer, "instance_refused", "weight_upload_limit allows 100,000")


async def test_two_at_once_are_one_update(old: Path, new: Path) -> None:
    async with pair(old, new) as (own, other):
        answers = await asyncio.gather(own.take(other.url), own.take(other.url))
        assert sorted(answer.status_code for answer in answers) == [200, 400]
        refused = next(answer for answer in answers if answer.status_code == 400)
        assert refused.json()["error"]["code"] == "update_running"
        assert own.fleet.weights.num_updates == 1


def part(content: bytes, said: str, **headers: str) -> Response:
    given = {"content-range": said, "etag": '"a"', **headers}
    return Response(content, 206, given)


STRANGERS: dict[str, tuple[Callable[[], Response], str, str]] = {
    "redirect": (lambda: RedirectResponse("http://127.0.0.1:1/"), "refused", "answered 307"),
    "page": (lambda: Response("hello"), "refused", "answered 200"),
    "error": (lambda: Response("{", 500), "refused", "answered 500"),
    "no tag": (lambda: part(b"12", "bytes 0-1/9", etag=""), "refused", "like a remora server"),
    "no range": (lambda: part(b"12", "bytes"), "refused", "like a remora server"),
    "elsewhere": (lambda: part(b"12", "bytes 4-5/9"), "refused", "other bytes"),
    "nothing": (lambda: part(b"", "bytes 0-0/9"), "refused", "other bytes"),
    "too long": (lambda: part(b"1" * 40_000, "bytes 0-1/9"), "refused", "other bytes"),
    "header": (lambda: part(b"\xff" * 8, "bytes 0-7/9"), "refused", "header"),
    "no model": (
        lambda: part(b"\2" + b"\0" * 7 + b"{}", "bytes 0-9/10"),
        "refused",
        "which model it serves",
    ),
    "broken off": (
        lambda: part(b"12", "bytes 0-8/9", **{"content-length": "9"}),
        "unreachable",
        "broke off",
    ),
}


@pytest.mark.parametrize("name", STRANGERS)
async def test_other_servers_and_broken_answers_are_refused(old: Path, name: str) -> None:
    make, code, reason = STRANGERS[name]

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await make()(scope, receive, send)

    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(listening_app(app))
        own = Server(old, weight_instances=[url])
        stack.callback(own.close)
        own.url = await stack.enter_async_context(listening_app(own.app()))
        await check_refused(own, await own.take(url), f"instance_{code}", reason)


async def test_a_server_that_is_gone_is_refused(old: Path, new: Path) -> None:
    async with pair(old, new, weight_instances=["http://127.0.0.1:1"]) as (own, _):
        answer = await own.take("http://127.0.0.1:1")
        await check_refused(own, answer, "instance_unreachable", "cannot be reached")


class Both:
    """Two replicas of a deployment."""

    def __init__(self, *servers: Server) -> None:
        self._servers = servers

    async def all(self, operation: str, *args: Any) -> list[WeightsState | BaseException]:
        calls = (server.fleet.replica.call(operation, *args) for server in self._servers)
        return [*await asyncio.gather(*calls, return_exceptions=True)]


async def test_all_replicas_take_them_or_none(old: Path, new: Path) -> None:
    async with pair(old, new) as (own, other):
        second = Server(old, weight_instances=[other.url])
        fleet = Fleet(own.fleet.replica, Both(own, second), [other.url], 2**30)
        order = InstanceUpdate(url=other.url, api_key=KEY)
        try:
            before, wanted = await own.answers(), await other.answers()
            assert second.rank is not None
            free, second.rank._free_bytes = second.rank._free_bytes, lambda: 1000
            with pytest.raises(InvalidRequest, match="restart the server"):
                await fleet.update_from_instance(order)
            assert [await server.answers() for server in (own, second)] == [before, before]
            assert own.left() == second.left() == []
            second.rank._free_bytes = free
            await fleet.update_from_instance(order)
            assert [await server.answers() for server in (own, second)] == [wanted, wanted]
            versions = {each.fleet.replica.state.version for each in (own, second)}
            assert versions == {"second"}
            # Both replicas give the same file.
            tags = {(await each.fleet.replica.call("tell")).update for each in (own, second)}
            assert len(tags) == 1
        finally:
            second.close()


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ({"weight_instances": ["http://a:1"], "weight_upload_limit": None}, "weight_upload_limit"),
        ({"weight_instances": ["a:1"]}, "expected http"),
        ({"weight_instances": ["http://user:word@a:1"]}, "without a user"),
        ({"share_weights": True, "delete_after_load": True}, "excludes delete_after_load"),
    ],
)
def test_configurations_that_cannot_be_right_are_refused(
    tmp_path: Path, model: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        config_of(tmp_path, model=model, engine={"sleep_mode": False})
