"""`remora config`: check, explain, convert and generate configuration files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from remora.configs.load import FileModel
from remora.configs.multiple_models import split_models
from remora.configs.schema import BUILTIN_MODEL, ServeConfig
from remora.configs.serve_file import our_application
from remora.deployments.cli.files import missing_files
from remora.deployments.cli.options import (
    Dialect,
    Settings,
    SkipUnsupported,
    Targets,
    read_overrides,
)
from remora.deployments.cli.target import read_models, read_target
from remora.deployments.cli.terminal import Failure, answer

app = typer.Typer(help="Check, explain and convert configuration files.", no_args_is_help=True)


@app.command()
def check(
    target: Targets = None,
    dialect: Dialect = None,
    settings: Settings = None,
    skip_unsupported: SkipUnsupported = False,
) -> None:
    """Validate keys and values, and report each error with its position.

    Files that are missing on this machine are named, too. They do not change the exit code, as the
    server may run on another machine.
    """
    tokens, overrides = target or [], read_overrides(settings)
    read = read_target(tokens, dialect, overrides, skips=skip_unsupported)
    for line in read.lines:
        answer(str(line))
    application = our_application(read.raw)
    missing = []
    if "runtime_env" not in application:  # which may bring the files
        missing = missing_files(read.models, "".join(tokens[:1]))
    for fault in missing:
        answer(f"missing here: {fault}")
    paths = ", ".join(args["model"]["path"] for args in split_models(application["args"]))
    verdict = f"valid; serves {paths}"
    if missing:
        verdict = (
            f"keys and values are valid, but on this machine `remora serve` refuses to start: "
            f"{len(missing)} missing (above); would serve {paths}"
        )
    answer(f"{dialect or tokens[0]}: {verdict}")


@app.command()
def schema(
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the page docs/configuration.md instead.")
    ] = False,
    whole_file: Annotated[
        bool, typer.Option("--file", help="Print the schema of a whole Serve config file.")
    ] = False,
) -> None:
    """Print the JSON schema of an application's `args`."""
    from remora.configs.explain import reference_page
    from remora.configs.template import schema_page

    if whole_file:
        answer(schema_page(), end="")
    elif markdown:
        answer(reference_page(), end="")
    else:
        answer(json.dumps(ServeConfig.model_json_schema(), indent=2))


@app.command()
def explain(target: Targets = None, dialect: Dialect = None, settings: Settings = None) -> None:
    """Show the value, meaning and source of every key.

    Sources in order of precedence: --set, environment variables such as REMORA_ENGINE__PAGE_SIZE,
    the file, its profile, the default.
    """
    from remora.configs.explain import explain as explain_settings
    from remora.configs.validation_messages import shown

    models = read_models(target or (), dialect, read_overrides(settings))
    console = Console(soft_wrap=True, highlight=False)
    for name, model in models.items():
        if len(models) > 1:
            console.print(escape(f"model {name}"), style="bold")
        for setting in explain_settings(model.config, model.written):
            style = "" if setting.origin is None else "bold cyan"
            line = f"{setting.name:<34} {shown(setting.value):<24} {setting.origin or 'default'}"
            console.print(escape(line), style=style)
            console.print(escape(f"    {setting.description}"), style="dim")


@app.command()
def diff(a: str, b: str) -> None:
    """Show the keys whose values differ between two configurations. Exit code 1 if any do."""
    from remora.configs.explain import explain as explain_settings
    from remora.configs.validation_messages import shown

    found = False
    first, second = (read_models([target], None, ()) for target in (a, b))
    for name in dict.fromkeys((*first, *second)):
        pair = _pair(name, first, second)
        if pair is None:
            answer(f"model {name}: only in {a if name in first else b}")
            found = True
            continue
        for one, other in zip(*(explain_settings(m.config, m.written) for m in pair), strict=True):
            if one.value != other.value:
                found = True
                answer(f"{one.name}: {shown(one.value)} -> {shown(other.value)}")
    if found:
        raise typer.Exit(1)


def _pair(
    name: str, first: Mapping[str, FileModel], second: Mapping[str, FileModel]
) -> tuple[FileModel, FileModel] | None:
    """Return both models of that name, or the only model of each whatever its name; or None."""
    if len(first) == len(second) == 1:
        return next(iter(first.values())), next(iter(second.values()))
    return (first[name], second[name]) if name in first and name in second else None


@app.command()
def init(
    profile: Annotated[str, typer.Option(help="Profile: cpu, gpu or multi-gpu.")] = "cpu",
    model: Annotated[str, typer.Option(help="Path of the model.")] = BUILTIN_MODEL,
    file: Annotated[
        Path | None,
        typer.Argument(help="File to write, with a JSON schema for editors. Default: stdout."),
    ] = None,
) -> None:
    """Write a commented configuration file with every key."""
    from remora.configs.profiles import PROFILES
    from remora.configs.template import SCHEMA_FILE, schema_page, template

    if profile not in PROFILES:
        raise Failure(f"--profile {profile}: must be one of {', '.join(PROFILES)}")
    text = template(profile, model)
    if file is None:
        answer(text, end="")
        return
    if file.exists():
        raise Failure(f"{file} exists; choose another name")
    file.write_text(text, encoding="utf-8")
    file.with_name(SCHEMA_FILE).write_text(schema_page(), encoding="utf-8")
    answer(f"wrote {file} and {file.with_name(SCHEMA_FILE)}")


@app.command()
def coverage(
    system: Annotated[str | None, typer.Option(help="Show only this server's parameters.")] = None,
    output: Annotated[
        str, typer.Option("--format", help="Output format: table, json or markdown.")
    ] = "table",
) -> None:
    """Show how remora handles each parameter of the servers whose options it accepts."""
    from remora.configs.dialects.catalogue import SYSTEMS
    from remora.configs.dialects.coverage import counts_table, parameters_page
    from remora.configs.dialects.coverage import coverage as rows_of

    if system is not None and system not in SYSTEMS:
        raise Failure(f"--system {system}: must be one of {', '.join(SYSTEMS)}")
    rows = rows_of((system,) if system is not None else ())
    if output == "json":
        answer(json.dumps([asdict(row) for row in rows], indent=1))
    elif output == "markdown":
        answer(parameters_page(), end="")
    elif output == "table":
        for row in rows:
            answer(f"{row.system:<9} {row.name:<52} {row.state:<15} {row.reason}")
        answer(counts_table(rows))
    else:
        raise Failure(f"--format {output}: must be table, json or markdown")


@app.command()
def convert(
    target: Targets = None,
    source: Annotated[
        str,
        typer.Option(
            "--from",
            help="Source: remora, vllm, ray_serve_llm, sglang, lightllm, rtp_llm or backend.",
        ),
    ] = "remora",
    to: Annotated[str, typer.Option(help="Destination, one of the same.")] = "remora",
    skip_unsupported: SkipUnsupported = False,
) -> None:
    """Convert a configuration to another server's format, and list what is lost on stderr."""
    from remora.deployments.cli.convert import converted

    text, notes = converted(target or (), source, to, skips=skip_unsupported)
    answer(text)
    for note in notes:
        typer.echo(note, err=True)


@app.command()
def parsers() -> None:
    """List the formats that api.tool_parser and api.reasoning_parser accept."""
    from remora.deployments.parsers.harmony import NAMES as HARMONY_NAMES
    from remora.deployments.parsers.reasoning import REASONING_FORMATS
    from remora.deployments.parsers.tool_calls.formats import TOOL_FORMATS

    both = {HARMONY_NAMES[0]: HARMONY_NAMES[1:]}
    tools = {form.name: form.aliases for form in TOOL_FORMATS.values()} | both
    reasoning = {form.name: form.aliases for form in REASONING_FORMATS} | both
    for key, formats in (("api.tool_parser", tools), ("api.reasoning_parser", reasoning)):
        answer(f"{key}: auto (default), none, response_template, or")
        for name, aliases in formats.items():
            answer(f"  {name:<14} {', '.join(aliases)}".rstrip())
