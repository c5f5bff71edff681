"""`remora serve`: start a local Ray cluster, serve on it, and stop it at the end.

The configuration is validated before Ray starts. Ctrl-C or SIGTERM drains running requests and then
stops every process that this command started; a second signal kills them at once.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from types import FrameType
from typing import Annotated, Any

import typer

from remora.configs.dialects.translate import State
from remora.configs.environment import cache_dir
from remora.configs.load import DEFAULT_HOST, DEFAULT_PORT, parse_models
from remora.configs.multiple_models import split_models
from remora.configs.schema import BUILTIN_MODEL, ServeConfig
from remora.configs.secrets import read_keys
from remora.configs.serve_file import our_application
from remora.configs.value_sources import Override
from remora.deployments.cli.files import check_files
from remora.deployments.cli.haproxy import (
    HAPROXY_SWITCH,
    Proxy,
    choose_proxy,
    exposed_ports,
    haproxy_environment,
    own_folder,
)
from remora.deployments.cli.haproxy_program import install_haproxy_program
from remora.deployments.cli.log_filters import drop_ray_output
from remora.deployments.cli.options import Dialect, Settings, Targets, read_overrides
from remora.deployments.cli.processes import children, kill, shut_down
from remora.deployments.cli.target import read_models, read_target
from remora.deployments.cli.terminal import Failure, answer
from remora.deployments.gateway.build import uses_routing_service
from remora.deployments.ranks.cluster import check_room
from remora.deployments.ray_private import deploy, missing_routing_hook, start_deleting
from remora.deployments.routing.haproxy_hook import HOOK_SWITCH
from remora.deployments.serve_environment import ENVIRONMENT

POLL_S = 0.2


class _Stopped(BaseException):
    """A stop signal arrived. A BaseException, because Ray catches Exception broadly."""


def serve(
    target: Targets = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65_535, help="Port to listen on.")] = None,
    model_name: Annotated[str | None, typer.Option(help="Model name in the API.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Data type of the weights.")] = None,
    settings: Settings = None,
    dialect: Dialect = None,
    proxy: Annotated[
        Proxy | None,
        typer.Option(help="HTTP proxy in front of the replicas. Default: haproxy if available."),
    ] = None,
) -> None:
    """Serve models over HTTP until Ctrl-C."""
    tokens = target or []
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)  # Ray reads these when it is first imported
    given = {"model.served_name": model_name, "model.dtype": dtype}
    options = [f"{key}={value}" for key, value in given.items() if value is not None]
    overrides = read_overrides([*options, *(settings or ())])
    raw = serve_config(tokens, host=host, port=port, overrides=overrides, dialect=dialect)
    if not any("runtime_env" in application for application in raw["applications"]):
        check_files(read_models(tokens, dialect, overrides), tokens[0] if tokens else "")
    http = raw["http_options"]
    check_port(http["host"], http["port"])
    proxy = choose_proxy(proxy, http["host"])
    signals = _Signals()
    _write_built_in_model(raw)
    with own_folder() as folder, ExitStack() as ending:
        if proxy is Proxy.HAPROXY:
            os.environ.update({**haproxy_environment(folder), **os.environ})
            install_haproxy_program(folder, body_timeout_s=_configs(raw)[0].limits.body_timeout_s)
        os.environ[HAPROXY_SWITCH] = str(int(proxy is Proxy.HAPROXY))
        if proxy is Proxy.HAPROXY:
            check_routing_hook(_configs(raw))
        try:
            _run(raw, signals)
        except _Stopped:
            _drain(raw)
            ending.enter_context(drop_ray_output())
        finally:
            shut_down()


def _configs(raw: dict[str, Any]) -> list[ServeConfig]:
    return list(parse_models(our_application(raw)["args"]).values())


def check_routing_hook(configs: list[ServeConfig]) -> None:
    """Warn if tokens pass through a gateway only because this version of Ray lacks a hook."""
    if uses_routing_service(configs, haproxy_asks=os.environ[HOOK_SWITCH] == "1"):
        lacking = missing_routing_hook()  # imports Ray
        if lacking is not None:
            answer(
                f"warning: this version of Ray has no {lacking}, so HAProxy cannot query the "
                "routing service; requests and tokens pass through a gateway instead"
            )


def _write_built_in_model(raw: dict[str, Any]) -> None:
    """Write the built-in model to the cache here, where a terminal can show the progress."""
    paths = [args["model"]["path"] for args in split_models(our_application(raw)["args"])]
    if (
        any(path.lower() == BUILTIN_MODEL for path in paths)
        and not (cache_dir() / BUILTIN_MODEL / "config.json").is_file()
    ):
        from remora.engine.weights.resolve_model import resolve_model

        resolve_model(BUILTIN_MODEL, cache_dir())


def serve_config(
    target: Sequence[str],
    *,
    host: str | None = None,
    port: int | None = None,
    overrides: Sequence[Override] = (),
    dialect: str | None = None,
) -> dict[str, Any]:
    """Return the Serve config of a file, a model or another server's command line.

    overrides:  values that take precedence over the target's
    Raises ConfigError, Failure.
    """
    raw, lines = read_target(target, dialect, overrides)
    for line in lines:
        if line.state is not State.EXACT:
            answer(str(line))
    application = our_application(raw)
    # Check keys before Ray starts, so that a fault is reported at once. Replicas read them again.
    api = next(iter(parse_models(application["args"]).values())).api
    for key, reference in (("api_key", api.api_key), ("admin_api_key", api.admin_api_key)):
        if reference is not None:
            read_keys(reference, f"api.{key}")
    _set_log_levels(raw)
    http = {"host": DEFAULT_HOST, "port": DEFAULT_PORT, **(raw.get("http_options") or {})}
    raw["http_options"] = http | {
        key: value for key, value in (("host", host), ("port", port)) if value is not None
    }
    return raw


def _set_log_levels(raw: dict[str, Any]) -> None:
    """Turn off Serve's info and access logs, unless the file configures them."""
    raw.setdefault("logging_config", {"log_level": "WARNING"})
    for application in raw["applications"]:
        application.setdefault("logging_config", {"log_level": "INFO", "enable_access_log": False})


def check_port(host: str, port: int) -> None:
    """Raise Failure if the address cannot be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            reason = error.strerror or str(error)
            message = f"cannot listen on {host}:{port}: {reason}; choose another with --port"
            raise Failure(message) from None


class _Signals:
    """Handle SIGINT and SIGTERM: the first raises _Stopped, the second kills all processes.

    The first signal is deferred while Ray starts: an exception during startup makes Ray crash.
    """

    def __init__(self) -> None:
        self._is_starting = True
        self._is_wanted = False
        self._started: list[Any] = []
        self.catch()

    def catch(self) -> None:
        """Install the handlers. Call this again after `ray.init`, which installs its own."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._is_wanted:
            kill(self._started + children())
            os._exit(128 + number)
        self._is_wanted = True
        # List them now: orphans of processes that end later are not found as descendants.
        self._started = children()
        if not self._is_starting:
            raise _Stopped

    def end_of_start(self) -> None:
        """Let signals interrupt from now on. Raises _Stopped if one has arrived already."""
        self._is_starting = False
        if self._is_wanted:
            raise _Stopped


def _run(raw: dict[str, Any], signals: _Signals) -> None:
    """Start Ray and Serve, deploy, and wait for a signal. Raises Failure, _Stopped."""
    import ray
    from ray import serve as ray_serve
    from ray.serve.config import HTTPOptions
    from ray.serve.schema import ServeDeploySchema

    started = time.monotonic()
    context = ray.init(
        address="local",
        namespace="serve",
        dashboard_host="127.0.0.1",
        log_to_driver=True,
        logging_level="warning",
    )
    signals.catch()
    for config in parse_models(our_application(raw)["args"]).values():
        check_room(config)
    http = raw["http_options"]
    ray_serve.start(
        http_options=HTTPOptions(**http),
        proxy_location=raw.get("proxy_location", "HeadOnly"),
        logging_config=raw["logging_config"],
    )
    deploy(ServeDeploySchema.model_validate(raw))
    signals.end_of_start()
    _wait_until_running(_names(raw))
    host = "127.0.0.1" if http["host"] in ("0.0.0.0", "::") else http["host"]
    answer(
        f"ready in {time.monotonic() - started:.1f} s: http://{host}:{http['port']}/v1 "
        f"(OpenAI), /generate (SGLang), /docs, /metrics. Ctrl-C stops the server."
    )
    answer(
        "to apply a changed configuration: "
        f"RAY_AUTH_MODE=token serve deploy -a http://{context.dashboard_url} FILE"
    )
    if os.environ[HAPROXY_SWITCH] == "1":
        answer(exposed_ports(os.environ, http["host"]))
    while True:
        signal.pause()


def _wait_until_running(names: list[str]) -> None:
    from ray import serve as ray_serve

    while True:
        statuses = {name: ray_serve.status().applications.get(name) for name in names}
        for name, status in statuses.items():
            if status is not None and status.status in ("DEPLOY_FAILED", "UNHEALTHY"):
                raise Failure(f"{name} did not start: {_reason(status.message)}")
        if all(status is not None and status.status == "RUNNING" for status in statuses.values()):
            return
        time.sleep(POLL_S)


def _reason(message: str) -> str:
    """Return the last line of a traceback that names an error, or the whole message."""
    errors = [line for line in message.splitlines() if "Error: " in line or "Error(" in line]
    return errors[-1].strip() if errors else message.strip()


def _drain(raw: dict[str, Any]) -> None:
    """Stop the replicas while the proxy still delivers their remaining output."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return
    from ray import serve as ray_serve
    from ray.serve.exceptions import RayServeException

    answer("stopping: waiting for running requests to finish; press Ctrl-C again to stop now")
    names = set(_names(raw))
    with suppress(RayServeException):  # Serve itself may not have started yet
        for name in names:
            start_deleting(name)
        # Serve's own wait is shorter than the drain timeout of the replicas.
        while names & ray_serve.status().applications.keys():
            time.sleep(POLL_S)


def _names(raw: dict[str, Any]) -> list[str]:
    return [application.get("name", "default") for application in raw["applications"]]
