"""The report as data, as text and as a self-contained HTML file."""

from __future__ import annotations

import json
import re
from io import StringIO
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from remora.deployments.bench.report.charts import charts
from remora.deployments.bench.report.html import render_html
from remora.deployments.bench.report.record import Bar, BarChart, Plot, Report, Result, TextTable
from remora.deployments.bench.report.svg import bar_chart, line_plot
from remora.deployments.bench.report.table import show
from remora.deployments.bench.session import Outputs, finish
from remora.deployments.cli.terminal import Failure

SHOWN = ("2.75", "43.8 %", "80 / 50 %", "0.25 s (12.5 %)", "1.50 s (75.0 %)")
SVG_TAGS = {"svg", "polyline", "line", "rect", "circle", "text", "title"}


DRAFTS = {
    "seconds": 2.0,
    "draft_rows": 10.0,
    "tokens_per_verified_row": 2.75,
    "accepted_share": 0.4375,
    "accepted_1_share": 0.8,
    "accepted_2_share": 0.5,
    "verify_steps": 7.0,
    "drafting_s": 0.25,
    "verifying_s": 1.5,
}


def make_report() -> Report:
    results = [
        Result(
            workload=f"online-{streams}",
            shape="8 x 64/32",
            figures={
                "output_tok_s": 100.0 * streams,
                "total_tok_s": 300.0,
                "failures": 0.0,
                "bound_share": 0.5,
                **{f"ttft_p{p}_ms": float(p) for p in (50, 90, 99)},
                **{f"tpot_p{p}_ms": float(p) for p in (50, 90, 99)},
                **dict.fromkeys(("step_ms", "schedule_ms", "forward_ms", "sample_ms"), 1.5),
                "overhead_share": 0.04,
                **DRAFTS,
            },
            spread={"output_tok_s": (90.0 * streams, 110.0 * streams)},
            notes=("answers <were> short & few",),
        )
        for streams in (1, 8)
    ]
    report = Report(
        command="remora bench serve '<x>'",
        target='a "model" & <more>',
        machine={"processor": "Zen"},
        software={"torch": "2"},
        results=[*results, Result(workload="embedding", skipped="not served yet: <why>")],
        tables=[TextTable(title="More", header=("a", "b"), rows=(("1", "2"),))],
        bounds={
            "before": {
                "num_threads": 2,
                "read_gb_s_1": 20.0,
                "read_gb_s": 30.0,
                "bf16_gflop_s": 400.0,
                "int8_gop_s": None,
            }
        },
    )
    report.plots += charts(results)
    return report


def test_the_page_is_well_formed_and_holds_everything() -> None:
    page = render_html(make_report())

    root = ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>\n"))

    found = " ".join(root.itertext())
    expected = (
        "online-8",
        "800 output tok/s",
        "<more>",
        "<were>",
        "<why>",
        "Zen",
        "50.0 %",
        *SHOWN,
    )
    assert [text for text in expected if text not in found] == []
    assert len(list(root.iter("svg"))) == len(make_report().plots)


def test_the_page_needs_no_network_and_no_script_and_follows_light_and_dark() -> None:
    page = render_html(make_report())

    drawings = "".join(re.findall(r"<svg.*?</svg>", page))
    used = set(re.findall(r"var\((--\w+)\)", drawings))
    styles = re.findall(r":root \{.*?\}", page, flags=re.DOTALL)
    assert not re.search(r"https?://|src=|href=|@import|url\(|<script|<link|<iframe", page)
    assert "prefers-color-scheme: dark" in page
    assert not re.search(r"#[0-9a-f]{3,6}", drawings)
    assert len(styles) == 2
    assert all(f"{name}:" in style for name in used for style in styles)


def test_the_terminal_shows_results_skips_and_notes() -> None:
    out = StringIO()

    show(make_report(), Console(file=out, width=140))

    shown = out.getvalue()
    expected = (
        "800 output tok/s",
        "not served yet: <why>",
        "note: online-8: answers <were>",
        *SHOWN,
    )
    assert [text for text in expected if text not in shown] == []


def test_both_files_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = Outputs(json=str(tmp_path / "r.json"), html=tmp_path / "r.html")

    finish(make_report(), outputs)

    data = json.loads((tmp_path / "r.json").read_text())
    assert data["command"] == "remora bench serve '<x>'"
    assert data["figures"]["online-8"]["output_tok_s"] == 800
    assert "embedding" not in data["figures"]
    assert data["results"][2]["skipped"] == "not served yet: <why>"
    assert (tmp_path / "r.html").read_text().startswith("<!DOCTYPE html>")
    assert "Throughput" in capsys.readouterr().out


def test_stdout_holds_only_json_if_requested(capsys: pytest.CaptureFixture[str]) -> None:
    finish(make_report(), Outputs(json="-"))

    captured = capsys.readouterr()
    assert json.loads(captured.out)["target"] == 'a "model" & <more>'
    assert "Throughput" in captured.err


def test_a_missing_folder_and_an_empty_report_are_failures(tmp_path: Path) -> None:
    with pytest.raises(Failure, match=r"r\.html"):
        Outputs(html=tmp_path / "no" / "r.html").check()
    report = make_report()
    report.results, report.tables = report.results[2:], []
    with pytest.raises(Failure, match="not served yet"):
        finish(report, Outputs())


points = st.lists(st.tuples(st.floats(0, 1e5), st.floats(0, 1e5)), max_size=12)


@given(st.dictionaries(st.text("abc<&", min_size=1), points, max_size=8), st.booleans())
def test_any_lines_are_drawn_within_the_picture(
    lines: dict[str, list[tuple[float, float]]], is_log: bool
) -> None:
    drawing = line_plot(Plot(title="<t>", x_label="x", y_label="y", lines=lines, is_log_x=is_log))

    check_drawing(drawing, is_empty=not any(lines.values()))


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)), max_size=9))
def test_any_bars_are_drawn_within_the_picture(values: list[tuple[float, float]]) -> None:
    bars = [Bar(label="<b>", value=min(v), low=min(v), high=max(v)) for v in values]

    drawing = bar_chart(BarChart(title="t", unit="u", bars=bars, reference=1.0))

    check_drawing(drawing, is_empty=not bars)


def check_drawing(drawing: str, *, is_empty: bool) -> None:
    assert (drawing == "") is is_empty
    if is_empty:
        return
    svg = ElementTree.fromstring(drawing).find("svg")
    assert svg is not None
    width, height = map(float, svg.attrib["viewBox"].split()[2:])
    assert {element.tag for element in svg.iter()} <= SVG_TAGS
    for element in svg.iter():
        across = [float(element.attrib[n]) for n in ("x", "cx", "x1", "x2") if n in element.attrib]
        down = [float(element.attrib[n]) for n in ("y", "cy", "y1", "y2") if n in element.attrib]
        assert all(-0.1 <= x <= width + 0.1 for x in across)
        assert all(-0.1 <= y <= height + 200 for y in down)
