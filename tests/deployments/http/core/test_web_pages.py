"""A local server without an API key, and web pages in its user's browser.

A page may make the browser send requests to this machine: cross-site, where the page cannot read
the response and the browser sends the page's origin; or, after DNS rebinding of its name to
127.0.0.1, as same-site requests under that name.
"""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from remora.deployments.http.core.auth import Access, Keys
from tests.deployments.http.core.test_auth import ADMIN_KEY, KEY, make_guarded

LOCAL = Access(is_local=True)
FROM_PAGES: list[dict[str, str]] = [
    {"origin": "https://evil.example"},
    {"origin": "null"},
    {"origin": "http://localhost.evil.example"},
    {"origin": "http://127.0.0.1.evil.example:8000"},
    {"origin": "http://[x"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "cross-site", "origin": "http://localhost"},
    {"host": "evil.example"},
    {"host": "evil.example:8000"},
    {"host": "localhost.evil.example"},
    {"host": "127.0.0.1.evil.example"},
    {"host": "evil.example", "origin": "http://evil.example", "sec-fetch-site": "same-origin"},
    {"host": "169.254.169.254"},
    {"host": "0.0.0.0:8000"},
    {"host": "2130706433"},
    {"host": "[::1"},
    {"host": ""},
]
FROM_HERE: list[dict[str, str]] = [
    {},
    {"host": "localhost:8000"},
    {"host": "LOCALHOST"},
    {"host": "127.0.0.1:8000"},
    {"host": "127.8.9.10"},
    {"host": "[::1]:8000"},
    {"host": "remora.localhost"},
    {"host": "localhost.:8000"},
    {"origin": "http://localhost:3000", "sec-fetch-site": "same-site"},
    {"origin": "http://127.0.0.1:8000", "sec-fetch-site": "same-origin"},
    {"sec-fetch-site": "none"},
]


async def ask(access: Access, key: str | None, headers: dict[str, str]) -> list[httpx.Response]:
    async with make_guarded(access, key) as client:
        body: dict[str, Any] = {"abort_all": True}
        return [
            await client.get("/flush_cache", headers=headers),
            await client.post("/flush_cache", headers=headers),
            await client.post("/abort_request", json=body, headers=headers),
        ]


@pytest.mark.parametrize("headers", FROM_PAGES, ids=str)
async def test_no_page_reaches_the_operators_routes(headers: dict[str, str]) -> None:
    for response in await ask(LOCAL, None, headers):
        error = response.json()["error"]
        assert (response.status_code, error["type"]) == (403, "permission_error")
        assert "api.admin_api_key" in error["message"]  # advice: the key to set
        assert "evil" not in error["message"]


@pytest.mark.parametrize("headers", FROM_HERE, ids=str)
async def test_programs_and_pages_of_this_machine_reach_them(headers: dict[str, str]) -> None:
    assert [r.status_code for r in await ask(LOCAL, None, headers)] == [200] * 3


@pytest.mark.parametrize(
    ("access", "key"),
    [
        (Access(keys=Keys([KEY]), is_local=True), KEY),
        (Access(admin_keys=Keys([ADMIN_KEY]), is_local=True), ADMIN_KEY),
        (Access(admin_keys=Keys([ADMIN_KEY])), ADMIN_KEY),
    ],
)
async def test_who_sends_a_key_may_do_so_from_anywhere(access: Access, key: str) -> None:
    headers = {"host": "remora.example", "origin": "https://console.example"}
    assert [r.status_code for r in await ask(access, key, headers)] == [200] * 3


async def test_all_other_routes_are_reached_under_any_name() -> None:
    async with make_guarded(LOCAL) as client:
        models = await client.get("/v1/models", headers={"host": "host.docker.internal:8000"})
    assert models.status_code == 200
