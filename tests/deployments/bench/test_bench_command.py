"""`remora bench` as a user types it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner, Result

from remora.deployments.cli.main import app
from tests.conftest import TinyCheckpoints
from tests.deployments.bench.openai_server import Answer, FakeOpenAI, by_rule

MakeOpenAI = Callable[..., FakeOpenAI]
SMALL = ["--requests", "4", "--input", "16", "--output", "4"]


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments])


def measured(*arguments: str) -> dict[str, Any]:
    """Return the report that a benchmark writes to stdout as JSON."""
    result = bench(*arguments, "--json", "-")
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(result.stdout)
    return report


@pytest.fixture
def tiny(tiny_checkpoints: TinyCheckpoints) -> list[str]:
    settings = ["--set", "engine.num_threads=1", "--set", "engine.kv_tokens=2048"]
    return [str(tiny_checkpoints("llama")), *settings]


def test_offline_measures_all_workloads_and_writes_both_files(
    tmp_path: Path, tiny: list[str]
) -> None:
    files = ["--json", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html")]

    result = bench("offline", *tiny, *SMALL, "--repeats", "1", *files)

    assert result.exit_code == 0, result.output
    data = json.loads((tmp_path / "r.json").read_text())
    assert set(data["figures"]) == {"decode", "prefill", "batch", "shared-prefix"}
    assert {r["workload"] for r in data["results"] if r["skipped"]} == {"embedding", "json-schema"}
    assert set(data["bounds"]) == {"before", "after"}
    page = (tmp_path / "r.html").read_text()
    assert ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>\n")).tag == "html"
    assert "not served yet" in result.stdout


def test_nothing_measured_is_an_error(tiny: list[str]) -> None:
    result = bench("offline", *tiny, "--workload", "embedding,json-schema")

    assert result.exit_code == 2
    assert result.stderr.count("error: nothing was measured") == 1


def test_serve_measures_any_url(make_openai: MakeOpenAI) -> None:
    url = f"{make_openai().url}/v1"

    data = measured("serve", "--url", url, "--concurrency", "1,4", *SMALL)

    assert set(data["figures"]) == {"online-1", "online-4"}
    assert data["figures"]["online-4"]["goodput_share"] == 1
    assert data["figures"]["online-4"]["peak_rss_mib"] > 0
    assert data["settings"]["model"] == "tiny"
    titles = {plot["title"] for plot in data["plots"]}
    assert {"Output rate", "Time to first token"} <= titles


def test_a_sweep_with_a_url_is_over_streams(make_openai: MakeOpenAI) -> None:
    data = measured("sweep", "--url", make_openai().url, "--concurrency", "1,2")

    assert set(data["figures"]) == {"online-1", "online-2"}


def test_a_sweep_of_the_engine_is_over_rows(tiny: list[str]) -> None:
    data = measured("sweep", *tiny, "--rows", "1,4", "--input", "8", "--output", "6")

    assert set(data["figures"]) == {"rows-1", "rows-4"}
    assert {"Time of a decode step", "Decode rate"} <= {plot["title"] for plot in data["plots"]}


def test_latency_compares_the_engine_s_steps_with_the_stream(make_openai: MakeOpenAI) -> None:
    steps = {"num": 0}

    def counting(path: str, body: dict[str, Any]) -> Answer:
        if path == "/metrics":
            num = steps["num"]
            text = f"remora_steps_total {num}\nremora_step_time_seconds_total {num * 0.002}\n"
            return 200, "text/plain", text.encode()
        steps["num"] += body.get("max_tokens", 0)
        return by_rule(path, body)

    server = make_openai(answer=counting)

    data = measured("latency", "--url", server.url, *SMALL)

    figures = data["figures"]["online-1"]
    assert figures["engine_step_ms"] == pytest.approx(2.0)
    assert figures["added_ms"] == pytest.approx(figures["tpot_p50_ms"] - 2.0)


def test_compare_prints_one_table_of_ratios(make_openai: MakeOpenAI, tmp_path: Path) -> None:
    a, b = make_openai(), make_openai()
    page = tmp_path / "c.html"

    result = bench("compare", a.url, b.url, "--workload", "batch", *SMALL, "--html", str(page))

    assert result.exit_code == 0, result.output
    assert "A / B" in result.stdout
    assert "output_tok_s" in result.stdout
    assert "Throughput" not in result.stdout
    assert "A over B" in page.read_text()
    assert [body for _, body in a.received] == [body for _, body in b.received]


def test_startup_measures_a_new_process(tiny: list[str]) -> None:
    data = measured("startup", *tiny, "--only", "offline")

    phases = dict(data["tables"][0]["rows"])
    assert {"import", "load weights", "first token"} <= set(phases)
    assert data["figures"]["offline"]["offline_s"] > 0
    assert data["figures"]["offline"]["peak_rss_mib"] > 1


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["offline", "/no/model"], "/no/model"),
        (["offline", "--set", "engine.speed=9"], "engine.speed"),
        (["offline", "--workload", "fast"], "'fast'; known: decode, prefill"),
        (["offline", "--workload", "online-8"], "'online-8'; known:"),
        (["offline", "--html", "/no/folder/x.html"], "/no/folder/x.html"),
        (["serve", "--url", "http://127.0.0.1:9"], "http://127.0.0.1:9"),
        (["serve", "--url", "nonsense"], "http://HOST:PORT"),
        (["serve", "--concurrency", "1,x"], "1,8,32"),
        (["startup", "--only", "x"], "must be offline or serve"),
        (["compare", "http://127.0.0.1:9", "cmd:true"], "http://127.0.0.1:9"),
        (["compare", "cmd:false", "cmd:true"], "exit code 1"),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(arguments: list[str], shown: str) -> None:
    result = bench(*arguments)

    assert result.exit_code == 2
    assert shown in result.stderr
    assert "Traceback" not in result.output
    assert result.stderr.count("error:") == 1
