"""`remora quantize`: write a quantised copy of a checkpoint, and measure what that costs.

This module imports only light modules; the command imports the rest when it runs.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from remora.deployments.bench.targets import read_target
from remora.deployments.cli.bench_options import Html, Json, reported
from remora.deployments.cli.terminal import Failure, answer

if TYPE_CHECKING:
    from remora.engine.quantise.source import Checkpoint


class Method(StrEnum):
    """How weights are rounded."""

    gptq = "gptq"
    awq = "awq"
    round = "round"


class Bits(StrEnum):
    """Bits of a weight."""

    four = "4"
    eight = "8"


class GroupSize(StrEnum):
    """Inputs that share a scale."""

    small = "32"
    medium = "64"
    large = "128"


def quantize(
    model: Annotated[
        str, typer.Argument(help="Hugging Face folder with 16-bit safetensors, or built-in model.")
    ],
    out: Annotated[Path, typer.Argument(help="New folder for the quantised checkpoint.")],
    method: Annotated[
        Method,
        typer.Option(help="gptq and awq use calibration text; round searches scales without any."),
    ] = Method.gptq,
    bits: Annotated[Bits, typer.Option(help="Bits of a weight.")] = Bits.four,
    group_size: Annotated[
        GroupSize | None,
        typer.Option(help="Inputs that share a scale. Default: the largest that fits."),
    ] = None,
    symmetric: Annotated[
        bool | None,
        typer.Option(
            "--symmetric/--asymmetric",
            help="Whether zero is the middle of the codes. Default: with 8 bits.",
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(help="UTF-8 text for calibration. Default: samples of the model itself."),
    ] = None,
    windows: Annotated[int, typer.Option(min=1, help="Calibration windows.")] = 64,
    window_tokens: Annotated[int, typer.Option(min=16, help="Tokens of a window.")] = 512,
    text: Annotated[
        Path | None, typer.Option(help="UTF-8 text to measure with. Default: a built-in text.")
    ] = None,
    measure: Annotated[
        bool, typer.Option(help="Measure perplexity before and after, as `bench quality` does.")
    ] = True,
    json: Json = None,
    html: Html = None,
) -> None:
    """Write a quantised copy of MODEL to OUT in the format of compressed-tensors."""
    from remora.configs.environment import cache_dir
    from remora.deployments.bench.quality import TEXT, quality_suite, read_text
    from remora.engine.quantise.checkpoint import Recipe, make_scheme, quantise_checkpoint
    from remora.engine.quantise.source import Checkpoint
    from remora.engine.quantise.writer import check_new
    from remora.engine.weights.resolve_model import resolve_model

    # What can be wrong is found before anything is computed.
    check_new(out)
    path = resolve_model(model, cache_dir())
    checkpoint = Checkpoint(path)
    recipe = Recipe(
        method=method.value,
        bits=int(bits),
        group_size=None if group_size is None else int(group_size),
        symmetric=symmetric,
    )
    make_scheme(recipe, checkpoint)
    measured = read_text(text or TEXT)
    size = min(window_tokens, checkpoint.config.max_position - 1)
    ids: list[list[int]] = []
    if recipe.needs_windows:
        ids = _windows(checkpoint, calibration, windows, size, measured)
    elif calibration is not None:
        raise Failure("--method round uses no calibration text: leave --calibration out")
    num_bits = quantise_checkpoint(checkpoint, out, recipe, ids, show_progress=True)
    answer(f"wrote {out}: {method}, {num_bits:.2f} bits a weight")
    if not measure:
        return
    name = f"{method} {bits} bits"
    with reported(json, html, model, calibration=calibration, windows=len(ids)) as report:
        targets = {name: read_target(str(out))}
        quality_suite(report, read_target(str(path)), targets, text=text or TEXT)


def _windows(
    checkpoint: Checkpoint, calibration: Path | None, number: int, size: int, measured: str
) -> list[list[int]]:
    """Return the windows for calibration. Raises Failure, ConfigError."""
    from remora.deployments.bench.quality import read_text
    from remora.engine.quantise.samples import RUN, overlaps, own_samples, text_windows
    from remora.engine.tokens.tokenizer import Tokenizer

    if calibration is None:
        return own_samples(checkpoint.path, number, size, measured)
    text = read_text(calibration)
    if overlaps(text, measured):
        raise Failure(
            f"{calibration} shares {RUN} words in a row with the text that is measured: "
            "calibrate with another text, or measure with another --text"
        )
    return text_windows(Tokenizer.load(checkpoint.path), text, number, size)
