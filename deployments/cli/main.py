"""The command `remora`: what there is, and where it lives.

Only light modules are imported here, so that `remora --help` answers at once; each command imports
torch or Ray itself when it runs.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from remora.deployments.cli import bench, chat, compile, config, generate, lora, plan, serve
from remora.deployments.cli.doctor import command as doctor
from remora.deployments.cli.terminal import Commands, answer

app = typer.Typer(
    name="remora",
    cls=Commands,
    help="Large language models on Ray Serve, by an engine of their own.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(serve.serve)
app.command()(chat.chat)
app.command()(generate.generate)
app.command()(plan.plan)
app.command("compile")(compile.compile_kernels)
app.add_typer(bench.app, name="bench")
app.add_typer(doctor.app, name="doctor")
app.add_typer(config.app, name="config")
app.add_typer(lora.app, name="lora")


def _show_version(wanted: bool) -> None:
    if wanted:
        answer(f"remora {version('remora')}")
        raise typer.Exit


@app.callback()
def main(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and leave."
        ),
    ] = False,
) -> None:
    """Large language models on Ray Serve, by an engine of their own."""
