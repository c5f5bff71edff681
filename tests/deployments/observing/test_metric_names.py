"""What metrics are called: their HELP texts, vLLM's names of them, and what Ray gets."""

from __future__ import annotations

import asyncio
import re
from collections import Counter, defaultdict
from collections.abc import Mapping

import pytest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from remora.configs.errors import ConfigError
from remora.configs.load import parse_args
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.observing import telemetry
from remora.deployments.observing.metric_help import HELP
from remora.deployments.observing.ray_metrics import RayMetrics
from remora.deployments.observing.telemetry import Telemetry
from remora.deployments.observing.vllm_metrics import NAMES
from tests.deployments.fakes import FakeServer, make_client, make_server_config
from tests.deployments.observing.metric_names import all_metrics, full_metrics

Values = dict[tuple[str, frozenset[tuple[str, str]]], float]


def values_of(metrics: list[Metric]) -> Values:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for metric in metrics
        for sample in metric.samples
    }


def test_the_help_of_each_metric_is_a_sentence_of_its_own() -> None:
    texts = {metric.name: metric.documentation for metric in all_metrics()}

    sentences = re.compile(r"[A-Z][^.]+\.(?: [A-Z][^.]+\.)?")
    poor = {
        name: text
        for name, text in texts.items()
        if not sentences.fullmatch(text) or len(text.split()) < 3
    }
    twice = [text for text, count in Counter(texts.values()).items() if count > 1]
    assert poor == {}
    assert twice == []


def test_each_help_text_is_used() -> None:
    names = {name for metric in all_metrics() for name in (metric.name, metric.name + "_total")}

    assert {f"remora_{name}" for name in HELP} - names == set()


def labels(**values: str) -> frozenset[tuple[str, str]]:
    return frozenset({"model_name": "tiny", **values}.items())


@pytest.mark.parametrize(("ours", "theirs"), [(o, t) for o, names in NAMES.items() for t in names])
def test_a_metric_under_vllms_name_has_our_values(ours: str, theirs: str) -> None:
    found = list(full_metrics(compat="vllm").collect())

    (own,) = (metric for metric in found if metric.name == f"remora_{ours}")
    (other,) = (metric for metric in found if metric.name == f"vllm:{theirs}")
    assert other.type == own.type
    assert all(sample.labels["engine"] == "0" for sample in other.samples)
    assert all(sample.labels["model_name"] == "tiny" for sample in other.samples)

    def by_suffix(metric: Metric) -> Mapping[str, float]:
        sums: defaultdict[str, float] = defaultdict(float)
        for sample in metric.samples:
            if not sample.name.endswith("_created"):
                suffix = sample.name.removeprefix(metric.name)
                sums[f"{suffix} {sample.labels.get('le', '')}"] += sample.value
        return sums

    assert by_suffix(other) == by_suffix(own)
    assert any(by_suffix(own).values()) or ours in {"num_waiting", "kv_usage"}


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("vllm:num_requests_running", {labels(engine="0"): 2}),
        ("vllm:prefix_cache_hits_total", {labels(engine="0"): 40}),
        (
            "vllm:request_success_total",
            {
                labels(engine="0", finished_reason="stop"): 1,
                labels(engine="0", finished_reason="abort"): 1,
            },
        ),
        ("vllm:spec_decode_num_accepted_tokens_total", {labels(engine="0"): 12}),
        (
            "vllm:spec_decode_num_accepted_tokens_per_pos_total",
            {labels(engine="0", position="0"): 5, labels(engine="0", position="1"): 1},
        ),
        ("vllm:request_prefill_time_seconds_sum", {labels(engine="0"): 0.25 - 0.05}),
        ("vllm:request_decode_time_seconds_sum", {labels(engine="0"): 1.0}),
    ],
)
def test_labels_are_vllms(name: str, found: dict[frozenset[tuple[str, str]], float]) -> None:
    values = values_of(list(full_metrics(compat="vllm").collect()))

    assert {key: value for (other, key), value in values.items() if other == name} == found


@pytest.mark.observes("metrics.compat")
async def test_the_route_shows_vllms_names_where_they_are_wanted() -> None:
    async def names(**metrics: str) -> set[str]:
        server = FakeServer(config=make_server_config(metrics=metrics))
        async with make_client(server) as client:
            text = (await client.get("/metrics")).text
        return {family.name for family in text_string_to_metric_families(text)}

    plain, both = await names(), await names(compat="vllm")
    assert "remora_num_running" in plain & both
    assert both - plain >= {"vllm:num_requests_running", "vllm:time_to_first_token_seconds"}
    assert not any(name.startswith("vllm") for name in plain)


class Gauges:
    """Stands in for Ray: the last value of each series."""

    def __init__(self) -> None:
        self.values: Values = {}

    def make(self, name: str, text: str, tags: tuple[str, ...]) -> OneGauge:
        assert re.fullmatch("[a-zA-Z0-9_]+", name)
        assert text
        return OneGauge(self, name, tags)


class OneGauge:
    def __init__(self, gauges: Gauges, name: str, tags: tuple[str, ...]) -> None:
        self._gauges, self._name, self._tags = gauges, name, tags

    def set(self, value: float, tags: Mapping[str, str]) -> None:
        assert set(tags) == set(self._tags)
        self._gauges.values[self._name, frozenset(tags.items())] = value


async def test_ray_gets_every_sample_with_its_labels_and_exact_value() -> None:
    metrics, gauges = full_metrics(compat="vllm"), Gauges()
    expected = {
        (name.replace(":", "_"), key): value
        for (name, key), value in values_of(list(metrics.collect())).items()
        if not name.endswith("_created")
    }
    task = asyncio.create_task(RayMetrics(metrics.collect, gauges.make).run())
    async with asyncio.timeout(10.0):
        while expected.keys() - gauges.values.keys():
            await asyncio.sleep(0.001)
    task.cancel()

    changing = {name for name, _ in expected if name.startswith("remora_rank_")}
    assert {key: value for key, value in gauges.values.items() if key[0] not in changing} == {
        key: value for key, value in expected.items() if key[0] not in changing
    }


@pytest.mark.observes("metrics.export_to_ray")
@pytest.mark.parametrize(
    ("keys", "reports"),
    [({}, True), ({"export_to_ray": False}, False), ({"enabled": False}, False)],
)
async def test_the_report_to_ray_can_be_switched_off(
    monkeypatch: pytest.MonkeyPatch, keys: dict[str, bool], reports: bool
) -> None:
    begun: list[RayMetrics] = []

    async def run(self: RayMetrics) -> None:
        begun.append(self)

    monkeypatch.setattr(RayMetrics, "run", run)
    monkeypatch.setattr(telemetry, "in_replica", lambda: True)
    server = FakeServer(config=make_server_config(metrics=keys))
    running = Telemetry(ServerState.over(server), "replica7")
    await asyncio.sleep(0)
    running.close()
    await asyncio.sleep(0)

    assert bool(begun) is reports


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({"compat": "sglang"}, "compat"),
        ({"enabled": False, "export_to_ray": True}, "export_to_ray"),
        ({"request_labels": ["deployment"]}, r"request_labels\[0\]"),
    ],
)
def test_what_cannot_be_is_refused(metrics: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_args({"model": {"path": "x"}, "metrics": metrics})
