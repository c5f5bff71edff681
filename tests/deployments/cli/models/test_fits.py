"""`remora models --fits`: which well-known models fit a memory."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from remora.deployments.cli.main import app
from remora.deployments.cli.models.fits import facts_of
from remora.deployments.cli.models.open_models import OpenModel, open_models


@pytest.mark.parametrize("model", [*open_models()], ids=lambda model: model.name)
def test_the_shape_of_a_model_has_its_published_parameters(model: OpenModel) -> None:
    assert facts_of(model).num_parameters == model.parameters


def test_models_are_in_order_of_size() -> None:
    sizes = [model.parameters for model in open_models()]

    assert sizes == sorted(sizes)


def shown(memory: str) -> tuple[list[list[str]], str]:
    """Return the rows of models, and the line of those that are too large."""
    result = CliRunner().invoke(
        app, ["models", "--fits", "--memory", memory], env={"CUDA_VISIBLE_DEVICES": ""}
    )
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    too_large = next((line for line in lines if line.startswith("too large: ")), "")
    return [line.split("  ") for line in lines if "remora serve" in line], too_large


def test_a_model_is_listed_in_the_formats_that_fit() -> None:
    rows, too_large = shown("12GiB")
    by_name = {row[0].strip(): [cell.strip() for cell in row if cell.strip()] for row in rows}

    small = by_name["HuggingFaceTB/SmolLM2-135M-Instruct"]
    assert small[-1] == "remora serve HuggingFaceTB/SmolLM2-135M-Instruct"
    assert "-" not in small
    large = by_name["mistralai/Mistral-7B-Instruct-v0.3"]
    assert large[2] == "-"
    assert large[3].endswith(" GiB")
    assert large[-1] == (
        "remora serve mistralai/Mistral-7B-Instruct-v0.3 --set model.quantization=int8"
    )
    assert "Llama-3.3-70B" in too_large
    assert next(iter(by_name)) == "Qwen/Qwen3-8B"  # the largest first, in int4


def test_a_size_that_cannot_be_read_is_refused() -> None:
    result = CliRunner().invoke(app, ["models", "--fits", "--memory", "much"])

    assert result.exit_code == 2
    assert "24GiB" in result.stderr
