"""`remora lora`: the adapters of a running server: list, load, unload, pin."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from remora.deployments.cli.bench_options import ApiKey
from remora.deployments.cli.server_client import DEFAULT_URL, ServerClient
from remora.deployments.cli.terminal import Commands, answer

app = typer.Typer(
    cls=Commands,
    help="Adapters of a running server; it needs lora.dynamic: true.",
    no_args_is_help=True,
)

Url = Annotated[str, typer.Option(help="The server.")]
Model = Annotated[
    str | None, typer.Option(help="The base model, if the server has several at one address.")
]
Name = Annotated[str, typer.Argument(help="Name of the adapter.")]
_HEADINGS = ("NAME", "STATE", "USERS", "USES", "PINNED", "OWNER", "SOURCE")


@app.command()
def add(
    name: Name,
    source: Annotated[
        str,
        typer.Argument(help="Folder, hf://OWNER/NAME or another address, as the server sees it."),
    ],
    pinned: Annotated[bool, typer.Option("--pin", help="Keep it loaded.")] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace the adapter of that name.")
    ] = False,
    url: Url = DEFAULT_URL,
    model: Model = None,
    api_key: ApiKey = None,
) -> None:
    """Load an adapter at all replicas."""
    path = source if "://" in source else str(Path(source).expanduser().absolute())
    body = {"lora_name": name, "lora_path": path, "pinned": pinned, "load_inplace": replace}
    _ask(url, api_key, "POST", "/load_lora_adapter", model, body)
    answer(f"{name} is served, from {path}")


@app.command()
def rm(
    name: Name,
    force: Annotated[bool, typer.Option("--force", help="End its requests.")] = False,
    url: Url = DEFAULT_URL,
    model: Model = None,
    api_key: ApiKey = None,
) -> None:
    """Unload an adapter, once its requests have ended."""
    body = {"lora_name": name, "force": force}
    _ask(url, api_key, "POST", "/unload_lora_adapter", model, body)
    answer(f"{name} is served no longer")


@app.command()
def pin(name: Name, url: Url = DEFAULT_URL, model: Model = None, api_key: ApiKey = None) -> None:
    """Keep an adapter loaded."""
    _ask(url, api_key, "POST", f"/v1/lora_adapters/{quote(name, safe='')}/pin", model, {})
    answer(f"{name} is pinned")


@app.command()
def unpin(name: Name, url: Url = DEFAULT_URL, model: Model = None, api_key: ApiKey = None) -> None:
    """Let an adapter leave memory again."""
    _ask(url, api_key, "POST", f"/v1/lora_adapters/{quote(name, safe='')}/unpin", model, {})
    answer(f"{name} is not pinned")


@app.command()
def ls(url: Url = DEFAULT_URL, model: Model = None, api_key: ApiKey = None) -> None:
    """List the adapters, and what became of them at how many replicas."""
    adapters = _ask(url, api_key, "GET", "/v1/lora_adapters", model)["data"]
    rows = [_HEADINGS, *map(_row, adapters)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    for row in rows:
        answer(
            "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        )


def _ask(
    url: str,
    api_key: str | None,
    method: str,
    path: str,
    model: str | None,
    body: dict[str, Any] | None = None,
) -> Any:
    query = "" if model is None else f"?model={quote(model, safe='')}"
    with ServerClient(url, api_key=api_key) as server:
        return server.ask(method, path + query, body)


def _row(adapter: dict[str, Any]) -> tuple[str, ...]:
    states = Counter(replica["state"] for replica in adapter.get("replicas", {}).values())
    told = ", ".join(f"{state} {count}" for state, count in states.items())
    return (
        adapter["name"],
        "refused" if "refused" in adapter else told or "-",
        str(adapter.get("num_users", "-")),
        str(adapter.get("num_uses", "-")),
        "yes" if adapter.get("pinned") else "no",
        adapter["owner"],
        adapter.get("refused") or adapter.get("source", "-"),
    )
