"""The policy as Serve calls it: what it takes from Serve, and what it tells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from ray import cloudpickle
from ray.serve._private.autoscaling_state import _resolve_policy_callable
from ray.serve._private.common import ReplicaID, TimeStampedValue
from ray.serve.autoscaling_policy import _apply_autoscaling_config
from ray.serve.config import AutoscalingContext

from remora.deployments.autoscaling import explain
from remora.deployments.autoscaling.facts import Targets
from remora.deployments.autoscaling.options import scaling_options
from remora.deployments.autoscaling.slo_policy import MAX_HISTORY, SloPolicy, facts_of
from tests.deployments.autoscaling import makers
from tests.deployments.fakes import make_server_config

NOW = 1000.0
TARGETS = Targets(requests=2.0)
Series = Mapping[str, list[tuple[float, float]]]


@pytest.fixture(autouse=True)
def published(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Collect what would go to Ray's store."""
    records: list[dict[str, Any]] = []
    monkeypatch.setattr(explain, "publish", lambda app, name, record: records.append(record))
    monkeypatch.setattr(explain, "retract", lambda app, name: None)
    return records


def make_context(*replicas: Series, **values: Any) -> AutoscalingContext:
    ids = [ReplicaID(f"r{number}", makers.DEPLOYMENT) for number in range(len(replicas))]
    metrics: dict[str, dict[ReplicaID, list[TimeStampedValue]]] = {}
    for replica, series in zip(ids, replicas, strict=True):
        for name, points in series.items():
            metrics.setdefault(name, {})[replica] = [TimeStampedValue(*point) for point in points]
    return makers.make_context(ids, metrics, **({"current_time": NOW} | values))


def test_load_is_averaged_and_latencies_are_the_newest() -> None:
    series = {
        "num_running": [(NOW - 2, 2.0), (NOW - 1, 4.0)],
        "ttft_p90_s": [(NOW - 2, 9.0), (NOW - 1, 1.0)],
    }

    facts, ages = facts_of(make_context(series), TARGETS)

    assert facts.replicas["r0"].num_running == 3
    assert facts.replicas["r0"].ttft_p90_s == 1
    assert ages == {"r0": 1.0}


def test_a_replica_that_has_fallen_silent_is_not_known() -> None:
    old = {"num_running": [(NOW - 30, 50.0)]}
    facts, _ = facts_of(make_context(old, {"num_running": [(NOW - 1, 1.0)]}), TARGETS)
    assert set(facts.replicas) == {"r1"}


def test_numbers_that_make_no_sense_are_not_known() -> None:
    strange = {"num_running": [(NOW, float("nan"))], "itl_p90_s": []}
    context = make_context(strange, total_num_requests=float("nan"), total_queued_requests=-1.0)

    facts, _ = facts_of(context, TARGETS)

    assert not facts.loads
    assert facts.total_requests == facts.held_requests == 0


def test_serve_makes_the_policy_from_the_options_and_asks_it() -> None:
    section = {"max_replicas": 4, "target_requests": 2, "upscale_delay_s": 0}
    config = make_server_config(autoscaling=section)
    options = scaling_options(config)["autoscaling_config"]
    policy = _apply_autoscaling_config(_resolve_policy_callable(options.policy))

    replicas, state = policy(
        make_context({"num_running": [(NOW, 7.0)]}, total_num_requests=7.0, config=options)
    )

    assert replicas == 3  # from one; more is seen when these are there
    assert state is not None


def test_the_policy_survives_being_sent_to_the_controller() -> None:
    policy = cloudpickle.loads(cloudpickle.dumps(SloPolicy))(requests=2.0)
    assert policy(make_context({"num_running": [(NOW, 1.0)]}, total_num_requests=1.0))[0] == 1


def test_a_change_is_told_at_once_and_why(published: list[dict[str, Any]]) -> None:
    policy = SloPolicy(requests=2.0, upscale_delay_s=0.0)

    policy(make_context({"num_running": [(NOW, 3.0)]}, total_num_requests=3.0))

    record = published[-1]
    assert record["replicas"]["target"] == 2
    assert record["winner"] == "requests"
    reason = "more were wanted long enough (requests)"
    assert record["history"] == [{"time": NOW, "from": 1, "to": 2, "reason": reason}]
    assert record["reports"]["r0"]["num_running"] == 3


def test_nothing_new_is_told_every_two_seconds(published: list[dict[str, Any]]) -> None:
    policy = SloPolicy(requests=2.0)
    for tick in range(100):
        now = NOW + tick / 10
        policy(make_context({"num_running": [(now, 1.0)]}, current_time=now))
    assert len(published) == 5


def test_what_others_have_set_is_told_too(published: list[dict[str, Any]]) -> None:
    policy = SloPolicy(requests=2.0)
    policy(make_context(target_num_replicas=0))
    policy(make_context({}, target_num_replicas=1, current_time=NOW + 0.1))

    (change,) = published[-1]["history"]
    assert (change["from"], change["to"]) == (0, 1)
    assert "Serve" in change["reason"]


def test_the_latest_changes_are_kept(published: list[dict[str, Any]]) -> None:
    policy = SloPolicy(requests=2.0)
    for tick in range(60):
        now = NOW + 10 * tick
        policy(make_context(target_num_replicas=tick % 2 + 1, current_time=now))

    history = published[-1]["history"]
    assert len(history) == MAX_HISTORY
    assert history[-1]["time"] > NOW + 500


def test_scaling_goes_on_when_nothing_can_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("no store")

    monkeypatch.setattr(explain, "publish", fail)
    policy = SloPolicy(requests=2.0, upscale_delay_s=0.0)

    replicas, _ = policy(make_context({"num_running": [(NOW, 3.0)]}, total_num_requests=3.0))

    assert replicas == 2
