"""A browser for all tests; every test must leave it without a problem."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.deployments.http.playground.browser import Browser, browser
from tests.programs import find

# Answers of the API that the console reports: no key, a full queue, autoscaling that is off.
EXPECTED = ("/v1/models - Failed", "/v1/chat/completions - Failed", "/autoscaling/explain - Failed")


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A tab of a real browser."""
    if find("chromium") is None or find("chromedriver") is None:
        pytest.skip("chromium or chromedriver is missing: make tools")
    with browser(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.fixture
def tab(chromium: Browser) -> Iterator[Browser]:
    """The tab, without what an earlier test has left; fails for errors and policy violations."""
    chromium.resize(1280, 800)
    chromium.prefer("light")
    yield chromium
    problems = [each for each in chromium.problems() if not any(map(each.__contains__, EXPECTED))]
    chromium.script("localStorage.clear(); sessionStorage.clear();")
    assert problems == []
