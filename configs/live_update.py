"""The keys that may change while a replica runs, through `user_config`.

`user_config` has the sections and keys of `args` and overrides them. Only the keys listed here are
allowed: the others are fixed when an engine starts. Knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from remora.configs.errors import ConfigError
from remora.configs.schema import ServeConfig
from remora.configs.sections.limits import LimitsSection
from remora.configs.sections.sampling import SamplingSection
from remora.configs.validation_messages import Locate, shown

# Deployments with a user_config. Gateway and RoutingService exist in some configurations only.
DEPLOYMENT = "LLMServer"
GATEWAY = "Gateway"
ROUTING_SERVICE = "RoutingService"
MANAGER = "LoRAManager"
# The engine has them from its start.
_FIXED_LIMITS = ("waiting_timeout_s", "running_timeout_s")
IN_PLACE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "sampling": tuple(SamplingSection.model_fields),
        "limits": tuple(key for key in LimitsSection.model_fields if key not in _FIXED_LIMITS),
        "engine": ("max_queued_requests", "max_queued_tokens", "queue_timeout_s"),
        "grammar": ("first_token_ids", "token_healing"),
        "api": (
            "unknown_fields",
            "max_body_bytes",
            "request_timeout_s",
            "max_concurrent_requests",
            "wait_when_busy",
            "api_key",
            "admin_api_key",
            "playground",
            "docs",
            "reasoning_field",
            "template_variables",
            "reasoning_efforts",
            "stream_text",
            "stream_interval_tokens",
            "chunk_per_token",
            "stream_usage",
            "request_metrics",
            "tokens_as_ids",
            "system_fingerprint",
            "null_fields",
            "any_model_name",
            "prompt_truncation",
            "prompt_logprobs",
            "generation",
        ),
        "metrics": (
            "log_level",
            "access_log_level",
            "access_log_skip",
            "log_requests",
            "log_responses",
            "log_clip_chars",
            "log_request_times",
        ),
    }
)


def with_user_config(
    args: Mapping[str, Any],
    user_config: Mapping[str, Any] | None,
    locate: Locate = lambda _path, _at_key: "",
) -> dict[str, Any]:
    """Return `args` overridden by `user_config`; neither is validated.

    locate:  path within `user_config` -> its place in a file
    Raises ConfigError for keys that need a restart, one line each.
    """
    merged = dict(args)
    refused = []
    for section, values in (user_config or {}).items():
        if not isinstance(values, Mapping) or section not in ServeConfig.model_fields:
            merged[section] = values  # validation reports what is wrong with it
            continue
        known = ServeConfig.model_fields[section].annotation
        fixed = set(getattr(known, "model_fields", ())) - set(IN_PLACE.get(section, ()))
        refused += [
            f"{locate((section, key), True)}user_config: {section}.{key} = {shown(value)}: cannot "
            "change while a replica runs; set it in args, and Serve replaces the replicas one by "
            "one"
            for key, value in values.items()
            if key in fixed
        ]
        below = merged.get(section)
        merged[section] = {**(below if isinstance(below, Mapping) else {}), **values}
    if refused:
        raise ConfigError("\n".join(refused))
    return merged
