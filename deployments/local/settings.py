"""What of a Serve config a server without Ray applies; what needs Ray is refused by name.

Knows configurations. A policy of `routing` is no fault: with one replica, every policy selects it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from remora.configs.errors import ConfigError
from remora.configs.load import IMPORT_PATH, parse_models
from remora.configs.schema import ServeConfig
from remora.configs.serve_file import our_application
from remora.configs.validation_messages import shown
from remora.deployments import tls

_FILE_KEYS = frozenset({"applications", "http_options", "proxy_location", "logging_config"})
_APPLICATION_KEYS = frozenset({"name", "route_prefix", "import_path", "args", "logging_config"})
_HTTP_KEYS = frozenset({"host", "port", "root_path", "keep_alive_timeout_s"}) | tls.KEYS
# Reservations and ranks of `parallel`, which Ray makes; micro_batches and others need ranks.
_PARALLEL_KEYS = (
    *("num_replicas", "tp_size", "pp_size"),
    *("cpus_per_rank", "memory_per_rank", "accelerator_type", "label_selector"),
)
DEFAULT_KEEP_ALIVE_S = 90.0  # as Serve's


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSettings:
    """The server in one process.

    args:          of the application, for the replica
    root_path:     prefix that a proxy in front removes
    keep_alive_s:  after which an idle connection is closed
    tls:           None = plain HTTP
    """

    args: Mapping[str, Any]
    config: ServeConfig
    host: str
    port: int
    root_path: str = ""
    keep_alive_s: float = DEFAULT_KEEP_ALIVE_S
    tls: tls.Tls | None = None

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Self:
        """Return the settings of a Serve config. Raises ConfigError: a line for each that is not
        possible without Ray.
        """
        application = our_application(dict(raw))
        models = list(parse_models(application["args"]).values())
        faults = [*_of_serve(raw, application), *_of_models(models)]
        if faults:
            lines = [f"{key} = {found}: {reason}" for key, found, reason in faults]
            raise ConfigError("\n".join(f"--local: {line}" for line in lines))
        http = raw["http_options"]
        return cls(
            args=application["args"],
            config=models[0],
            host=http["host"],
            port=http["port"],
            root_path=http.get("root_path") or "",
            keep_alive_s=http.get("keep_alive_timeout_s") or DEFAULT_KEEP_ALIVE_S,
            tls=tls.Tls.of(http),
        )


def _of_serve(
    raw: Mapping[str, Any], application: Mapping[str, Any]
) -> Iterator[tuple[str, str, str]]:
    """Yield key, value and reason of what the file sets for Ray Serve."""
    others = [app["import_path"] for app in raw["applications"] if app is not application]
    if others:
        reason = f"one process serves one application, {IMPORT_PATH}; start without --local"
        yield "applications", shown(others[0]), reason
    if application.get("route_prefix", "/") != "/":
        reason = "the only application is at /; set http_options.root_path, or start without it"
        yield "route_prefix", shown(application["route_prefix"]), reason
    parts = (
        ("", raw, _FILE_KEYS),
        ("applications.", application, _APPLICATION_KEYS),
        ("http_options.", raw["http_options"], _HTTP_KEYS),
    )
    for prefix, keys, allowed in parts:
        for key in sorted(keys.keys() - allowed):
            if keys[key] not in (None, {}, []):
                yield f"{prefix}{key}", shown(keys[key]), "an option of Ray Serve; remove it"


def _of_models(models: list[ServeConfig]) -> Iterator[tuple[str, str, str]]:
    """Yield key, value and reason of what needs several processes, or Ray."""
    if len(models) > 1:
        reason = "several models need a gateway; start without --local"
        yield "models", f"{len(models)} models", reason
    for config in models:
        defaults = type(config.parallel).model_fields
        for key in _PARALLEL_KEYS:
            found = getattr(config.parallel, key)
            if found != defaults[key].get_default(call_default_factory=True):
                reason = "needs Ray; remove it, or start without --local"
                yield f"parallel.{key}", shown(found), reason
        if config.autoscaling.is_on:
            found = shown(config.autoscaling.max_replicas)
            yield "autoscaling.max_replicas", found, "one process is one replica; remove it"
        if config.routing.gateway == "on":
            yield "routing.gateway", "on", "a gateway needs Ray; set it to auto"
        if config.routing.resume_on_failure:
            yield "routing.resume_on_failure", "true", "needs a second replica; set it to false"
        if config.lora.dynamic:
            reason = (
                "the LoRA manager needs Ray; list the adapters in lora.adapters, and set it to "
                "false"
            )
            yield "lora.dynamic", "true", reason
