"""`remora serve`: start a local Ray cluster, serve on it, and stop it at the end.

The configuration is validated before Ray starts. Then the driver runs below a supervisor
(`supervision/supervisor.py`), which ends every process of the server however the server ends.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from remora.configs.dialects.translate import State
from remora.configs.environment import cache_dir
from remora.configs.errors import RemoraError
from remora.configs.load import DEFAULT_HOST, DEFAULT_PORT, parse_models
from remora.configs.model_names import parse_model_name
from remora.configs.schema import BUILTIN_MODEL, ServeConfig
from remora.configs.secrets import read_callers_keys, read_keys
from remora.configs.serve_file import our_application
from remora.configs.value_sources import Override
from remora.deployments.cli.files import check_files
from remora.deployments.cli.haproxy import (
    HAPROXY_SWITCH,
    Proxy,
    choose_proxy,
    exposed_ports,
    haproxy_environment,
)
from remora.deployments.cli.haproxy_program import install_haproxy_program
from remora.deployments.cli.options import (
    Dialect,
    Settings,
    SkipUnsupported,
    Targets,
    read_overrides,
)
from remora.deployments.cli.ray_token import protect_ray_token
from remora.deployments.cli.root_cause import root_cause
from remora.deployments.cli.supervision.driver_link import DriverLink, Stopped
from remora.deployments.cli.supervision.early_stop import signals_end_the_process
from remora.deployments.cli.supervision.haproxy_watch import HaproxyWatch
from remora.deployments.cli.supervision.run_folder import RunFolder, remove_remains
from remora.deployments.cli.supervision.supervisor import run_supervised
from remora.deployments.cli.supervision.system_limits import check_open_files
from remora.deployments.cli.target import read_models, read_target
from remora.deployments.cli.terminal import Failure, answer, detail
from remora.deployments.gateway.build import uses_routing_service
from remora.deployments.ranks.cluster import check_room
from remora.deployments.ray_private import (
    cluster_pids,
    deploy,
    has_controller,
    longest_drain_s,
    missing_routing_hook,
    ray_logs,
    start_deleting,
)
from remora.deployments.routing.haproxy_hook import HOOK_SWITCH
from remora.deployments.serve_environment import ENVIRONMENT, WITHOUT_TRACEBACKS

POLL_S = 0.2
CONTROLLER_POLL_S = 2.0
# How often in a row the controller must be missing.
CONTROLLER_POLLS = 3
# Time that Serve needs to stop applications beyond the drain timeout of their replicas.
DRAIN_SLACK_S = 15.0


def serve(
    target: Targets = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65_535, help="Port to listen on.")] = None,
    model_name: Annotated[str | None, typer.Option(help="Model name in the API.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Data type of the weights.")] = None,
    settings: Settings = None,
    dialect: Dialect = None,
    skip_unsupported: SkipUnsupported = False,
    proxy: Annotated[
        Proxy | None,
        typer.Option(help="HTTP proxy in front of the replicas. Default: haproxy if available."),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show tracebacks, also of Ray's processes.")
    ] = False,
) -> None:
    """Serve models over HTTP until Ctrl-C."""
    with signals_end_the_process():
        tokens = target or []
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)  # Ray reads these when it is first imported
        given = {"model.served_name": model_name, "model.dtype": dtype}
        options = [f"{key}={value}" for key, value in given.items() if value is not None]
        overrides = read_overrides([*options, *(settings or ())])
        raw = serve_config(
            tokens,
            host=host,
            port=port,
            overrides=overrides,
            dialect=dialect,
            skips=skip_unsupported,
        )
        if not any("runtime_env" in application for application in raw["applications"]):
            models = read_models(tokens, dialect, overrides, skips=skip_unsupported)
            check_files(models, tokens[0] if tokens else "")
        http = raw["http_options"]
        for line in remove_remains():
            answer(line)
        check_port(http["host"], http["port"])
        chosen = choose_proxy(proxy, http["host"])
        check_open_files(has_haproxy=chosen is Proxy.HAPROXY)
        code = run_supervised(
            lambda folder, link: _drive(raw, chosen, folder, link, is_verbose=verbose),
            address=f"{http['host']}:{http['port']}",
        )
    raise typer.Exit(code)


def _drive(
    raw: dict[str, Any], proxy: Proxy, folder: RunFolder, link: DriverLink, *, is_verbose: bool
) -> int:
    """Run the server and return the exit code. Raises Failure, ConfigError, Stopped."""
    os.environ.update(folder.environment(os.environ))
    for name, value in () if is_verbose else WITHOUT_TRACEBACKS.items():
        os.environ.setdefault(name, value)
    _fetch_models(raw)
    protect_ray_token(os.environ)
    watch: AbstractContextManager[None] = nullcontext()
    if proxy is Proxy.HAPROXY:
        os.environ.update({**haproxy_environment(folder.path), **os.environ})
        body_timeout_s = _configs(raw)[0].limits.body_timeout_s
        host = raw["http_options"]["host"]
        binary = install_haproxy_program(folder.path, host=host, body_timeout_s=body_timeout_s)
        watch = HaproxyWatch(folder.path, binary)
    os.environ[HAPROXY_SWITCH] = str(int(proxy is Proxy.HAPROXY))
    with watch:
        link.starting()
        if proxy is Proxy.HAPROXY:
            check_routing_hook(_configs(raw))
        try:
            _start(raw, link)
        except Failure as failure:
            if is_verbose and failure.details:
                detail(failure.details)
            raise
        try:
            _watch_controller()
        except Stopped:
            _drain(raw, link)
    return 0


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


def _fetch_models(raw: dict[str, Any]) -> None:
    """Write built-in and remote models to the cache here, where a terminal shows the progress.

    Raises ConfigError.
    """
    if "runtime_env" in our_application(raw):  # replicas have another environment and cache
        return
    for config in _configs(raw):
        path, draft = config.model.path, config.speculation.draft_model
        if any(name is not None and _is_remote(name) for name in (path, draft)):
            from remora.engine.models.locate import locate_draft, locate_model

            locate_model(config.model, show_progress=True)
            locate_draft(config, show_progress=True)
        elif path.lower() == BUILTIN_MODEL and not (
            (cache_dir() / BUILTIN_MODEL / "config.json").is_file()
        ):
            from remora.engine.weights.resolve_model import resolve_model

            resolve_model(BUILTIN_MODEL, cache_dir())


def _is_remote(name: str) -> bool:
    return parse_model_name(name) is not None and not Path(name).expanduser().exists()


def serve_config(
    target: Sequence[str],
    *,
    host: str | None = None,
    port: int | None = None,
    overrides: Sequence[Override] = (),
    dialect: str | None = None,
    skips: bool = False,
) -> dict[str, Any]:
    """Return the Serve config of a file, a model or another server's command line.

    overrides:  values that take precedence over the target's
    skips:      whether another server's parameters that are refused are left out
    Raises ConfigError, Failure.
    """
    raw, lines = read_target(target, dialect, overrides, skips=skips)
    for line in lines:
        if line.state is not State.EXACT:
            answer(str(line))
    application = our_application(raw)
    # Check keys before Ray starts, so that a fault is reported at once. Replicas read them again.
    config = next(iter(parse_models(application["args"]).values()))
    read_callers_keys(config)
    if config.api.admin_api_key is not None:
        read_keys(config.api.admin_api_key, "api.admin_api_key")
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


def _start(raw: dict[str, Any], link: DriverLink) -> None:
    """Start Ray and Serve, deploy, and wait until the server is ready. Raises Failure."""
    started = time.monotonic()
    dashboard = _start_ray(raw, link)
    _wait_until_running(_names(raw))
    link.ready()
    http = raw["http_options"]
    host = "127.0.0.1" if http["host"] in ("0.0.0.0", "::") else http["host"]
    answer(
        f"ready in {time.monotonic() - started:.1f} s: http://{host}:{http['port']}/v1 "
        f"(OpenAI), /generate (SGLang), /docs, /metrics. Ctrl-C stops the server."
    )
    answer(
        "to apply a changed configuration: "
        f"RAY_AUTH_MODE=token serve deploy -a http://{dashboard} FILE"
    )
    if os.environ[HAPROXY_SWITCH] == "1":
        answer(exposed_ports(os.environ, http["host"]))


def _start_ray(raw: dict[str, Any], link: DriverLink) -> str:
    """Start Ray and Serve, deploy, and return the address of Ray's dashboard.

    Raises Failure if they do not start, ConfigError if the machine cannot hold the replicas.
    """
    import ray
    from ray import serve as ray_serve
    from ray.serve.config import HTTPOptions
    from ray.serve.schema import ServeDeploySchema

    part = "Ray"
    try:
        with _watched_cluster(link):
            context = ray.init(
                address="local",
                namespace="serve",
                dashboard_host="127.0.0.1",
                log_to_driver=True,
                logging_level="warning",
            )
        for config in _configs(raw):
            check_room(config)
        part = "Serve"
        ray_serve.start(
            http_options=HTTPOptions(**raw["http_options"]),
            proxy_location=raw.get("proxy_location", "HeadOnly"),
            logging_config=raw["logging_config"],
        )
        deploy(ServeDeploySchema.model_validate(raw))
    except RemoraError:
        raise
    except Exception as error:
        reason, logs = root_cause(str(error)) or type(error).__name__, ray_logs()
        raise Failure(
            f"{part} did not start: {reason}" + (f"; its logs are in {logs}" if logs else ""),
            details=traceback.format_exc(),
        ) from error
    return str(context.dashboard_url)


@contextmanager
def _watched_cluster(link: DriverLink) -> Iterator[None]:
    """Name Ray's processes to the supervisor as soon as they run: `ray.init` may wait for them."""
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(POLL_S):
            link.watch(cluster_pids())

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield
    finally:
        is_over.set()
        watching.join()
    link.watch(cluster_pids())


def _watch_controller() -> None:
    """Raise Failure once Serve's controller has ended for good; Stopped after a signal."""
    num_missing = 0
    while num_missing < CONTROLLER_POLLS:
        time.sleep(CONTROLLER_POLL_S)
        num_missing = 0 if has_controller() else num_missing + 1
    raise Failure("Serve's controller has ended, and Ray does not restart it")


def _wait_until_running(names: list[str]) -> None:
    from ray import serve as ray_serve

    while True:
        statuses = {name: ray_serve.status().applications.get(name) for name in names}
        for name, status in statuses.items():
            if status is not None and status.status in ("DEPLOY_FAILED", "UNHEALTHY"):
                reason = root_cause(status.message) or status.status
                raise Failure(f"{name} did not start: {reason}", details=status.message)
        if all(status is not None and status.status == "RUNNING" for status in statuses.values()):
            return
        time.sleep(POLL_S)


def _drain(raw: dict[str, Any], link: DriverLink) -> None:
    """Stop the replicas while the proxy still delivers their remaining output."""
    from ray import serve as ray_serve
    from ray.serve.exceptions import RayServeException

    names = set(_names(raw))
    with suppress(RayServeException):
        link.draining(longest_drain_s() + DRAIN_SLACK_S)
        for name in names:
            start_deleting(name)
        # Serve's own wait is shorter than the drain timeout of the replicas.
        while names & ray_serve.status().applications.keys():
            time.sleep(POLL_S)


def _names(raw: dict[str, Any]) -> list[str]:
    return [application.get("name", "default") for application in raw["applications"]]
