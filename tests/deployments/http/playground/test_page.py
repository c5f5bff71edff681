"""The playground's page and files: who gets them, with which headers, and what they refer to."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest

from remora.deployments.http.core.auth import Access, Keys
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.http.playground.page import CONTENT_SECURITY_POLICY
from remora.deployments.http.playground.static_files import FOLDER, static_files
from remora.deployments.live_update import LiveSettings
from tests.deployments.fakes import CharTokenizer, FakeServer, make_client, make_config
from tests.deployments.gateway.fakes import Replica, gateway, ready
from tests.deployments.http.shared_app import share_http_app

HTML = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
PLAIN = "remora is running"
NAMES = sorted(static_files().files)
PLACE = f"/playground/{static_files().digest}"


@asynccontextmanager
async def client_at(
    root: str = "", *, key: bool = False
) -> AsyncGenerator[httpx.AsyncClient, None]:
    access = Access(keys=Keys(["secret"]) if key else None)
    app = share_http_app(ServerState.over(FakeServer()), access=lambda: access)
    transport = httpx.ASGITransport(app=app, root_path=root)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


# -- who gets the page -------------------------------------------------------------------------


async def test_a_browser_gets_the_page() -> None:
    async with make_client() as client:
        page = await client.get("/", headers=HTML)
        head = await client.head("/", headers=HTML)

    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "<title>remora playground</title>" in page.text
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == page.headers["content-length"]


@pytest.mark.parametrize("accept", [None, "*/*", "application/json", "text/plain, */*", "text/*"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_other_clients_get_the_plain_answer(method: str, accept: str | None) -> None:
    async with make_client() as client:
        del client.headers["accept"]
        headers = {} if accept is None else {"accept": accept}
        answer = await client.request(method, "/", headers=headers)

    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    assert answer.headers["vary"] == "accept"  # a cache must not give it to a browser
    assert method == "HEAD" or answer.text == PLAIN


async def test_the_page_is_for_reading_only() -> None:
    async with make_client() as client:
        posted = await client.post("/", headers=HTML, json={"inputs": "Hi"})
        refused = await client.post(f"{PLACE}/app.js", headers=HTML, json={})

    assert "generated_text" in posted.text  # the API at the same path
    assert refused.status_code == 404


@pytest.mark.observes("api.playground")
async def test_it_can_be_switched_off_while_the_server_runs() -> None:
    args: dict[str, Any] = {"model": {"path": "tiny"}}
    server = FakeServer(tokenizer=Unlimited())
    state = ServerState.over(server)
    settings = LiveSettings(args, state, Access())
    app = share_http_app(state, access=lambda: settings.access)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:

        async def answers() -> list[tuple[int, str]]:
            got = [await client.get(path, headers=HTML) for path in ("/", f"{PLACE}/app.js")]
            return [(each.status_code, each.headers["content-type"][:9]) for each in got]

        assert await answers() == [(200, "text/html"), (200, "text/java")]
        settings.apply({"api": {"playground": False}})
        assert await answers() == [(200, "text/plai"), (200, "text/java")]
        settings.apply(None)
        assert (await answers())[0] == (200, "text/html")


@pytest.mark.observes("api.docs")
@pytest.mark.parametrize("path", ["/docs", "/openapi.json"])
async def test_the_description_of_the_api_can_be_switched_off(path: str) -> None:
    async with make_client() as client:
        assert (await client.get(path)).status_code == 200
    async with make_client(FakeServer(config=make_config(docs=False))) as client:
        refused = await client.get(path)
        page = await client.get("/", headers=HTML)

    assert refused.status_code == 404
    assert "api.docs" in refused.json()["error"]["message"]
    assert page.headers["content-type"].startswith("text/html")


class Unlimited(CharTokenizer):
    def limit_rendering(self, *, max_seconds: float, max_chars: int) -> None:
        pass


async def test_it_is_off_from_the_start_if_configured() -> None:
    async with make_client(FakeServer(config=make_config(playground=False))) as client:
        assert (await client.get("/", headers=HTML)).text == PLAIN


async def test_the_page_needs_no_key_but_the_api_does() -> None:
    async with client_at(key=True) as client:
        opened = [
            (await client.get(path, headers=HTML)).status_code for path in ("/", f"{PLACE}/app.js")
        ]
        closed = [
            (await client.get("/")).status_code,
            (await client.get("/v1/models", headers=HTML)).status_code,
            (await client.get("/playground/", headers=HTML)).status_code,
            (await client.get(f"{PLACE}/../../v1/models", headers=HTML)).status_code,
        ]

    assert (opened, closed) == ([200, 200], [401] * 4)


async def test_below_a_root_path_everything_is_relative_to_it() -> None:
    async with client_at("/team a/llm") as client:
        moved = await client.get("/team%20a/llm", headers=HTML)
        page = await client.get("/team%20a/llm/", headers=HTML)
        base = httpx.URL("http://localhost/team%20a/llm/")
        found = [await client.get(base.join(url)) for url in urls_of(page.text)]

    assert (moved.status_code, moved.headers["location"]) == (308, "llm/")
    assert moved.url.join(moved.headers["location"]) == base
    assert [each.status_code for each in found] == [200] * len(found)
    assert len(found) > len(NAMES) - 5  # the other page has a few of its own


def urls_of(page: str) -> list[str]:
    """Return the addresses of files that a page refers to."""
    found = re.findall(r'(?:href|src)="([^"#]+)"', page)
    assert found
    return found


@pytest.mark.parametrize("path", ["/", f"{PLACE}/app.js"])
async def test_a_gateway_has_it_too_and_asks_no_replica(path: str) -> None:
    replica = Replica("one")
    async with gateway(ready(replica)) as client:
        page = await client.get(path, headers=HTML)
        plain = await client.get("/")

    assert (page.status_code, page.headers["content-type"][:9]) in [
        (200, "text/html"),
        (200, "text/java"),
    ]
    assert page.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    assert plain.text == PLAIN


async def test_responses_are_counted_by_a_few_paths() -> None:
    async with make_client() as client:
        await client.get("/", headers=HTML)
        for name in NAMES[:3]:
            await client.get(f"{PLACE}/{name}")
        text = (await client.get("/metrics")).text

    counts = re.findall(r'remora_http_responses_total\{.*route="(.*)",status="200"\} (\S+)', text)
    assert sorted(counts) == [("/", "1.0"), ("/playground/NAME", "3.0")]


# -- headers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", *(f"{PLACE}/{name}" for name in NAMES)])
async def test_the_policy_allows_nothing_but_files_of_this_server(path: str) -> None:
    async with make_client() as client:
        headers = (await client.get(path, headers=HTML)).headers

    policy = dict(
        part.partition(" ")[::2] for part in headers["content-security-policy"].split("; ")
    )
    sources = {name: value for name, value in policy.items() if name.endswith("-src")}
    assert sources.pop("default-src") == "'none'"
    assert set(sources.values()) == {"'self'"}
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert (headers["x-content-type-options"], headers["referrer-policy"]) == (
        "nosniff",
        "no-referrer",
    )


async def test_files_are_kept_forever_and_the_page_is_asked_for_again() -> None:
    async with make_client() as client:
        page = await client.get("/", headers=HTML)
        file = await client.get(f"{PLACE}/app.js")
        other_version = await client.get("/playground/0123456789abcdef/app.js")

    assert (page.headers["cache-control"], page.headers["vary"]) == ("no-cache", "accept")
    assert file.headers["cache-control"] == "public, max-age=31536000, immutable"
    assert (other_version.status_code, other_version.headers["cache-control"]) == (200, "no-cache")
    assert other_version.content == file.content


@pytest.mark.parametrize("path", ["/", f"{PLACE}/app.js"])
@pytest.mark.parametrize("shape", ["{}", "W/{}", '"other", {}', "*"])
async def test_what_a_browser_has_is_not_sent_again(path: str, shape: str) -> None:
    async with make_client() as client:
        first = await client.get(path, headers=HTML)
        known = {"if-none-match": shape.format(first.headers["etag"])}
        again = await client.get(path, headers=HTML | known)
        stale = await client.get(path, headers=HTML | {"if-none-match": '"other"'})

    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"]
    assert "content-type" not in again.headers
    assert stale.status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/playground",
        "/playground/",
        "/playground/app.js",
        f"{PLACE}/",
        f"{PLACE}/index.html",
        f"{PLACE}/nothing.js",
        f"{PLACE}/%2e%2e/page.py",
        f"{PLACE}/../page.py",
        f"{PLACE}//app.js",
    ],
)
async def test_there_are_no_other_files(path: str) -> None:
    async with make_client() as client:
        assert (await client.get(path, headers=HTML)).status_code == 404


# -- contents ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.name)
def test_a_file_refers_to_nothing_outside(path: Any) -> None:
    text = path.read_text()
    # Names of XML's vocabularies are not fetched; link addresses of answers begin with these.
    allowed = {"http://www.w3.org/2000/svg"}
    addresses = set(re.findall(r"https?://[\w.-]+[^\s\"'`)]*", text))
    assert addresses <= allowed
    assert re.findall(r"(?:src|href)=[\"']//|@import|\burl\(", text) == []


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.name)
def test_a_file_needs_nothing_that_the_policy_forbids(path: Any) -> None:
    text = path.read_text()
    sinks = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function"
    assert re.findall(sinks, text) == []
    if path.suffix == ".html":
        assert re.findall(r"\son\w+=|\sstyle=|<style|<script(?![^>]*\ssrc=)", text) == []
    assert len(text.splitlines()) <= 500
    assert [line for line in text.splitlines() if len(line) > 100] == []


def test_every_import_of_a_module_is_a_file() -> None:
    files = static_files().files
    missing = [
        f"{name}: {found}"
        for name, file in files.items()
        if name.endswith(".js")
        for found in re.findall(r'^import .* from "([^"]+)"', file.content.decode(), re.MULTILINE)
        if not (found.startswith("./") and found[2:] in files)
    ]
    assert missing == []


def test_the_digest_changes_with_any_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    for path in FOLDER.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    module = "remora.deployments.http.playground.static_files.FOLDER"
    monkeypatch.setattr(module, tmp_path)
    read = static_files.__wrapped__
    before = read()
    (tmp_path / "chat.css").write_bytes(b"p {}")
    after = read()

    assert before == replace(static_files(), files=before.files)
    assert after.digest != before.digest
    assert f"playground/{after.digest}/app.js" in after.page.content.decode()
