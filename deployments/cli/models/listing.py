"""`remora models` and `remora rm`: the models in the caches of this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from remora.configs.environment import cache_dir
from remora.configs.errors import ConfigError
from remora.configs.model_names import parse_model_name
from remora.configs.planning.kv_budget import human_bytes
from remora.configs.schema import BUILTIN_MODEL
from remora.deployments.cli.options import read_size
from remora.deployments.cli.terminal import Failure, answer

if TYPE_CHECKING:  # it is slow to import
    from remora.engine.sources.inventory import CachedModel

_HEADINGS = ("NAME", "SIZE", "SERVED BY")
_MAX_REASON = 80


def models(
    fits: Annotated[
        bool, typer.Option("--fits", help="List well-known models that this machine can serve.")
    ] = False,
    memory: Annotated[
        str | None, typer.Option(help="With --fits: free memory to assume, e.g. 24GiB.")
    ] = None,
) -> None:
    """List the models in the caches: size, and what would serve each of them."""
    if fits or memory is not None:
        _show_fitting(memory)
        return
    from remora.engine.sources.hub import cache_folder
    from remora.engine.sources.inventory import cached_models

    found = cached_models(cache_dir())
    if not found:
        places = f"{cache_folder()} and {cache_dir()}"
        answer(f"no models in {places}; `remora pull OWNER/NAME` downloads one")
        return
    show_table(
        [_HEADINGS, *((each.name, human_bytes(each.num_bytes), _served_by(each)) for each in found)]
    )


def _show_fitting(memory: str | None) -> None:
    from remora.configs.load import parse_args
    from remora.deployments.cli.models.fits import CONTEXT, fits, rows
    from remora.engine.launch import read_machine

    machine = read_machine(parse_args({"model": {"path": BUILTIN_MODEL}}))
    if memory is not None:
        size = read_size(memory, "--memory")
        machine = replace(machine, available_bytes=size, total_bytes=size)
    found = list(fits(machine))
    free = human_bytes(machine.available_bytes)
    answer(f"{free} of memory on {machine.devices[0]}; weights by number format:")
    show_table(rows(found))
    if more := [each.model.name for each in found if not each.weights]:
        answer(f"too large: {', '.join(more)}")
    answer(f"each with room for {CONTEXT:,} tokens; `remora plan NAME` says more about a model")


def rm(
    names: Annotated[
        list[str],
        typer.Argument(help="Names as `remora models` shows them. OWNER/NAME: all its revisions."),
    ],
) -> None:
    """Remove models from the caches. A running server keeps what it has loaded."""
    from remora.engine.sources.inventory import cached_models, remove

    for name in names:
        model = parse_model_name(name)
        freed = 0 if model is None else remove(model, cache_dir())
        if not freed:
            known = ", ".join(each.name for each in cached_models(cache_dir()))
            raise Failure(f"{name} is not in the caches, which have {known or 'no models'}")
        answer(f"removed {name}: {human_bytes(freed)}")


def show_table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows in columns of equal widths."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        texts = (text.ljust(width) for text, width in zip(row, widths, strict=True))
        answer("  ".join(texts).rstrip())


def _served_by(model: CachedModel) -> str:
    if model.is_adapter:
        return "an adapter: lora.adapters"
    if not model.is_complete:
        return f"incomplete: `remora pull {model.name}` continues"
    from remora.configs.planning.loading import PLAIN_LOADING
    from remora.engine.models.implementation import Ours, implementation_of
    from remora.engine.pooling.facts import pooling_task

    try:
        task = pooling_task(model.path, "auto")
        if task is not None:
            return f"remora, {task}"
        chosen = implementation_of(model.path, PLAIN_LOADING)
    except ConfigError as error:
        reason = str(error).splitlines()[0]
        shown = reason if len(reason) <= _MAX_REASON else f"{reason[:_MAX_REASON]}..."
        return f"not served: {shown}"
    if isinstance(chosen, Ours):
        return f"remora, {chosen.config.architecture}"
    return "transformers on remora's KV cache"
