"""Each target of the configuration changes what is decided under the same load."""

from __future__ import annotations

from typing import Any

import pytest

from remora.deployments.autoscaling.facts import Targets
from remora.deployments.autoscaling.options import policy_targets
from tests.deployments.autoscaling.makers import IDLE, Decider, make_load
from tests.deployments.fakes import make_server_config

BUSY = make_load(num_running=60.0)  # 48 are what a replica is meant for by default
LATE = make_load(num_running=5.0, queued_tokens=900.0, ttft_p90_s=7.0)


def decider(start: int, section: dict[str, Any]) -> Decider:
    config = make_server_config(autoscaling={"max_replicas": 20, **section})
    return Decider(
        start, Targets(**policy_targets(config)), min_replicas=config.autoscaling.min_replicas
    )


@pytest.mark.observes(
    "autoscaling.target_requests",
    "autoscaling.target_kv_usage",
    "autoscaling.target_ttft_s",
    "autoscaling.target_itl_s",
    "autoscaling.look_back_s",
    "autoscaling.upscale_delay_s",
    "autoscaling.downscale_delay_s",
    "autoscaling.to_zero_delay_s",
)
@pytest.mark.parametrize(
    ("key", "value", "start", "load", "seconds", "without", "replicas"),
    [
        ("target_requests", 8.0, 1, make_load(num_running=16.0), 7, 1, 2),
        ("target_kv_usage", 0.5, 1, make_load(kv_usage=0.7), 7, 1, 2),
        ("target_ttft_s", 0.5, 4, LATE, 7, 4, 5),
        ("target_itl_s", 0.03, 4, make_load(num_running=20.0, itl_p90_s=0.06), 7, 4, 8),
        ("look_back_s", 60.0, 1, make_load(num_waiting=9.0, queued_tokens=19e3), 7, 2, 1),
        ("upscale_delay_s", 30.0, 1, BUSY, 7, 2, 1),
        ("downscale_delay_s", 10.0, 4, IDLE, 12, 4, 2),
        ("to_zero_delay_s", 5.0, 1, IDLE, 8, 1, 0),
    ],
)
def test_a_key_changes_the_number_of_replicas(
    key: str, value: float, start: int, load: Any, seconds: int, without: int, replicas: int
) -> None:
    base = {"min_replicas": 0} if key == "to_zero_delay_s" else {}

    default = decider(start, base).decide(load, seconds).replicas
    changed = decider(start, base | {key: value}).decide(load, seconds).replicas

    assert (default, changed) == (without, replicas)
