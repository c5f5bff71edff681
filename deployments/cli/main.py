"""The `remora` command and its subcommands.

This module imports only light modules, so that `remora --help` starts fast. Each command imports
torch or Ray when it runs.
"""

from __future__ import annotations

from typing import Annotated

import typer

from remora.configs.version import __version__
from remora.deployments.cli import (
    bench,
    chat,
    compile,
    config,
    generate,
    lora,
    plan,
    quantize,
    serve,
)
from remora.deployments.cli.doctor import command as doctor
from remora.deployments.cli.models import listing, pull, running
from remora.deployments.cli.terminal import Commands, answer

app = typer.Typer(
    name="remora",
    cls=Commands,
    help="Serve large language models on Ray Serve.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(serve.serve)
app.command()(chat.chat)
app.command()(generate.generate)
app.command()(plan.plan)
app.command("compile")(compile.compile_kernels)
app.command()(quantize.quantize)
app.command()(pull.pull)
app.command()(listing.models)
app.command()(listing.rm)
app.command()(running.ps)
app.add_typer(bench.app, name="bench")
app.add_typer(doctor.app, name="doctor")
app.add_typer(config.app, name="config")
app.add_typer(lora.app, name="lora")


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
