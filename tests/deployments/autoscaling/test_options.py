"""What Serve is told about the number of replicas."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from remora.configs.load import parse_args
from remora.deployments.autoscaling.options import policy_targets, scaling_options
from tests.deployments.fakes import make_server_config


def test_without_a_maximum_the_number_is_fixed() -> None:
    config = make_server_config(parallel={"num_replicas": 3})
    assert scaling_options(config) == {"num_replicas": 3}


def test_serve_itself_waits_for_nothing() -> None:
    options = scaling_options(make_server_config(autoscaling={"max_replicas": 3}))[
        "autoscaling_config"
    ]

    assert (options.min_replicas, options.initial_replicas, options.max_replicas) == (1, None, 3)
    assert options.upscale_delay_s == options.downscale_delay_s == 0
    assert options.downscale_to_zero_delay_s == 0


def test_serve_begins_with_as_many_as_configured() -> None:
    config = make_server_config(autoscaling={"max_replicas": 3, "initial_replicas": 2})
    assert scaling_options(config)["autoscaling_config"].initial_replicas == 2


@pytest.mark.parametrize("look_back_s", [0.1, 1.0, 10.0, 300.0])
def test_reports_come_often_enough_to_be_looked_back_at(look_back_s: float) -> None:
    config = make_server_config(autoscaling={"max_replicas": 3, "look_back_s": look_back_s})

    options = scaling_options(config)["autoscaling_config"]

    assert options.metrics_interval_s <= 1
    assert options.look_back_period_s >= 2 * options.metrics_interval_s


def test_a_replica_is_meant_for_three_quarters_of_what_it_can_run() -> None:
    config = make_server_config(
        autoscaling={"max_replicas": 3}, engine={"max_running_requests": 32}
    )
    assert policy_targets(config)["requests"] == 24


def test_the_example_goes_from_none_to_three_by_latencies() -> None:
    path = Path(__file__).parents[3] / "configs" / "smollm2-autoscale.yaml"
    (application,) = yaml.safe_load(path.read_text(encoding="utf-8"))["applications"]

    options = scaling_options(parse_args(application["args"]))["autoscaling_config"]

    assert (options.min_replicas, options.max_replicas) == (0, 3)
    assert options.policy.policy_kwargs["ttft_s"] is not None
    assert options.policy.policy_kwargs["itl_s"] is not None
