"""Files of batches, through the openai client and on disk."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from remora.configs.errors import ConfigError
from remora.deployments.http.app import build_http_app
from remora.deployments.http.batches import files
from remora.deployments.http.batches import upload as files_upload
from remora.deployments.http.batches.store import BatchStore
from remora.deployments.http.core.auth import Access, Keys
from remora.deployments.http.generation.server_state import ServerState
from tests.deployments.fakes import FakeServer
from tests.deployments.http.batches.jobs import (
    FILES,
    Client,
    make_line,
    make_server,
    opened,
    parents_of,
    start,
)
from tests.moments import cancelled, nothing_left


async def test_a_file_comes_back_as_it_was_sent(client: Client, tmp_path: Path) -> None:
    data = bytes(range(256)) * 10_000
    made = await client.files.create(file=("../../x\n.jsonl", data), purpose="batch")
    found = await client.files.retrieve(made.id)
    listed = [file.id async for file in client.files.list(purpose="batch")]
    content = await client.files.content(made.id)
    parents = parents_of(tmp_path, made.id)
    deleted = await client.files.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        await client.files.content(made.id)

    assert (made.bytes, made.purpose, made.status) == (len(data), "batch", "processed")
    assert found == made
    assert listed == [made.id]
    assert content.content == data
    assert parents == {tmp_path / "files"}
    assert deleted.deleted
    assert not parents_of(tmp_path, "file-")


@pytest.mark.parametrize("name", ["file-x", "..", "%2e%2e%2fsecret", "file-" + "0" * 32, "x%00"])
async def test_a_name_that_is_not_ours_is_not_found(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_text("secret")
    async with opened(make_server(tmp_path / "store")) as client:
        for path in (f"/files/{name}", f"/files/{name}/content", f"/batches/{name}"):
            with pytest.raises(openai.NotFoundError):
                await client.get(path, cast_to=object)


async def test_an_upload_may_be_as_large_as_the_limit_with_or_without_its_length(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_upload, "MAX_UPLOAD_BYTES", 100_000)
    form: dict[str, Any] = {"data": {"purpose": "batch"}}
    room = 100_000 - len(httpx.Request("POST", "http://x", files={"file": b""}, **form).read())

    async def endless() -> AsyncGenerator[bytes, None]:
        yield b'--b\r\ncontent-disposition: form-data; name="file"; filename="x"\r\n\r\n'
        while True:
            yield b"x" * 10_000

    send = client._client.post
    whole = [await send(FILES, files={"file": b"x" * (room + n)}, **form) for n in (0, 1)]
    headers = {"content-type": "multipart/form-data; boundary=b"}
    unending = await send(FILES, content=endless(), headers=headers)
    assert [response.status_code for response in (*whole, unending)] == [200, 413, 413]


@pytest.mark.parametrize(
    ("headers", "content", "status"),
    [
        ({"content-type": "application/json"}, b"{}", 415),
        ({"content-type": "multipart/form-data"}, b"{}", 400),
        ({"content-type": "multipart/form-data; boundary=b"}, b"nothing of the kind", 400),
        ({"content-type": "multipart/form-data; boundary=b"}, b"--b--\r\n", 400),
    ],
)
async def test_a_malformed_form_is_refused(
    client: Client, headers: dict[str, str], content: bytes, status: int
) -> None:
    response = await client._client.post(FILES, content=content, headers=headers)
    assert (response.status_code, bool(response.json()["error"]["message"])) == (status, True)


async def test_only_batch_is_a_purpose(client: Client) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.files.create(file=b"{}", purpose="fine-tune")
    assert caught.value.param == "purpose"


async def test_a_full_store_takes_no_more(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_FILES", 1)
    made = await client.files.create(file=b"{}", purpose="batch")
    with pytest.raises(openai.BadRequestError, match="full"):
        await client.files.create(file=b"{}", purpose="batch")
    await client.files.delete(made.id)
    await client.files.create(file=b"{}", purpose="batch")


async def test_an_old_file_is_removed(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "KEPT_S", 0)
    await client.files.create(file=b"{}", purpose="batch")
    assert [file async for file in client.files.list()] == []
    assert not parents_of(tmp_path, "file-")


@pytest.mark.parametrize("is_local", [False, True])
async def test_callers_do_not_see_each_others_files_and_the_operator_sees_all(
    tmp_path: Path, is_local: bool
) -> None:
    server = make_server(tmp_path)
    keys, admin_keys = Keys(["a", "b"]), Keys(["operator"])
    access = Access(keys=keys, admin_keys=admin_keys, is_local=is_local)
    async with (
        opened(server, access, "a") as one,
        opened(server, access, "b") as other,
        opened(server, access, "operator") as operator,
    ):
        batch = await start(one, make_line("x"))
        for attempt in (other.files.retrieve, other.files.content):
            with pytest.raises(openai.NotFoundError):
                await attempt(batch.input_file_id)
        assert [b.id async for b in one.batches.list()] == [batch.id]
        with pytest.raises(openai.NotFoundError):
            await other.batches.cancel(batch.id)
        assert [file async for file in other.files.list()] == []
        assert [b async for b in other.batches.list()] == []
        assert [b.id async for b in operator.batches.list()] == [batch.id]


async def test_without_a_folder_the_routes_say_what_is_missing() -> None:
    async with opened(FakeServer()) as client:
        with pytest.raises(openai.NotFoundError, match=r"api\.batch_dir"):
            await client.batches.list()
        with pytest.raises(openai.NotFoundError, match=r"api\.batch_dir"):
            await client.files.create(file=b"{}", purpose="batch")


@pytest.mark.parametrize("folder", ["batches", "/dev/null/batches"])
def test_a_folder_that_cannot_be_kept_is_a_config_error(folder: str) -> None:
    with pytest.raises(ConfigError, match=r"api\.batch_dir"):
        BatchStore(Path(folder))


class Form:
    """A form that arrives in several pieces."""

    def __init__(self) -> None:
        head = 'Content-Disposition: form-data; name="'
        file = head + 'file"; filename="x"\r\n\r\n0123456789'
        form = f'--b\r\n{file}\r\n--b\r\n{head}purpose"\r\n\r\nbatch\r\n--b--\r\n'.encode()
        self._pieces = [form[:70], form[70:-20], form[-20:]]

    async def receive(self) -> dict[str, Any]:
        await asyncio.sleep(0)
        piece = self._pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(self._pieces)}

    async def send(self, message: Any) -> None:
        pass


async def test_an_upload_that_is_cancelled_at_any_moment_is_whole_or_gone(tmp_path: Path) -> None:
    server = make_server(tmp_path)
    app = build_http_app(ServerState.over(server), access=lambda: Access(is_local=True))
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/files",
        "query_string": b"",
        "headers": [(b"content-type", b"multipart/form-data; boundary=b")],
    }
    async with nothing_left():
        for moment in range(40):
            form = Form()
            await cancelled(app(dict(scope), form.receive, form.send), moment)
    # Wait for threads that had begun to copy.
    await asyncio.get_running_loop().shutdown_default_executor()

    kept = BatchStore(tmp_path).files.seen_by(None)
    assert all(file.bytes == 10 for file in kept)
    names = {file.id for file in kept}
    assert {path.stem for path in (tmp_path / "files").iterdir()} == names
    assert not any(str(tmp_path) in os.readlink(path) for path in open_paths())


def open_paths() -> list[Path]:
    return [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
