"""The `remora` command and its subcommands.

This module imports only light modules, so that `remora --help` starts fast. The module of a command
is imported when the command runs, and imports torch or Ray where it needs them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

import typer

from remora.configs.version import __version__
from remora.deployments.cli.terminal import LazyCommands, answer

_CLI = "remora.deployments.cli"


class _Remora(LazyCommands):
    """All commands; the summaries are those of their functions."""

    commands_at: ClassVar[Mapping[str, tuple[str, str]]] = {
        "serve": (
            f"{_CLI}.serve:serve",
            "Serve models over HTTP until Ctrl-C. Without a target: the built-in model.",
        ),
        "chat": (f"{_CLI}.chat:chat", "Chat with a running server in the terminal."),
        "generate": (f"{_CLI}.generate:generate", "Complete PROMPT and print the text."),
        "plan": (
            f"{_CLI}.plan:plan",
            "Show the memory of weights, KV cache and steps, and how many requests fit.",
        ),
        "compile": (
            f"{_CLI}.compile:compile_kernels",
            "Compile the native CPU kernels for this machine, unless they are in the cache.",
        ),
        "quantize": (
            f"{_CLI}.quantize:quantize",
            "Write a quantised copy of MODEL to OUT in the format of compressed-tensors.",
        ),
        "pull": (
            f"{_CLI}.models.pull:pull",
            "Download models, or a configuration's models, drafts and tokenizers, into the caches.",
        ),
        "models": (
            f"{_CLI}.models.listing:models",
            "List the models in the caches: size, and what would serve each of them.",
        ),
        "rm": (
            f"{_CLI}.models.listing:rm",
            "Remove models from the caches. A running server keeps what it has loaded.",
        ),
        "ps": (
            f"{_CLI}.models.running:ps",
            "Show the running applications: models, replicas and their open requests.",
        ),
        "bench": (
            f"{_CLI}.bench:app",
            "Benchmark the engine and servers, and compare them with hardware limits.",
        ),
        "doctor": (
            f"{_CLI}.doctor.command:app",
            "Check versions, devices, memory and a model's plan. Exit code 2 if serving would "
            "fail.",
        ),
        "config": (f"{_CLI}.config:app", "Check, explain and convert configuration files."),
        "lora": (
            f"{_CLI}.lora:app",
            "Manage the LoRA adapters of a running server (needs lora.dynamic: true).",
        ),
    }


app = typer.Typer(
    name="remora",
    cls=_Remora,
    help="Serve large language models on Ray Serve.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        answer(f"remora {__version__}")
        raise typer.Exit


@app.callback()
def main(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Serve large language models on Ray Serve."""
