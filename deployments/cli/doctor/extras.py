"""The extras of the distribution, such as `pip install remora[s3]`, and which are installed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, requires, version

# What an extra is for. `docs` and `dev` are for work on remora itself.
PURPOSES: Mapping[str, str] = {
    "cuda": "NVIDIA GPUs",
    "s3": "models and adapters at s3://",
    "gcs": "models and adapters at gs://",
    "azure": "models and adapters at az://",
    "otel": "traces (metrics.trace_endpoint)",
    "kv-events": "events of the KV cache (engine.kv_events_endpoint)",
}
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_EXTRA = re.compile(r"extra == ['\"]([\w-]+)['\"]")


def find_extras() -> Iterator[tuple[str, str]]:
    """Yield each extra and whether it is installed: the versions, or how to install it."""
    for extra, names in packages_by_extra().items():
        if extra not in PURPOSES:
            continue
        found = {name: _version(name) for name in names}
        missing = [name for name, installed in found.items() if installed is None]
        if missing:
            text = f"not installed: {', '.join(missing)}; pip install 'remora[{extra}]'"
        else:
            text = ", ".join(f"{name} {installed}" for name, installed in found.items())
        yield extra, f"{PURPOSES[extra]}: {text}"


def packages_by_extra() -> dict[str, list[str]]:
    """Return the packages of each extra of the installed distribution; none in a bare checkout."""
    try:
        lines = requires("remora") or []
    except PackageNotFoundError:
        return {}
    found: dict[str, list[str]] = {}
    for line in lines:
        extra, name = _EXTRA.search(line), _NAME.match(line)
        if extra is not None and name is not None:
            found.setdefault(extra[1], []).append(name[0])
    return found


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
