"""`remora ps`: what runs on a Ray cluster, from the status that Serve's dashboard reports."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from remora.configs.dialects.resolve import resolve
from remora.configs.errors import ConfigError
from remora.configs.live_update import DEPLOYMENT
from remora.configs.load import IMPORT_PATH, parse_models
from remora.configs.multiple_models import deployment_names
from remora.configs.schema import ServeConfig
from remora.deployments.cli.models.listing import show_table
from remora.deployments.cli.terminal import Failure, answer

DEFAULT_DASHBOARD = "http://127.0.0.1:8265"
_HEADINGS = ("APPLICATION", "STATUS", "MODEL", "FROM", "REPLICAS", "LOAD")
_TIMEOUT_S = 10.0


def ps(
    dashboard: Annotated[
        str, typer.Option(envvar="RAY_DASHBOARD_ADDRESS", help="Address of Ray's dashboard.")
    ] = DEFAULT_DASHBOARD,
) -> None:
    """Show the running applications: models, replicas and their open requests."""
    details = _status(dashboard.rstrip("/"))
    applications = details.get("applications") or {}
    if not applications:
        answer(f"Serve at {dashboard} runs no application; start one with `remora serve`")
        return
    load = partial(_server_load, details.get("http_options") or {})
    rows = (row for each in applications.values() for row in rows_of(each, load))
    show_table([_HEADINGS, *rows])


def rows_of(
    application: Mapping[str, Any], server_load: Callable[[str], str]
) -> Iterator[tuple[str, ...]]:
    """Yield a row for each model of an application in Serve's status, or one without a model.

    server_load:  returns the open requests at a route, where a single replica answers there
    """
    name, status = str(application["name"]), str(application["status"])
    deployments = application.get("deployments") or {}
    written = application.get("deployed_app_config") or {}
    models = _models(written) if written.get("import_path") == IMPORT_PATH else {}
    for model, config in models.items():
        deployment = deployments.get(deployment_names(tuple(models))[model]) or {}
        load = _load(deployment)
        if load == "-" and len(models) == len(deployment.get("replicas") or ()) == 1:
            load = server_load(str(application.get("route_prefix") or "/"))
        yield name, status, model, config.model.path, _replicas(deployment), load
    if not models:
        found = [each for key, each in deployments.items() if key.startswith(DEPLOYMENT)]
        yield name, status, "-", "-", ", ".join(map(_replicas, found)) or "-", "-"


def _models(written: Mapping[str, Any]) -> Mapping[str, ServeConfig]:
    with suppress(ConfigError, KeyError, TypeError):  # of another version
        return parse_models(resolve(written["args"]).args)
    return {}


def _replicas(deployment: Mapping[str, Any]) -> str:
    states = Counter(str(replica["state"]).lower() for replica in deployment.get("replicas") or ())
    target = deployment.get("target_num_replicas")
    found = ", ".join(f"{count} {state}" for state, count in states.items()) or "none"
    return found if target in (None, states["running"]) else f"{found} of {target}"


def _load(deployment: Mapping[str, Any]) -> str:
    """Return the open requests as autoscaling counts them; - where Serve does not count."""
    measured = (deployment.get("autoscaling_detail") or {}).get("metrics") or {}
    numbers = [value for value in measured.values() if isinstance(value, int | float)]
    return f"{numbers[0]:g} requests" if numbers else "-"


def _server_load(http: Mapping[str, Any], route_prefix: str) -> str:
    """Return what the replica's /load reports; - if it cannot be asked without a key."""
    import httpx  # 0.1 s that other commands do without

    host = str(http.get("host") or "127.0.0.1")
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)
    url = f"http://{host}:{http.get('port', 8000)}{route_prefix.rstrip('/')}/load"
    with suppress(httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError):
        return f"{httpx.get(url, timeout=_TIMEOUT_S).json()['server_load']} requests"
    return "-"


def _status(dashboard: str) -> dict[str, Any]:
    """Return Serve's status. Raises Failure."""
    import httpx

    try:
        reply = httpx.get(
            f"{dashboard}/api/serve/applications/", headers=_headers(), timeout=_TIMEOUT_S
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Failure(
            f"no Ray cluster answers at {dashboard} ({error}); start a server with `remora serve`, "
            "or name the dashboard's address with --dashboard"
        ) from None
    if reply.status_code in (401, 403):
        raise Failure(
            f"{dashboard} refuses the token: run the command as the user who started the cluster, "
            "or set RAY_AUTH_TOKEN"
        )
    if reply.status_code != 200:
        raise Failure(f"{dashboard}/api/serve/applications/: HTTP {reply.status_code}")
    found: dict[str, Any] = reply.json()
    return found


def _headers() -> dict[str, str]:
    """Return the header with Ray's token, from where Ray reads it."""
    token = os.environ.get("RAY_AUTH_TOKEN", "")
    if not token:
        place = os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token"
        with suppress(OSError):
            token = Path(place).read_text(encoding="ascii")
    return {"authorization": f"Bearer {token.strip()}"} if token.strip() else {}
