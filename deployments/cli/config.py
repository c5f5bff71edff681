"""`remora config`: check, explain and describe configuration files. Starts nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from remora.deployments.cli.terminal import answer

if TYPE_CHECKING:
    from remora.configs.load import ServeFile

app = typer.Typer(help="Check, explain and describe configuration files.", no_args_is_help=True)

File = Annotated[Path, typer.Argument(help="A Serve config file, such as configs/smollm2.yaml.")]


@app.command()
def check(file: File) -> None:
    """Say whether FILE is a valid configuration, and if not, where and why."""
    paths = (model.config.model.path for model in _load(file).models.values())
    answer(f"{file}: valid; serves {', '.join(paths)}")


@app.command()
def schema(
    markdown: Annotated[
        bool, typer.Option("--markdown", help="As the page docs/configuration.md instead.")
    ] = False,
) -> None:
    """Print the JSON Schema of `args` in a Serve application of remora."""
    from remora.configs.explain import json_schema, reference_page

    if markdown:
        answer(reference_page(), end="")
    else:
        answer(json.dumps(json_schema(), indent=2))


@app.command()
def explain(file: File) -> None:
    """Show the value of every key, what it means, and whether FILE or a default set it."""
    from remora.configs.explain import explain as explain_settings
    from remora.configs.messages import shown

    serve_file = _load(file)
    console = Console(soft_wrap=True, highlight=False)
    for name, model in serve_file.models.items():
        if len(serve_file.models) > 1:
            console.print(escape(f"model {name}"), style="bold")
        for setting in explain_settings(model.config, model.written):
            origin = "default" if setting.line is None else f"line {setting.line}"
            style = "" if setting.line is None else "bold cyan"
            line = f"{setting.name:<34} {shown(setting.value):<24} {origin}"
            console.print(escape(line), style=style)
            console.print(escape(f"    {setting.description}"), style="dim")


@app.command()
def parsers() -> None:
    """List the formats of tool calls and of thought that api.*_parser may name."""
    from remora.deployments.parsers.formats import TOOL_FORMATS
    from remora.deployments.parsers.harmony import NAMES as HARMONY_NAMES
    from remora.deployments.parsers.reasoning import REASONING_FORMATS

    both = {HARMONY_NAMES[0]: HARMONY_NAMES[1:]}
    tools = {form.name: form.aliases for form in TOOL_FORMATS.values()} | both
    reasoning = {form.name: form.aliases for form in REASONING_FORMATS} | both
    for key, formats in (("api.tool_parser", tools), ("api.reasoning_parser", reasoning)):
        answer(f"{key}: auto (default), none, response_template, or")
        for name, aliases in formats.items():
            answer(f"  {name:<14} {', '.join(aliases)}".rstrip())


def _load(file: Path) -> ServeFile:
    """Read FILE; remora's part is checked by our schema, the rest by Ray Serve's own."""
    from ray.serve.schema import ServeDeploySchema

    from remora.configs.load import load_serve_file

    return load_serve_file(file, also=ServeDeploySchema)
