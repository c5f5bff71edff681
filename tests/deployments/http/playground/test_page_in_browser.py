"""The playground's engine view, colours, phones and accessibility in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest

from remora.engine.types import EngineStats
from tests.deployments.fakes import FakeEngine, FakeServer, make_config, make_stats
from tests.deployments.http.playground.browser import Browser
from tests.deployments.http.playground.serving import fake
from tests.deployments.http.playground.test_chat import ask, open_page, set_field
from tests.programs import find, needs

ANSWER = """<think>Hm.</think># A **title** with `code`

| a | b |
|---|---|
| c | d |

```python
print(1)
```
> See [this](https://a.example) or
- one"""


@dataclass
class Busy(FakeEngine):
    """Its counters grow with every reading."""

    readings: Iterator[int] = field(default_factory=count)

    def stats(self) -> EngineStats:
        number = next(self.readings)
        return make_stats(
            num_running=3,
            num_waiting=2,
            num_pages=100,
            num_held_pages=40,
            num_cached_pages=10,
            prompt_tokens_total=100 * number,
            cached_tokens_total=75 * number,
            steps_total=10 * number,
            step_time_total_s=0.25 * number,
        )


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    config = make_config(reasoning_parser="deepseek-r1", tool_parser="hermes")
    with fake(FakeServer(client=Busy(text=ANSWER), config=config)) as address:
        yield address


def test_the_engine_is_shown_live(tab: Browser, url: str) -> None:
    open_page(tab, url)
    tab.click("#tab-engine")
    label = "document.querySelectorAll('.plot')[{}].ariaLabel"
    tab.until(f"{label.format(4)} === 'Step time: a step 25 ms'")

    labels = tab.script("return [...document.querySelectorAll('.plot')].map((e) => e.ariaLabel)")
    assert labels[0] == "Requests: running 3, waiting 2"
    assert labels[2:4] == [
        "KV cache: in use 40 %, prefix cache 10 %",
        "Cache hits: of prompt tokens 75 %",
    ]
    assert tab.text("#engine tbody td").split("|")[:5] == ["this one", "tiny", "3", "2", "40 %"]
    assert tab.script("return document.querySelector('.line.line-0').getAttribute('d')")
    assert tab.script("return document.querySelector('.scaling').hidden") is True


SCALING = {
    "replicas": {"target": 2, "ready": 1, "starting": 1, "min": 1, "max": 3},
    "reason": "as many as wanted",
    "winner": "backlog",
    "pending": None,
    "signals": [{"signal": "backlog", "value": 5.4, "target": 2.0, "replicas": 1.3, "note": ""}],
    "history": [{"time": 1795288862.2, "from": 1, "to": 2, "reason": "more were wanted"}],
}


def test_reasons_of_autoscaling_are_shown(
    tab: Browser, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def explanation(_config: Any) -> dict[str, Any]:
        return SCALING

    monkeypatch.setattr("remora.deployments.autoscaling.routes.explanation", explanation)
    open_page(tab, url)
    tab.click("#tab-engine")
    tab.until("document.querySelector('.scaling:not([hidden])')")

    shown = tab.text(".scaling")
    assert "1 ready of 2, 1 starting; 1 to 3 allowed" in shown
    assert "as many as wanted (backlog)" in shown
    assert "1 → 2, more were wanted" in shown


def test_it_follows_the_systems_colours_until_one_is_chosen(tab: Browser, url: str) -> None:
    def ground() -> Any:
        return tab.script("return getComputedStyle(document.documentElement).backgroundColor")

    open_page(tab, url)
    light = ground()
    tab.prefer("dark")
    dark = ground()
    tab.click("#theme")
    chosen = ground()
    open_page(tab, url)

    assert light != dark
    assert (chosen, ground()) == (light, light)
    assert tab.script("return document.querySelector('#theme').ariaPressed") == "false"


@pytest.mark.parametrize("width", [320, 390])
def test_it_fits_a_phone(tab: Browser, url: str, width: int) -> None:
    tab.resize(width, 700, is_phone=True)
    open_page(tab, url)
    overflow = "return document.documentElement.scrollWidth - innerWidth"
    assert tab.script("return document.querySelector('#settings').hidden") is True
    ask(tab, "Hi")
    assert tab.script(overflow) == 0
    tab.click("#open-settings")
    assert tab.script("return document.activeElement.id") == "close-settings"
    tab.press("Escape")
    assert tab.script("return document.querySelector('#settings').hidden") is True
    tab.click("#tab-engine")
    tab.until("document.querySelector('#engine tbody td')")
    assert tab.script(overflow) == 0


def faults_found(tab: Browser, part: str = "html") -> list[str]:
    """Return what axe finds in a part of the page against WCAG 2.2 AA."""
    if not tab.script("return 'axe' in window"):
        axe = find("axe-core")
        assert axe is not None
        tab.script(axe.read_text())
    code = """
        const tags = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"];
        return axe.run(arguments[0], { runOnly: { type: "tag", values: tags } }).then((results) =>
          results.violations.flatMap(({ id, nodes }) =>
            nodes.map((node) => `${id}: ${node.html.slice(0, 150)} ${node.failureSummary}`)));
    """
    return [str(each) for each in tab.script(code, part)]


@needs("axe-core")
@pytest.mark.parametrize(("scheme", "width"), [("dark", 390), ("light", 1280)])
def test_axe_finds_nothing(tab: Browser, url: str, scheme: str, width: int) -> None:
    tab.resize(width, 800, is_phone=width < 500)
    tab.prefer(scheme)
    open_page(tab, url)
    found = {"empty": faults_found(tab)}
    if width > 500:
        tab.press("Alt", "s")
    ask(tab, "Hi")
    tab.script("document.querySelector('details').open = true")
    found["answer"] = faults_found(tab, "#chat")
    set_field(tab, "top_logprobs", "3")
    tab.click("#compare")
    tab.press("Alt", "r")
    tab.until("document.querySelectorAll(\"[title='Show the tokens']:not([hidden])\").length === 2")
    tab.script("document.querySelector(\"[title='Show the tokens']\").click()")
    tab.script("document.querySelector('.token-list').focus()")
    tab.press("Right")
    found["tokens"] = faults_found(tab, "#panes")
    tab.press("Alt", "s")
    set_field(tab, "tools", "[")
    found["settings"] = faults_found(tab, "#settings")
    set_field(tab, "tools", "")
    tab.press("Alt", "s")
    for button in ("#open-key", ".pane-head button"):
        tab.script(f"document.querySelector('{button}').click()")
        found[button] = faults_found(tab, "dialog[open]")
        tab.press("Escape")
    tab.click("#tab-engine")
    tab.until("document.querySelector('#engine tbody td')")
    found["engine"] = faults_found(tab, "#engine")

    assert {place: faults for place, faults in found.items() if faults} == {}
