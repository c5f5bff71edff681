"""The page at /docs in a real browser: offline, under the policy, below a root path, with a key."""

from __future__ import annotations

import httpx
import pytest

from remora.deployments.http.core.auth import Access, Keys
from remora.deployments.http.playground.page import CONTENT_SECURITY_POLICY
from tests.deployments.fakes import FakeServer, make_client
from tests.deployments.http.playground.browser import Browser
from tests.deployments.http.playground.serving import fake
from tests.deployments.http.playground.test_page import urls_of

READY = "document.querySelector('main').ariaBusy === 'false'"
CHAT = "#post_v1_chat_completions"


async def test_the_page_and_its_files_are_of_this_server() -> None:
    async with make_client() as client:
        page = await client.get("/docs")
        found = [
            await client.get(httpx.URL("http://localhost/docs").join(url))
            for url in urls_of(page.text)
        ]
        gone = await client.get("/redoc")

    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    assert "://" not in page.text
    assert [each.status_code for each in found] == [200] * len(found)
    assert gone.status_code == 404


@pytest.mark.parametrize("root", ["", "/team a/llm"])
def test_an_operation_is_described_and_tried(tab: Browser, root: str) -> None:
    access = Access(keys=Keys(["secret"]))
    with fake(FakeServer(), access=access, root=root) as url:
        tab.open(f"{url}{root}/docs")
        tab.until("!document.querySelector('#notice').hidden")
        assert tab.text("#notice") == "Enter an API key."
        tab.problems()  # the console names the refused request
        tab.type("#key", "secret\ue007")
        tab.until(READY)
        tab.type("#search", "create a chat completion")
        assert tab.text("details.operation > summary .path") == "/v1/chat/completions"
        tab.click(f"{CHAT} > summary")
        tab.until(f"document.querySelector('{CHAT} form')")
        assert "messages" in tab.text(f"{CHAT} .fields code")
        assert "ChatCompletion" in tab.text(f"{CHAT} h3")
        tab.click(f"{CHAT} button[type=submit]")
        shown = tab.until(f"document.querySelector('{CHAT} pre').textContent.includes('usage')")
        answer = tab.text(f"{CHAT} pre")

    assert shown
    assert answer.startswith("200 application/json")
    assert "Paris." in answer
