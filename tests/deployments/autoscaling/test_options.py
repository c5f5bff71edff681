"""What Serve is told about the number of replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from remora.configs.load import parse_args
from remora.configs.schema import ServeConfig
from remora.deployments.autoscaling.facts import Targets
from remora.deployments.autoscaling.options import policy_targets, scaling_options


def make_config(autoscaling: dict[str, Any], **sections: Any) -> ServeConfig:
    return ServeConfig.model_validate(
        {"model": {"path": "x"}, "autoscaling": autoscaling, **sections}
    )


def test_without_a_maximum_the_number_is_fixed() -> None:
    config = make_config({}, parallel={"num_replicas": 3})
    assert scaling_options(config) == {"num_replicas": 3}


def test_serve_itself_waits_for_nothing() -> None:
    options = scaling_options(make_config({"max_replicas": 3}))["autoscaling_config"]

    assert (options.min_replicas, options.initial_replicas, options.max_replicas) == (1, None, 3)
    assert options.upscale_delay_s == options.downscale_delay_s == 0
    assert options.downscale_to_zero_delay_s == 0


@pytest.mark.observes("autoscaling.initial_replicas")
def test_serve_begins_with_as_many_as_configured() -> None:
    config = make_config({"max_replicas": 3, "initial_replicas": 2})
    assert scaling_options(config)["autoscaling_config"].initial_replicas == 2


@pytest.mark.parametrize("look_back_s", [0.1, 1.0, 10.0, 300.0])
def test_reports_come_often_enough_to_be_looked_back_at(look_back_s: float) -> None:
    config = make_config({"max_replicas": 3, "look_back_s": look_back_s})

    options = scaling_options(config)["autoscaling_config"]

    assert options.metrics_interval_s <= 1
    assert options.look_back_period_s >= 2 * options.metrics_interval_s


def test_the_policy_gets_every_target_of_the_section() -> None:
    section = {
        "max_replicas": 3,
        "target_requests": 7.0,
        "target_ttft_s": 1.5,
        "target_itl_s": 0.05,
        "target_kv_usage": 0.6,
        "look_back_s": 4.0,
        "upscale_delay_s": 1.0,
        "downscale_delay_s": 2.0,
        "to_zero_delay_s": 3.0,
    }
    assert Targets(**policy_targets(make_config(section))) == Targets(
        requests=7.0,
        ttft_s=1.5,
        itl_s=0.05,
        kv_usage=0.6,
        look_back_s=4.0,
        upscale_delay_s=1.0,
        downscale_delay_s=2.0,
        to_zero_delay_s=3.0,
    )


def test_a_replica_is_meant_for_three_quarters_of_what_it_can_run() -> None:
    config = make_config({"max_replicas": 3}, engine={"max_running_requests": 32})
    assert policy_targets(config)["requests"] == 24


def test_the_example_goes_from_none_to_three_by_latencies() -> None:
    path = Path(__file__).parents[3] / "configs" / "smollm2-autoscale.yaml"
    (application,) = yaml.safe_load(path.read_text(encoding="utf-8"))["applications"]

    options = scaling_options(parse_args(application["args"]))["autoscaling_config"]

    assert (options.min_replicas, options.max_replicas) == (0, 3)
    assert options.policy.policy_kwargs["ttft_s"] is not None
    assert options.policy.policy_kwargs["itl_s"] is not None
