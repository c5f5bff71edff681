"""The playground's modules, called one by one in a real browser: Markdown, streams, snippets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from remora.deployments.http.playground.static_files import static_files
from tests.deployments.fakes import FakeServer
from tests.deployments.http.playground.browser import Browser
from tests.deployments.http.playground.serving import fake

# The browser is the same for all examples.
FEW = settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
SHOW = """
const element = document.createElement("div");
for (const text of texts) showMarkdown(element, text);
"""


@pytest.fixture(scope="module")
def page(chromium: Browser) -> Iterator[Browser]:
    with fake(FakeServer()) as url:
        chromium.open(url)
        chromium.until("document.body.dataset.ready")
        yield chromium


def call(page: Browser, module: str, code: str, **values: Any) -> Any:
    """Run code with the exports of a module, and these values, as its names."""
    names = ", ".join(values)
    place = f"./playground/{static_files().digest}/{module}"
    script = f"""
        const {{ {names} }} = arguments[0];
        return import(new URL("{place}", document.baseURI)).then(async (exports) => {{
          const {{ {EXPORTS[module]} }} = exports;
          {code}
        }});
    """
    return page.script(script, values)


EXPORTS = {
    "markdown.js": "showMarkdown",
    "stream.js": "readEvents, partOf, Stopwatch",
    "snippets.js": "asCurl, asPython, pythonLiteral, shellQuoted",
    "prometheus.js": "parseMetrics",
    "readings.js": "pointOf, hasFallen, replicasOf",
    "tokens.js": "textsOf, percent",
    "chart.js": "niceTop",
}


def html_of(page: Browser, *texts: str) -> str:
    return str(call(page, "markdown.js", SHOW + "return element.innerHTML;", texts=texts))


# -- Markdown ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("a\nb", "<p>a\nb</p>"),
        ("# A *b*", "<h3>A <em>b</em></h3>"),
        ("###### A ##", "<h6>A</h6>"),
        (
            "**a** __b__ ~~c~~ `d`",
            "<p><strong>a</strong> <strong>b</strong> <s>c</s> <code>d</code></p>",
        ),
        ("snake_case_name 2 * 3 * 4", "<p>snake_case_name 2 * 3 * 4</p>"),
        ("**a *b* c**", "<p><strong>a <em>b</em> c</strong></p>"),
        ("`` a`b `` and ` c", "<p><code>a`b</code> and ` c</p>"),
        (r"\*a\* **b", "<p>*a* **b</p>"),
        ("- a\n- b\n  - c", "<ul><li>{a}</li><li>{b}<ul><li>{c}</li></ul></li></ul>"),
        ("3. a\n4. b", '<ol start="3"><li>{a}</li><li>{b}</li></ol>'),
        ("> a\n> > b", "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>"),
        ("a\n\n---\n\nb", "<p>a</p><hr><p>b</p>"),
        ("<b>a</b> &amp;", "<p>&lt;b&gt;a&lt;/b&gt; &amp;amp;</p>"),
    ],
)
def test_markdown_becomes_nodes(page: Browser, text: str, html: str) -> None:
    for name in "abc":
        html = html.replace(f"{{{name}}}", f'<span class="item">{name}</span>')
    assert html_of(page, text) == html


def test_code_and_tables(page: Browser) -> None:
    code = html_of(page, "```python\nif a < b:\n    *c*\n```\nd")
    table = html_of(page, "| a | b |\n|---|--:|\n| `c` | d \\| e |\n| f |\n\ng")
    open_fence = html_of(page, "```\na\n\nb")

    assert "<code>if a &lt; b:\n    *c*</code>" in code
    assert code.endswith("<p>d</p>")
    assert "<tr><td><code>c</code></td><td>d | e</td></tr><tr><td>f</td><td></td></tr>" in table
    assert "<code>a\n\nb</code>" in open_fence


@pytest.mark.parametrize(
    ("text", "hrefs"),
    [
        ("[a](https://a.example/b)", ["https://a.example/b"]),
        ("see https://a.example/b.", ["https://a.example/b"]),
        ("<https://a.example/>", ["https://a.example/"]),
        ("![a](https://a.example/pixel.png)", ["https://a.example/pixel.png"]),
        ("[a](javascript:alert(1))", []),
        ("[a](data:text/html,x) [b](//evil.example) [c](/etc) [d](vbscript:x)", []),
        ("[a](JaVaScRiPt:alert) [b]( javascript:x)", []),
    ],
)
def test_links_lead_to_the_web_and_nowhere_else(page: Browser, text: str, hrefs: list[str]) -> None:
    code = SHOW + "return [...element.querySelectorAll('a')].map((a) => [a.href, a.rel, a.target]);"
    found = call(page, "markdown.js", code, texts=[text])
    assert found == [[href, "noopener noreferrer nofollow", "_blank"] for href in hrefs]


MARKS = "*_~`#>-|[]()!<>\\ \n\t1.ahttps://é🙂"
TEXTS = st.text(st.sampled_from(MARKS), max_size=60) | st.text(max_size=60)
ALLOWED = {"A", "BLOCKQUOTE", "BUTTON", "CODE", "DIV", "EM", "FIGCAPTION", "FIGURE", "H3", "H4"}
ALLOWED |= {"H5", "H6", "HR", "LI", "OL", "P", "PRE", "S", "SPAN", "STRONG", "TABLE", "TBODY"}
ALLOWED |= {"TD", "TH", "THEAD", "TR", "UL", "svg", "use"}


@FEW
@given(TEXTS)
@example("<script>alert(1)</script><img src=x onerror=alert(1)>")
@example("> " * 3000 + "deep")
@example("[" * 20_000 + "](")
@example("*a " * 20_000)
def test_no_text_makes_other_elements_or_loses_its_letters(page: Browser, text: str) -> None:
    code = (
        SHOW
        + """
        const tags = [...element.querySelectorAll("*")].map((each) => each.tagName);
        return [[...new Set(tags)], element.textContent];
    """
    )
    tags, shown = call(page, "markdown.js", code, texts=[text])
    assert set(tags) <= ALLOWED
    letters = [char for char in text if char in "éa🙂"]
    assert [char for char in shown if char in "éa🙂"] == letters or "```" in text or "|" in text


@FEW
@given(TEXTS, st.lists(st.integers(0, 60), max_size=4))
@example("a\n\n- b\n\n  c\n\nd", [3, 7])
def test_a_stream_ends_as_the_whole_text_does(page: Browser, text: str, cuts: list[int]) -> None:
    code = """
        const parts = document.createElement("div");
        for (const cut of cuts) showMarkdown(parts, text.slice(0, cut));
        showMarkdown(parts, text);
        const whole = document.createElement("div");
        showMarkdown(whole, text);
        return [parts.innerHTML, whole.innerHTML];
    """
    parts, whole = call(page, "markdown.js", code, text=text, cuts=sorted(cuts))
    assert parts == whole


# -- streams -----------------------------------------------------------------------------------

EVENTS = [{"a": "é🙂\n"}, {"b": [1]}, {"c": None}]
STREAM = b"".join(b"data: %s\n\n" % json.dumps(e, ensure_ascii=False).encode() for e in EVENTS)
READ = """
    const stream = new ReadableStream({ start(controller) {
      for (const chunk of chunks) controller.enqueue(new Uint8Array(chunk));
      controller.close();
    } });
    const found = [];
    for await (const event of readEvents(stream)) found.push(event);
    return found;
"""


@FEW
@given(st.lists(st.integers(1, len(STREAM) + 40), max_size=8), st.sampled_from([b"\n", b"\r\n"]))
def test_events_are_the_same_however_they_arrive(
    page: Browser, cuts: list[int], newline: bytes
) -> None:
    text = b": keep-alive\n\n" + STREAM + b"data: [DONE]\n\ndata: {}\n\n"
    text = text.replace(b"\n", newline)
    edges = [0, *sorted(cuts), len(text)]
    chunks = [list(text[a:b]) for a, b in pairwise(edges)]
    assert call(page, "stream.js", READ, chunks=chunks) == EVENTS


def test_a_stopwatch_measures_after_the_first_token(page: Browser) -> None:
    code = """
        const watch = new Stopwatch(1000);
        for (const now of [1250, 1350, 1450]) watch.note(now);
        const unused = new Stopwatch(0);
        return [{ completion_tokens: 5 }, null].map((usage) => watch.result(usage))
          .concat(unused.result(null));
    """
    exact, counted, nothing = call(page, "stream.js", code)
    assert exact == {"ttftMs": 250, "tokens": 5, "speed": 20, "isExact": True}
    assert counted == {"ttftMs": 250, "tokens": 3, "speed": 10, "isExact": False}
    assert nothing == {"ttftMs": None, "tokens": 0, "speed": None, "isExact": False}


# -- snippets ----------------------------------------------------------------------------------

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@FEW
@given(VALUES)
def test_a_value_in_python_is_the_same_value(page: Browser, value: Any) -> None:
    import ast

    source = call(page, "snippets.js", "return pythonLiteral(value, 4);", value=value)
    assert ast.literal_eval(source) == value


@FEW
@given(st.text(max_size=30).filter(lambda text: "\0" not in text))
def test_a_text_in_a_shell_is_the_same_text(page: Browser, text: str) -> None:
    import shlex

    assert shlex.split(call(page, "snippets.js", "return shellQuoted(text);", text=text)) == [text]


# -- metrics -----------------------------------------------------------------------------------


def metrics(**values: float) -> str:
    """Return a reading of two replicas, which have these values each."""
    return "".join(
        f'remora_{name}{{replica="{replica}",model_name="tiny"}} {value}\n'
        for name, value in values.items()
        for replica in ("a", "b")
    )


def readings(page: Browser, *texts: str) -> Any:
    code = """
        const wanted = { has: () => true };
        return texts.map((text) => [...parseMetrics(text, wanted)]);
    """
    return call(page, "prometheus.js", code, texts=texts)


POINT = "return pointOf(before && new Map(before), new Map(now), 2, model);"


def test_rates_are_differences_of_two_readings(page: Browser) -> None:
    first = metrics(steps_total=10, step_time_seconds_total=1, generated_tokens_total=100)
    later = metrics(steps_total=20, step_time_seconds_total=1.5, generated_tokens_total=150)
    gauges = metrics(num_running=3, num_waiting=1, num_pages=100, num_held_pages=25)
    before, now = readings(page, first, later + gauges)
    point = call(page, "readings.js", POINT, before=before, now=now, model="")
    other = call(page, "readings.js", POINT, before=before, now=now, model="other")
    alone = call(page, "readings.js", POINT, before=None, now=now, model="")

    assert (point["running"], point["waiting"], point["kvHeld"]) == (6, 2, 25)
    assert (point["outputRate"], point["stepMs"], point["ttftMs"]) == (50, 50, None)
    assert (other["running"], other["kvHeld"], alone["outputRate"]) == (0, None, None)


def test_a_replica_that_starts_or_restarts_is_no_jump(page: Browser) -> None:
    first = 'remora_steps_total{replica="a"} 1000\nremora_generated_tokens_total{replica="a"} 9\n'
    later = first.replace("1000", "3") + 'remora_generated_tokens_total{replica="b"} 5000\n'
    before, now = readings(page, first, later)
    fallen = "return hasFallen(new Map(before), new Map(now));"

    assert call(page, "readings.js", POINT, before=before, now=now, model="")["outputRate"] == 0
    assert call(page, "readings.js", fallen, before=before, now=now) is True
    assert call(page, "readings.js", fallen, before=now, now=now) is False


def test_labels_and_special_values_are_read(page: Browser) -> None:
    text = '# HELP a\na{x="q\\"\\\\\\n,}",le="+Inf"} +Inf 123\nb 1e-3\nnot a metric\n'
    ((a, (sample,)), b) = readings(page, text)[0]
    assert (a, sample["labels"]) == ("a", {"x": 'q"\\\n,}', "le": "+Inf"})
    assert b == ["b", [{"labels": {}, "value": 0.001}]]


@FEW
@given(st.floats(1e-6, 1e9))
def test_the_axis_ends_at_a_round_number_above(page: Browser, value: float) -> None:
    top = call(page, "chart.js", "return niceTop(value);", value=value)
    assert value <= top * (1 + 1e-9)
    assert top <= 2.5 * value * (1 + 1e-9)


def test_bytes_of_a_character_in_several_tokens_are_joined(page: Browser) -> None:
    halves = [
        {"token": "\ufffd", "bytes": list(part)} for part in ("é".encode()[:1], "é".encode()[1:])
    ]
    assert call(page, "tokens.js", "return textsOf(tokens);", tokens=halves) == ["", "é"]
