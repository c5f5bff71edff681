"""The Serve options that set the number of replicas."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from remora.configs.planning.scheduling_plan import running_requests
from remora.configs.schema import ServeConfig

POLICY = "remora.deployments.autoscaling.slo_policy:SloPolicy"
# Default target, as a share of a replica's running requests; the rest is for bursts.
DEFAULT_SHARE = 0.75
# Reports within look_back_s, and the limits of their period.
REPORTS, MIN_REPORT_PERIOD_S, MAX_REPORT_PERIOD_S = 10, 0.2, 1.0


def scaling_options(config: ServeConfig) -> Mapping[str, Any]:
    """Return a fixed number of replicas, or the autoscaling configuration."""
    if not config.autoscaling.is_on:
        return {"num_replicas": config.parallel.num_replicas}
    return {"autoscaling_config": _autoscaling(config)}


def _autoscaling(config: ServeConfig) -> AutoscalingConfig:
    section = config.autoscaling
    targets = policy_targets(config)
    period_s = min(max(section.look_back_s / REPORTS, MIN_REPORT_PERIOD_S), MAX_REPORT_PERIOD_S)
    with warnings.catch_warnings():
        # Ray 2.60 deprecates metrics_interval_s for variables that it never reads.
        warnings.simplefilter("ignore", DeprecationWarning)
        return AutoscalingConfig(
            min_replicas=section.min_replicas,
            initial_replicas=section.initial_replicas,
            max_replicas=section.max_replicas or 1,
            target_ongoing_requests=targets["requests"],
            metrics_interval_s=period_s,
            look_back_period_s=max(section.look_back_s, 2 * period_s),
            # The policy has its own delays.
            upscale_delay_s=0.0,
            downscale_delay_s=0.0,
            downscale_to_zero_delay_s=0.0,
            policy=AutoscalingPolicy(policy_function=POLICY, policy_kwargs=targets),
        )


def policy_targets(config: ServeConfig) -> dict[str, Any]:
    """Return the keyword arguments of the policy."""
    section, (running, _) = config.autoscaling, running_requests(config.engine)
    return {
        "requests": section.target_requests or max(running * DEFAULT_SHARE, 1.0),
        "kv_usage": section.target_kv_usage,
        "ttft_s": section.target_ttft_s,
        "itl_s": section.target_itl_s,
        "look_back_s": section.look_back_s,
        "upscale_delay_s": section.upscale_delay_s,
        "downscale_delay_s": section.downscale_delay_s,
        "to_zero_delay_s": section.to_zero_delay_s,
    }
