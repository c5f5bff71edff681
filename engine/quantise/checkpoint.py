"""Quantises a checkpoint: reads a block, rounds its linears, writes them, and goes on.

The linears of all blocks are rounded; embedding, head, norms and routers stay as they are. A linear
is calibrated on what the rounded linears before it make of the windows. Memory holds one block in
float32, and the windows' streams.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from remora.configs.errors import ConfigError
from remora.engine.layers.experts import Experts
from remora.engine.layers.linear import Linear
from remora.engine.models.decoder import EMBEDDING, HEAD, DecoderBlock
from remora.engine.observe.progress import progress_bar
from remora.engine.parallel.shard import Shard
from remora.engine.quantise.awq import folds, scale_inputs
from remora.engine.quantise.blocks import EXACT, Calibration, Windows
from remora.engine.quantise.gptq import gptq
from remora.engine.quantise.search import Grid, Scheme, as_kind, round_to_grid, search_grid
from remora.engine.quantise.source import Checkpoint
from remora.engine.quantise.writer import (
    CheckpointWriter,
    copy_other_files,
    new_folder,
    packed_tensors,
    quantization_settings,
    write_config,
)
from remora.kernels.quantised.weight_kinds import IntWeight

Method = Literal["gptq", "awq", "round"]
METHODS: tuple[Method, ...] = get_args(Method)
BITS = (4, 8)
GROUP_SIZES = (128, 64, 32)
WEIGHT = ".weight"

Rounded = dict[str, IntWeight]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How to quantise.

    method:      gptq and awq need calibration windows, round does not; awq rounds as gptq does
                 after it has scaled the inputs
    group_size:  inputs that share a scale; None = the largest of GROUP_SIZES that fits
    symmetric:   None = if the bits are 8
    """

    method: Method
    bits: int
    group_size: int | None = None
    symmetric: bool | None = None

    @property
    def needs_windows(self) -> bool:
        """Whether it needs calibration windows."""
        return self.method != "round"


def make_scheme(recipe: Recipe, checkpoint: Checkpoint) -> Scheme:
    """Return how weights are stored. Raises ConfigError if the groups do not fit."""
    config = checkpoint.config
    blocks = (
        DecoderBlock(config, layer, dtype=EXACT, device="meta")
        for layer in range(config.num_layers)
    )
    sizes = {size for block in blocks for size in _input_sizes(block)}
    fitting = [size for size in GROUP_SIZES if not any(inputs % size for inputs in sizes)]
    chosen = recipe.group_size or next(iter(fitting), None)
    if chosen is None or chosen not in fitting:
        raise ConfigError(
            f"groups of {chosen or min(GROUP_SIZES)} do not divide the inputs of all linears "
            f"({', '.join(map(str, sorted(sizes)))}); "
            f"possible group sizes: {', '.join(map(str, fitting)) or 'none'}."
        )
    symmetric = recipe.bits == 8 if recipe.symmetric is None else recipe.symmetric
    return Scheme(
        bits=recipe.bits, group_size=chosen, symmetric=symmetric, scale_dtype=checkpoint.dtype
    )


@torch.inference_mode()
def quantise_checkpoint(
    checkpoint: Checkpoint, out: Path, recipe: Recipe, windows: Windows, *, show_progress: bool
) -> float:
    """Write the quantised checkpoint to a new folder; return the bits of a rounded weight.

    windows:  token ids for calibration; not read if the method needs none
    Raises ConfigError.
    """
    config, scheme = checkpoint.config, make_scheme(recipe, checkpoint)
    rounding = _Rounding(checkpoint, recipe, scheme, windows)
    done: set[str] = set()
    with new_folder(out) as folder:
        writer = CheckpointWriter(folder)
        bar = progress_bar(f"Quantising {checkpoint.label}", config.num_layers, show_progress)
        with bar as advance:
            for layer in range(config.num_layers):
                done |= rounding.write_block(layer, writer)
                advance(1)
        for name, tensor in checkpoint.own.read(checkpoint.own.shapes().keys() - done):
            writer.add({name: tensor})
        writer.finish()
        copy_other_files(checkpoint.path, folder)
        ignore = _unquantised(checkpoint, rounding.modules)
        write_config(checkpoint.path, folder, quantization_settings(scheme, ignore))
    return rounding.num_bits / rounding.num_weights


class _Rounding:
    """Rounds and writes blocks in order.

    modules:  names in the checkpoint of the modules that are quantised
    """

    def __init__(
        self, checkpoint: Checkpoint, recipe: Recipe, scheme: Scheme, windows: Windows
    ) -> None:
        self._checkpoint, self._recipe, self._scheme = checkpoint, recipe, scheme
        self._calibration: Calibration | None = None
        if recipe.needs_windows:
            self._calibration = Calibration(checkpoint.config, windows, checkpoint.renamed)
        self.modules: list[str] = []
        self.num_bits = self.num_weights = 0

    def write_block(self, layer: int, writer: CheckpointWriter) -> set[str]:
        """Read, round and write a block; return its tensors' names in the checkpoint."""
        block = DecoderBlock(self._checkpoint.config, layer, dtype=EXACT, device="cpu")
        prefix = f"model.layers.{layer}."
        tensors = dict(block.tensors(prefix))
        self._checkpoint.fill(tensors)
        vectors = {name: shard for name, shard in tensors.items() if shard.memory.ndim == 1}
        before = {name: shard.memory.clone() for name, shard in vectors.items()}
        rounded = self._round(layer, block, prefix)
        changed = {name for name in before if not torch.equal(before[name], vectors[name].memory)}
        if self._calibration is not None:
            self._calibration.advance(layer, block)
        names = self._checkpoint.own_names(tensors.keys())
        for name, tensor in self._checkpoint.own.read(names):
            parts = self._checkpoint.names_in(name)
            if rounded.keys() >= set(parts):
                writer.add(self._packed(name, {part: rounded[part] for part in parts}))
            elif changed.isdisjoint(parts):
                writer.add({name: tensor})
            else:
                writer.add({name: self._joined(name, {part: vectors[part] for part in parts})})
        return names

    def _round(self, layer: int, block: DecoderBlock, prefix: str) -> Rounded:
        """Round the weights of a block in its memory, and return them."""
        named = list(block.linears(prefix))
        linears = [linear for _, linear in named]
        for linear in linears:
            if not linear.weight.isfinite().all():
                raise ConfigError(f"a weight of {prefix}{next(iter(linear.parts))} is not finite.")
        if self._recipe.method == "awq":
            self._scale_inputs(layer, block, linears)
        kinds = (self._round_one(layer, block, linear) for linear in linears)
        rounded: Rounded = {}
        for (start, linear), kind in zip(named, kinds, strict=True):
            linear.weight.copy_(kind.dequantised())
            rounded |= _parts(start, linear, kind)
        if isinstance(block.mlp, Experts):
            rounded |= self._round_experts(f"{prefix}mlp.", block.mlp)
        return rounded

    def _round_one(self, layer: int, block: DecoderBlock, linear: Linear) -> IntWeight:
        if self._calibration is None:
            return round_to_grid(
                linear.weight, search_grid(linear.weight, self._scheme), self._scheme
            )
        (gram,) = self._calibration.grams(layer, block, [linear])
        return gptq(linear.weight, gram, self._scheme)

    def _scale_inputs(self, layer: int, block: DecoderBlock, linears: list[Linear]) -> None:
        assert self._calibration is not None
        grams = dict(zip(linears, self._calibration.grams(layer, block, linears), strict=True))
        for fold in folds(block, self._checkpoint.dtype):
            scale_inputs(fold, grams[fold.linear], self._scheme)

    def _round_experts(self, prefix: str, experts: Experts) -> Rounded:
        """Round routed experts without data: few windows reach each of them.

        Experts that the checkpoint stores in one tensor of three dimensions stay as they are.
        """
        rounded: Rounded = {}
        for number in range(experts.config.num_experts):
            start = f"{prefix}experts.{number}."
            names = [f"{start}{part}{WEIGHT}" for part in ("gate_proj", "up_proj", "down_proj")]
            if not all(self._checkpoint.is_matrix(name) for name in names):
                return {}
            gate_up, down = experts.gate_up[number], experts.down[number]
            weights = (*gate_up.chunk(2), down)
            for name, weight in zip(names, weights, strict=True):
                kind = round_to_grid(weight, search_grid(weight, self._scheme), self._scheme)
                weight.copy_(kind.dequantised())
                rounded[name] = kind
        return rounded

    def _packed(self, name: str, kinds: Rounded) -> dict[str, Tensor]:
        """Return the stored tensors of a checkpoint's weight, from the model's in it."""
        kind, module = self._assembled(name, kinds), name.removesuffix(WEIGHT)
        tensors = packed_tensors(module, kind, self._scheme)
        self.modules.append(module)
        self.num_weights += kind.codes.numel()
        self.num_bits += 8 * sum(each.nbytes for each in tensors.values() if each.numel() > 2)
        return tensors

    def _joined(self, name: str, parts: Mapping[str, Shard]) -> Tensor:
        """Return a norm's weight or a bias of the checkpoint, from the model's in it."""
        stored = {part: shard.memory - shard.offset for part, shard in parts.items()}
        return self._checkpoint.assembled(name, stored).to(self._checkpoint.dtype)

    def _assembled(self, name: str, kinds: Rounded) -> IntWeight:
        if len(kinds) == 1:
            return next(iter(kinds.values()))
        codes, scales, zeros = (
            self._checkpoint.assembled(
                name, {part: getattr(kind, field) for part, kind in kinds.items()}
            )
            for field in ("codes", "scales", "zeros")
        )
        return as_kind(codes, Grid(scales, zeros), self._scheme)


def _input_sizes(block: DecoderBlock) -> Iterator[int]:
    for _, linear in block.linears(""):
        yield linear.weight.shape[1]
    if isinstance(block.mlp, Experts):
        yield block.mlp.gate_up.shape[2]
        yield block.mlp.down.shape[2]


def _parts(prefix: str, linear: Linear, kind: IntWeight) -> Rounded:
    """Divide a fused weight's outputs among the names of its parts."""
    found: Rounded = {}
    start = 0
    for name, part in linear.parts.items():
        rows = slice(start, start + len(part.held))
        start = rows.stop
        assert kind.zeros is not None
        found[f"{prefix}{name}{WEIGHT}"] = IntWeight(
            codes=kind.codes[rows],
            scales=kind.scales[rows],
            zeros=kind.zeros[rows],
            groups=kind.groups,
            bits=kind.bits,
        )
    return found


def _unquantised(checkpoint: Checkpoint, modules: list[str]) -> list[str]:
    """Return the modules with a matrix that is not quantised, the head among them."""
    embeddings = checkpoint.own_names({f"{EMBEDDING}{WEIGHT}"})
    left = {
        name.removesuffix(WEIGHT)
        for name, shape in checkpoint.own.shapes().items()
        if len(shape) == 2 and name.endswith(WEIGHT) and name not in embeddings
    }
    return sorted((left - set(modules)) | ({HEAD} if checkpoint.config.head.tied else set()))
