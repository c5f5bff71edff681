"""`remora lora`: list, load, unload and pin the LoRA adapters of a running server."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from remora.deployments.cli.options import DEFAULT_URL, ApiKey
from remora.deployments.cli.terminal import Commands, answer

app = typer.Typer(
    cls=Commands,
    help="Manage the LoRA adapters of a running server (needs lora.dynamic: true).",
    no_args_is_help=True,
)

Url = Annotated[str, typer.Option(help="Address of the server.")]
Model = Annotated[
    str | None, typer.Option(help="Base model. Required if the server serves several models.")
]
Name = Annotated[str, typer.Argument(help="Name of the adapter.")]
_HEADINGS = ("NAME", "STATE", "USERS", "USES", "PINNED", "OWNER", "SOURCE")


@app.command()
def add(
    name: Name,
    source: Annotated[
        str,
        typer.Argument(help="Folder, hf://OWNER/NAME or URL that the server can read."),
    ],
    pinned: Annotated[bool, typer.Option("--pin", help="Keep the adapter in memory.")] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace a loaded adapter of the same name.")
    ] = False,
    url: Url = DEFAULT_URL,
    model: Model = None,
    api_key: ApiKey = None,
) -> None:
    """Load an adapter on all replicas."""
    path = source if "://" in source else str(Path(source).expanduser().absolute())
    body = {"lora_name": name, "lora_path": path, "pinned": pinned, "load_inplace": replace}
    _ask(url, api_key, "POST", "/load_lora_adapter", model, body)
    answer(f"loaded {name} from {path}")


@app.command()
def rm(
    name: Name,
    force: Annotated[bool, typer.Option("--force", help="Cancel its running requests.")] = False,
    url: Url = DEFAULT_URL,
    model: Model = None,
    api_key: ApiKey = None,
) -> None:
    """Unload an adapter after its running requests finish."""
    body = {"lora_name": name, "force": force}
    _ask(url, api_key, "POST", "/unload_lora_adapter", model, body)
    answer(f"unloaded {name}")


@app.command()
def pin(name: Name, url: Url = DEFAULT_URL, model: Model = None, api_key: ApiKey = None) -> None:
    """Pin an adapter: keep it in memory."""
    _ask(url, api_key, "POST", f"/v1/lora_adapters/{quote(name, safe='')}/pin", model, {})
    answer(f"pinned {name}")


@app.command()
def unpin(name: Name, url: Url = DEFAULT_URL, model: Model = None, api_key: ApiKey = None) -> None:
    """Unpin an adapter: allow its eviction from memory."""
    _ask(url, api_key, "POST", f"/v1/lora_adapters/{quote(name, safe='')}/unpin", model, {})
    answer(f"unpinned {name}")


@app.command()
def ls(url: Url = DEFAULT_URL, model: Model = None, api_key: ApiKey = None) -> None:
    """List the adapters, with the number of replicas in each state."""
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
    from remora.deployments.cli.server_client import ServerClient  # imports httpx

    query = "" if model is None else f"?model={quote(model, safe='')}"
    with closing(ServerClient(url, api_key=api_key)) as server:
        return server.ask(method, path + query, body)


def _row(adapter: dict[str, Any]) -> tuple[str, ...]:
    states = Counter(replica["state"] for replica in adapter.get("replicas", {}).values())
    counts = ", ".join(f"{state} {count}" for state, count in states.items())
    return (
        adapter["name"],
        "refused" if "refused" in adapter else counts or "-",
        str(adapter.get("num_users", "-")),
        str(adapter.get("num_uses", "-")),
        "yes" if adapter.get("pinned") else "no",
        adapter["owner"],
        adapter.get("refused") or adapter.get("source", "-"),
    )
