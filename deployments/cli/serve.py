"""`remora serve`: start a local Ray cluster, serve on it, and stop it at the end.

The configuration is validated before Ray starts. Then the driver runs below a supervisor
(`supervision/supervisor.py`), which ends every process of the server however the server ends.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from remora.configs.dialects.translate import State
from remora.configs.environment import cache_dir
from remora.configs.errors import ConfigError, RemoraError
from remora.configs.load import DEFAULT_HOST, DEFAULT_PORT, parse_models
from remora.configs.model_names import parse_model_name
from remora.configs.multiple_models import deployment_names
from remora.configs.schema import BUILTIN_MODEL, ServeConfig
from remora.configs.secrets import read_callers_keys, read_keys
from remora.configs.serve_file import our_application
from remora.configs.value_sources import Override
from remora.deployments.cli.files import check_files
from remora.deployments.cli.haproxy.certificates import renew_certificates
from remora.deployments.cli.haproxy.choice import (
    HAPROXY_SWITCH,
    Proxy,
    choose_proxy,
    exposed_ports,
    haproxy_environment,
)
from remora.deployments.cli.haproxy.program import install_haproxy_program
from remora.deployments.cli.haproxy.watch import HaproxyWatch
from remora.deployments.cli.options import (
    Dialect,
    Settings,
    SkipUnsupported,
    Targets,
    read_overrides,
)
from remora.deployments.cli.ray_token import protect_ray_token
from remora.deployments.cli.root_cause import root_cause
from remora.deployments.cli.startup.address import bound, ready_line
from remora.deployments.cli.startup.local_command import serve_locally
from remora.deployments.cli.startup.model_check import check_models
from remora.deployments.cli.startup.progress import Progress
from remora.deployments.cli.supervision.driver_link import DriverLink, Stopped
from remora.deployments.cli.supervision.early_stop import signals_end_the_process
from remora.deployments.cli.supervision.run_folder import RunFolder, remove_remains
from remora.deployments.cli.supervision.supervisor import run_supervised
from remora.deployments.cli.supervision.system_limits import check_open_files
from remora.deployments.cli.target import Target, names_model, read_target
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
from remora.deployments.serve_context import BANNER_SWITCH, banner_of
from remora.deployments.serve_environment import (
    ENVIRONMENT,
    PLAIN_PREFIXES,
    WITHOUT_TRACEBACKS,
)
from remora.deployments.tls import CERTIFICATE, KEY, Renewal, Tls
from remora.deployments.tls import KEYS as TLS_KEYS

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
    local: Annotated[
        bool,
        typer.Option("--local", help="Serve one model in this process, without Ray and replicas."),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show tracebacks, also of Ray's processes.")
    ] = False,
) -> None:
    """Serve models over HTTP until Ctrl-C. Without a target: the built-in model."""
    with signals_end_the_process():
        tokens = target or []
        for name, value in () if local else ENVIRONMENT.items():
            os.environ.setdefault(name, value)  # Ray reads these when it is first imported
        given = {"model.served_name": model_name, "model.dtype": dtype}
        options = [f"{key}={value}" for key, value in given.items() if value is not None]
        overrides = read_overrides([*options, *(settings or ())])
        if not tokens and dialect is None:
            tokens = [BUILTIN_MODEL]
            if not names_model(overrides):
                answer(f"no target given: serving the built-in model {BUILTIN_MODEL}")
        read = read_target(tokens, dialect, overrides, skips=skip_unsupported, for_ray=not local)
        raw = to_deploy(read, host=host, port=port)
        if not any("runtime_env" in application for application in raw["applications"]):
            check_files(read.models, tokens[0] if tokens else "")
        http = raw["http_options"]
        if local:
            raise typer.Exit(serve_locally(raw, proxy, is_verbose=verbose))
        for line in remove_remains():
            answer(line)
        bound(http["host"], http["port"]).close()  # raises Failure if it is taken
        chosen = choose_proxy(proxy, http["host"])
        tls = tls_of(raw, chosen)
        check_open_files(has_haproxy=chosen is Proxy.HAPROXY)
        code = run_supervised(
            lambda folder, link: _drive(raw, chosen, folder, link, tls=tls, is_verbose=verbose),
            address=f"{http['host']}:{http['port']}",
        )
    raise typer.Exit(code)


def tls_of(raw: dict[str, Any], proxy: Proxy) -> Tls | None:
    """Return the files for HTTPS; take them out of Serve's options where HAProxy has them.

    Serve would make replicas, to which HAProxy speaks plain HTTP, use them. Raises ConfigError.
    """
    http = raw["http_options"]
    tls = Tls.of(http)
    if proxy is Proxy.HAPROXY:
        raw["http_options"] = {name: http[name] for name in http.keys() - TLS_KEYS}
    elif tls is not None and tls.authorities is not None:
        raise ConfigError(
            "http_options.ssl_ca_certs: Serve's Python proxy does not check certificates of "
            "clients; use --proxy haproxy"
        )
    elif tls is not None:  # Serve's proxy has another working directory
        http |= {CERTIFICATE: str(tls.certificate), KEY: str(tls.key)}
    return tls


def _drive(
    raw: dict[str, Any],
    proxy: Proxy,
    folder: RunFolder,
    link: DriverLink,
    *,
    tls: Tls | None = None,
    is_verbose: bool,
) -> int:
    """Run the server and return the exit code. Raises Failure, ConfigError, Stopped."""
    os.environ.update(folder.environment(os.environ))
    for name, value in () if is_verbose else WITHOUT_TRACEBACKS.items():
        os.environ.setdefault(name, value)
    os.environ[BANNER_SWITCH] = "1"
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        os.environ.setdefault(*PLAIN_PREFIXES)
    try:
        _prepare_models(raw)
        return _run_on_ray(raw, proxy, folder, link, tls)
    except Failure as failure:
        if is_verbose and failure.details:
            detail(failure.details)
        raise


def _run_on_ray(
    raw: dict[str, Any], proxy: Proxy, folder: RunFolder, link: DriverLink, tls: Tls | None
) -> int:
    """Start Ray and the applications, and wait for the end."""
    protect_ray_token(os.environ)
    watch: AbstractContextManager[None] = nullcontext()
    renewal = None
    if proxy is Proxy.HAPROXY:
        os.environ.update({**haproxy_environment(folder.path), **os.environ})
        body_timeout_s = _configs(raw)[0].limits.body_timeout_s
        host = raw["http_options"]["host"]
        binary = install_haproxy_program(
            folder.path, host=host, body_timeout_s=body_timeout_s, tls=tls
        )
        if tls is not None:
            renewal = Renewal(tls, partial(renew_certificates, folder.path, tls), answer)
        watch = HaproxyWatch(folder.path, binary)
    os.environ[HAPROXY_SWITCH] = str(int(proxy is Proxy.HAPROXY))
    with watch:
        link.starting()
        if proxy is Proxy.HAPROXY:
            check_routing_hook(_configs(raw))
        _start(raw, link, is_https=tls is not None)
        try:
            _watch_controller(renewal)
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


def _prepare_models(raw: dict[str, Any]) -> None:
    """Download the models, and check that they can be served. Raises ConfigError, Failure."""
    application = our_application(raw)
    if "runtime_env" in application:  # replicas have another environment and cache
        return
    _fetch_models(raw)
    with Progress() as progress:
        progress.phase("checking the model")
        check_models(application["args"])


def _fetch_models(raw: dict[str, Any]) -> None:
    """Write built-in and remote models to the cache here, where a terminal shows the progress.

    Raises ConfigError.
    """
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
) -> dict[str, Any]:
    """Return the Serve config of a file, a model or another server's command line.

    overrides:  values that take precedence over the target's
    Raises ConfigError, Failure.
    """
    return to_deploy(read_target(target, dialect, overrides), host=host, port=port)


def to_deploy(read: Target, *, host: str | None, port: int | None) -> dict[str, Any]:
    """Return the Serve config of a target, and say what of it is not exact.

    host, port:  instead of the target's
    Raises ConfigError, Failure.
    """
    raw = read.raw
    for line in read.lines:
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


def _start(raw: dict[str, Any], link: DriverLink, *, is_https: bool) -> None:
    """Start Ray and Serve, deploy, and wait until the server is ready. Raises Failure."""
    started = time.monotonic()
    with Progress() as progress:
        dashboard = _start_ray(raw, link, progress)
        progress.phase("loading the model")
        _wait_until_running(_names(raw))
    _show_banners(raw)
    link.ready()
    http = raw["http_options"]
    seconds = time.monotonic() - started
    answer(ready_line(seconds, http["host"], http["port"], is_https=is_https))
    answer(
        "to apply a changed configuration: "
        f"RAY_AUTH_MODE=token serve deploy -a http://{dashboard} FILE"
    )
    if os.environ[HAPROXY_SWITCH] == "1":
        answer(exposed_ports(os.environ, http["host"]))


def _start_ray(raw: dict[str, Any], link: DriverLink, progress: Progress) -> str:
    """Start Ray and Serve, deploy, and return the address of Ray's dashboard.

    Raises Failure if they do not start, ConfigError if the machine cannot hold the replicas.
    """
    import ray
    from ray import serve as ray_serve
    from ray.serve.config import HTTPOptions
    from ray.serve.schema import ServeDeploySchema

    part = "Ray"
    progress.phase("starting Ray")
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
        progress.phase("starting Serve")
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


def _watch_controller(renewal: Renewal | None) -> None:
    """Raise Failure once Serve's controller has ended for good; Stopped after a signal."""
    num_missing = 0
    while num_missing < CONTROLLER_POLLS:
        time.sleep(CONTROLLER_POLL_S)
        if renewal is not None:
            renewal.look()
        num_missing = 0 if has_controller() else num_missing + 1
    raise Failure("Serve's controller has ended, and Ray does not restart it")


def _wait_until_running(names: list[str]) -> None:
    from ray import serve as ray_serve
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    while True:
        try:
            known = ray_serve.status().applications
        except (RayError, RayServeException) as error:
            reason = root_cause(str(error)) or type(error).__name__
            details = traceback.format_exc()
            raise Failure(f"Serve did not start: {reason}", details=details) from None
        statuses = {name: known.get(name) for name in names}
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


def _show_banners(raw: dict[str, Any]) -> None:
    """Write the banner of each model that has a replica."""
    application = our_application(raw)
    for deployment in deployment_names(tuple(parse_models(application["args"]))).values():
        banner = banner_of(application.get("name", "default"), deployment)
        if banner is not None:
            answer(banner)


def _names(raw: dict[str, Any]) -> list[str]:
    return [application.get("name", "default") for application in raw["applications"]]
