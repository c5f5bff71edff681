"""`remora models --fits`: which well-known models the memory of this machine holds, and how.

A model fits in a number format if `make_plan`, which also decides at the start of a server, finds
room for its weights, a step and one sequence of CONTEXT tokens.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from remora.configs.errors import ConfigError
from remora.configs.facts import MachineFacts, ModelFacts
from remora.configs.load import parse_args
from remora.configs.planning.kv_budget import human_bytes
from remora.configs.planning.memory_report import report
from remora.configs.planning.plan import make_plan
from remora.deployments.cli.models.open_models import OpenModel, open_models

CONTEXT = 8192
# Values of model.quantization; the first is the checkpoint's own number format.
FORMATS = ("none", "int8", "int4")
HEADINGS = ("NAME", "PARAMETERS", "BFLOAT16", "INT8", "INT4", "TO SERVE IT")


@dataclass(frozen=True, slots=True)
class Fit:
    """A model on a machine.

    weights:  bytes of the weights in each format that fits, the most exact format first
    """

    model: OpenModel
    weights: Mapping[str, int]


def fits(machine: MachineFacts) -> Iterator[Fit]:
    """Yield each well-known model with what fits, the smallest first."""
    # On a GPU, weights are not rounded at the start: quantised checkpoints exist for that.
    formats = FORMATS if machine.devices[0] == "cpu" else FORMATS[:1]
    for model in open_models():
        facts = facts_of(model)
        sizes = {name: _weights(model, facts, name, machine) for name in formats}
        yield Fit(model, {name: size for name, size in sizes.items() if size})


def facts_of(model: OpenModel) -> ModelFacts:
    """Return the facts of a model, as they are read from its folder."""
    from remora.engine.models.facts import read_model_facts

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(dict(model.config)), encoding="utf-8")
        return read_model_facts(Path(folder))


def _weights(model: OpenModel, facts: ModelFacts, name: str, machine: MachineFacts) -> int:
    """Return the bytes of the weights in a format; 0 if the model does not fit."""
    keys = {"path": model.name, "context_length": CONTEXT}
    config = parse_args({"model": keys if name == "none" else {**keys, "quantization": name}})
    try:
        plan = make_plan(config, facts, machine, Path(model.name))
    except ConfigError:
        return 0
    needed = report(plan, facts, is_native=plan.device == "cpu")
    return plan.weight_bytes if needed.total_bytes <= machine.available_bytes else 0


def rows(found: list[Fit]) -> list[tuple[str, ...]]:
    """Return the table of the models that fit, the largest first, with its headings."""
    return [
        HEADINGS,
        *(
            (
                each.model.name,
                f"{each.model.parameters / 1e9:.2f} B",
                *(_size(each, name) for name in FORMATS),
                _command(each),
            )
            for each in reversed(found)
            if each.weights
        ),
    ]


def _size(fit: Fit, name: str) -> str:
    return human_bytes(fit.weights[name]) if name in fit.weights else "-"


def _command(fit: Fit) -> str:
    best = next(iter(fit.weights))
    option = "" if best == "none" else f" --set model.quantization={best}"
    return f"remora serve {fit.model.name}{option}"
