"""bitsandbytes: nf4 and fp4 with a scale for each run of the flattened weight, and int8.

A run's scale may be 8-bit itself, an index into a table with scales and an offset of its own.
`quant_state` is JSON in bytes and has the weight's shape.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from remora.configs.errors import ConfigError
from remora.engine.weights.formats.stored import Format, Inventory, Parts, Settings, StoredWeight
from remora.kernels.quantised.weight_kinds import IntWeight, TableWeight, WeightKind

STATE = re.compile(r"(?P<name>.+)\.quant_state\.bitsandbytes__(?P<kind>nf4|fp4)")
LARGEST_INT8 = 127.0


def find(settings: Settings, inventory: Inventory) -> Iterator[StoredWeight]:
    """Yield a weight for each quant_state, and for each module with SCB."""
    states = {match["name"]: match for match in map(STATE.fullmatch, inventory.shapes) if match}
    read = inventory.read([match[0] for match in states.values()])
    for name, match in states.items():
        yield _four_bits(name, match["kind"], _state(match[0], read[match[0]]), inventory)
    for module in inventory.having(".SCB"):
        name = inventory.part(module, ".weight", of="SCB")
        outputs, _ = inventory.matrix(name)
        inventory.expect(f"{module}.SCB", (outputs,), why="for each output")
        parts = {"codes": name, "scales": f"{module}.SCB"}
        if f"{module}.weight_format" in inventory.shapes:
            parts["layout"] = f"{module}.weight_format"
        yield StoredWeight(
            name=name,
            shape=inventory.shapes[name],
            parts=parts,
            decode=_int8,
            label="bitsandbytes int8",
        )


def _state(name: str, octets: Tensor) -> Mapping[str, Any]:
    try:
        state = json.loads(bytes(octets.tolist()))
        found: dict[str, Any] = {
            "size": (int(state["shape"][0]), int(state["shape"][1])),
            "run": int(state["blocksize"]),
            "nested_run": int(state.get("nested_blocksize") or 0),
            "offset": float(state.get("nested_offset") or 0.0),
        }
        if min(found["run"], *found["size"]) < 1 or found["nested_run"] < 0:
            raise ValueError(f"sizes below 1 in {state}")
        return found
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{name} cannot be read as a state of bitsandbytes: {error!r}. Expected JSON with "
            "shape and blocksize."
        ) from error


def _four_bits(
    name: str, kind: str, state: Mapping[str, Any], inventory: Inventory
) -> StoredWeight:
    def part(ending: str) -> str:
        return inventory.part(name, ending, of="quant_state")

    parts = {"values": part(""), "scales": part(".absmax"), "table": part(".quant_map")}
    if state["nested_run"]:
        parts |= {
            "nested_scales": part(".nested_absmax"),
            "nested_table": part(".nested_quant_map"),
        }
    outputs, inputs = state["size"]
    runs = -(-outputs * inputs // state["run"])
    inventory.expect(parts["scales"], (runs,), (runs, 1), why=f"for runs of {state['run']} weights")
    octets = -(-outputs * inputs // 2)
    inventory.expect(name, (octets, 1), (1, octets), why=f"for {outputs} x {inputs} weights")
    inventory.expect(parts["table"], (16,), why="for codes of 4 bits")
    if state["nested_run"]:
        nested = -(-runs // state["nested_run"])
        inventory.expect(parts["nested_scales"], (nested,), (nested, 1), why=f"for {runs} scales")
        inventory.expect(parts["nested_table"], (256,), why="for scales of 8 bits")
    return StoredWeight(
        name=name,
        shape=(outputs, inputs),
        parts=parts,
        decode=partial(_table, **state),
        label=f"bitsandbytes {kind}, runs of {state['run']}"
        + (" that cross rows" if inputs % state["run"] else ""),
    )


def _table(
    parts: Parts, *, size: tuple[int, int], run: int, nested_run: int, offset: float
) -> TableWeight:
    scales = parts["scales"].flatten()
    if nested_run:
        if scales.dtype != torch.uint8:
            raise ValueError(
                f"nested scales are stored as {str(scales.dtype).removeprefix('torch.')}"
            )
        factors = parts["nested_scales"].flatten().float()[torch.arange(len(scales)) // nested_run]
        scales = parts["nested_table"].float()[scales.int()] * factors + offset
    return TableWeight(
        values=parts["values"].flatten(),
        table=parts["table"].float(),
        scales=scales,
        run=run,
        size=size,
    )


def _int8(parts: Parts) -> WeightKind:
    if "layout" in parts and parts["layout"].any():
        raise ValueError("weight_format is not that of rows, 0")
    codes = parts["codes"]
    return IntWeight(
        codes=codes,
        scales=parts["scales"].float()[:, None] / LARGEST_INT8,
        groups=torch.zeros(codes.shape[1], dtype=torch.int64),
        bits=8,
    )


def kept(settings: Settings) -> Iterable[str]:
    """Return the modules that are listed as unquantised."""
    return settings.get("llm_int8_skip_modules") or ()


FORMAT = Format(
    methods=("bitsandbytes",),
    find=find,
    kept=kept,
    unused=re.compile(rf".*\.weight_format|{STATE.pattern}"),
)
