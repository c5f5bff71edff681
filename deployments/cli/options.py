"""Command-line options that several commands share."""

from __future__ import annotations

import os
from typing import Annotated

import typer
from pydantic import TypeAdapter, ValidationError

from remora.configs.fields import Bytes
from remora.configs.value_sources import Override, of_environment, of_options
from remora.deployments.cli.terminal import Failure

# The address of a local server.
DEFAULT_URL = "http://127.0.0.1:8000"

Targets = Annotated[
    list[str] | None,
    typer.Argument(
        help="Serve config file (.yaml), Hugging Face folder, .gguf file, built-in model name, or "
        "a remote model: OWNER/NAME of the hub, s3://BUCKET/PATH. "
        "With --dialect: the other server's own options, after --."
    ),
]
Dialect = Annotated[
    str | None,
    typer.Option(
        help="Read another server's options: vllm, sglang, lightllm, rtp_llm, ray_serve_llm (a "
        "YAML file), or backend (JSON files)."
    ),
]
SkipUnsupported = Annotated[
    bool,
    typer.Option(
        "--skip-unsupported",
        help="List the other server's parameters that are refused, and go on without them.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="Set a configuration key, e.g. --set engine.page_size=32. Repeatable."
    ),
]
ServedModel = Annotated[
    str | None, typer.Option("--model", help="Model to use. Default: the first one served.")
]
ApiKey = Annotated[
    str | None, typer.Option(envvar="REMORA_API_KEY", help="API key to send to the server.")
]


def read_size(text: str, option: str) -> int:
    """Return an option's bytes. Raises Failure."""
    try:
        return TypeAdapter[int](Bytes).validate_python(text)
    except ValidationError:
        raise Failure(f"{option} {text}: expected a size such as 24GiB") from None


def read_overrides(settings: list[str] | None) -> list[Override]:
    """Return the values of REMORA_* variables and of --set, which wins. Raises ConfigError."""
    return [*of_environment(os.environ), *of_options(settings or ())]
