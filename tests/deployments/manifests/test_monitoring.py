"""Dashboards, alerts and the table of metrics: they name metrics that exist, and alerts fire."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from remora.deployments.observing.vllm_metrics import NAMES
from tests.deployments.manifests.tools import CHART, promtool
from tests.deployments.observing.metric_names import (
    all_metrics,
    full_metrics,
    gateway_metrics,
    series_names,
)
from tests.programs import ROOT, needs

BOARDS = sorted((CHART / "dashboards").glob("*.json"))
ALERTS = CHART / "alerts.yaml"
PAGE = ROOT / "docs" / "metrics.md"
_METRIC = re.compile(r"\bremora_\w+|\bvllm:\w+")


def board(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def queries(path: Path) -> Iterator[str]:
    """Yield the queries of a dashboard, as Grafana sends them to Prometheus."""
    for panel in board(path)["panels"]:
        for target in panel["targets"]:
            text = target["expr"].replace("${remora}", "remora")
            yield text.replace("$__rate_interval", "1m").replace("$model", "tiny")


def test_the_dashboards_are_three() -> None:
    assert [path.stem for path in BOARDS] == ["engine", "lora", "overview"]
    boards = [board(path) for path in BOARDS]
    assert len({found["uid"] for found in boards}) == len({f["title"] for f in boards}) == 3


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_a_dashboard_queries_only_metrics_that_exist(path: Path) -> None:
    named = {name for query in queries(path) for name in _METRIC.findall(query)}

    assert named
    assert named - series_names(all_metrics()) == set()


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_a_dashboard_groups_by_labels_that_its_metrics_have(path: Path) -> None:
    labels: dict[str, set[str]] = {}
    for metric in all_metrics():
        for sample in metric.samples:
            # Gateways and Ray add the replica.
            labels.setdefault(sample.name, {"replica"}).update(sample.labels)
    for query in queries(path):
        names = set(_METRIC.findall(query))
        for group in re.findall(r"by \(([^)]*)\)", query):
            wanted = set(group.replace(" ", "").split(","))
            assert all(wanted <= labels[name] for name in names), query


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_a_dashboards_panels_fit_and_explain_themselves(path: Path) -> None:
    found = board(path)
    variables = {variable["name"] for variable in found["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)\}?", json.dumps(found))) - {"__rate_interval", "__all"}
    assert used <= variables
    seen = set[tuple[int, int]]()
    for panel in found["panels"]:
        grid = panel["gridPos"]
        assert grid["x"] + grid["w"] <= 24
        cells = {
            (x, y)
            for x in range(grid["x"], grid["x"] + grid["w"])
            for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert not cells & seen
        seen |= cells
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"]
    assert len({panel["id"] for panel in found["panels"]}) == len(found["panels"])


def test_alerts_query_only_metrics_that_exist_and_say_what_to_do() -> None:
    known = series_names(all_metrics())
    for rule in rules():
        named = set(_METRIC.findall(rule["expr"]))
        assert named, rule["alert"]
        assert named <= known, rule["alert"]
        assert rule["labels"]["severity"] in {"critical", "warning"}
        assert rule["annotations"].keys() == {"summary", "action"}
        assert all(text.endswith(".") for text in rule["annotations"].values())


@needs("promtool")
def test_prometheus_understands_alerts_and_dashboards(tmp_path: Path) -> None:
    assert promtool("check", "rules", str(ALERTS)) == ""
    recorded = [
        {"record": f"{path.stem}:{number}", "expr": query}
        for path in BOARDS
        for number, query in enumerate(queries(path))
    ]
    file = tmp_path / "queries.yaml"
    file.write_text(json.dumps({"groups": [{"name": "queries", "rules": recorded}]}))
    assert promtool("check", "rules", str(file)) == ""


@needs("promtool")
def test_prometheus_finds_no_fault_in_the_metrics() -> None:
    for text in (full_metrics().render(), gateway_metrics().render()):
        lines = (line for line in text.decode().splitlines(True) if "_created" not in line)
        assert promtool("check", "metrics", stdin="".join(lines)) == ""


SERIES = "{model_name='m'}"
BUCKET = "remora_time_to_first_token_seconds_bucket{model_name='m', le="
# alert: (series that it fires for, series that it is silent for), by minutes
CASES: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "RemoraReportsNothing": ({}, {f"remora_num_running{SERIES}": "0x60"}),
    "RemoraEngineStalled": (
        {f"remora_num_running{SERIES}": "1x60", f"remora_steps_total{SERIES}": "9x60"},
        {f"remora_num_running{SERIES}": "1x60", f"remora_steps_total{SERIES}": "0+60x60"},
    ),
    "RemoraServerErrors": (
        {
            "remora_http_responses_total{model_name='m', status='200'}": "0+90x60",
            "remora_http_responses_total{model_name='m', status='500'}": "0+10x60",
        },
        {
            "remora_http_responses_total{model_name='m', status='200'}": "0+99x60",
            "remora_http_responses_total{model_name='m', status='500'}": "0+1x60",
        },
    ),
    "RemoraReplicaCrashed": (
        {f"remora_gateway_crashes_total{SERIES}": "0x55 1x5"},
        {f"remora_gateway_crashes_total{SERIES}": "1x60"},
    ),
    "RemoraQueueGrows": (
        {f"remora_num_waiting{SERIES}": "0+2x60"},
        {f"remora_num_waiting{SERIES}": "100-1x60"},
    ),
    "RemoraSlowFirstToken": (
        {BUCKET + "'10.0'}": "0+1x60", BUCKET + "'30.0'}": "0+9x60", BUCKET + "'+Inf'}": "0+9x60"},
        {BUCKET + "'10.0'}": "0+9x60", BUCKET + "'30.0'}": "0+9x60", BUCKET + "'+Inf'}": "0+9x60"},
    ),
    "RemoraKvCacheFull": (
        {f"remora_kv_usage{SERIES}": "0.99x60"},
        {f"remora_kv_usage{SERIES}": "0.9x60"},
    ),
    "RemoraPreempts": (
        {f"remora_preemptions_total{SERIES}": "0+60x60"},
        {f"remora_preemptions_total{SERIES}": "0+1x60"},
    ),
    "RemoraAdapterNotFinite": (
        {f"remora_lora_not_finite_total{SERIES}": "0x55 3x5"},
        {f"remora_lora_not_finite_total{SERIES}": "3x60"},
    ),
}


def test_each_alert_has_a_case() -> None:
    assert [rule["alert"] for rule in rules()] == list(CASES)


@needs("promtool")
def test_alerts_fire_when_they_should_and_only_then(tmp_path: Path) -> None:
    tests = []
    for rule in rules():
        name = rule["alert"]
        for series, fires in zip(CASES[name], (True, False), strict=True):
            labels = {"severity": rule["labels"]["severity"]}
            if name != "RemoraReportsNothing":
                labels["model_name"] = "m"
            said = {
                key: text.replace("{{ $labels.model_name }}", "m")
                for key, text in rule["annotations"].items()
            }
            alert = {"exp_labels": labels, "exp_annotations": said}
            tests.append(
                {
                    "interval": "1m",
                    "input_series": [{"series": s, "values": v} for s, v in series.items()],
                    "alert_rule_test": [
                        {
                            "eval_time": "58m",
                            "alertname": name,
                            "exp_alerts": [alert] if fires else [],
                        }
                    ],
                }
            )
    file = tmp_path / "tests.yaml"
    file.write_text(json.dumps({"rule_files": [str(ALERTS)], "tests": tests}))

    assert promtool("test", "rules", str(file)) == ""


def rows() -> list[list[str]]:
    """Return the table of metrics in the documentation: ours, vLLM's, SGLang's, meaning."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if len(row) == 4 and row[0].startswith("`remora_")]


def test_the_page_lists_every_metric_and_its_names_elsewhere() -> None:
    listed: dict[str, set[str]] = {}
    for row in rows():
        for name in re.findall(r"`(remora_\w+)`", row[0]):
            listed[name] = set(re.findall(r"`(vllm:\w+)`", row[1]))
    families = {
        metric.name + ("_total" if metric.type == "counter" else "") for metric in all_metrics()
    }
    suffix = {m.name: "_total" if m.type == "counter" else "" for m in all_metrics()}
    theirs = {
        f"remora_{ours}{suffix['remora_' + ours]}": {
            f"vllm:{name}{suffix['remora_' + ours]}" for name in names
        }
        for ours, names in NAMES.items()
    }

    assert set(listed) == families
    assert {name: other for name, other in listed.items() if other} == theirs
