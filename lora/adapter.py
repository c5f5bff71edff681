"""Reads a LoRA adapter from a PEFT folder: the updates of each tensor of the base model.

Names, shapes, ranks and values are checked against the base model first. Modules have the names of
the base's checkpoint and are renamed like its tensors: if one holds several of the model's weights
(c_attn, qkv_proj), each gets its rows of B, and all share A. An update of the embedding becomes an
update of its weight.

Legend: O outputs, I inputs, r rank.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from remora.configs.errors import InvalidAdapter
from remora.engine.protocols import Renaming
from remora.lora.files import read_files
from remora.lora.peft_config import AdapterConfig, parse_adapter_config

_PREFIX = "base_model.model."
_NAME = re.compile(
    r"(?P<module>.+?)\.(?:"
    r"lora_(?:embedding_)?(?P<factor>[AB])(?:\.default)?(?:\.weight)?"
    r"|lora_(?P<magnitude>magnitude_vector)(?:\.default)?(?:\.weight)?"
    r"|(?:(?:base_layer|modules_to_save)\.(?:default\.)?)?(?P<kept>weight|bias))"
)
_EMBEDDING = re.compile(r"\.lora_embedding_[AB]")
_HINTS = {"lm_head": ": it shares the embedding's weight (tie_word_embeddings)"}
_MAX_SHOWN = 8
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LowRank:
    """An update of a weight [O, I]: W + scale B A.

    a:          [r, I]
    b:          [O, r]
    magnitude:  [O] or None; norm of each row after the update (DoRA, arXiv:2402.09353)
    """

    a: Tensor
    b: Tensor
    scale: float
    magnitude: Tensor | None = None

    @property
    def rank(self) -> int:
        """r."""
        return self.a.shape[0]

    def updated(self, weight: Tensor) -> Tensor:
        """Return the updated weight [O, I] in float32."""
        product = self.b.float() @ self.a.float()
        whole = weight.float() + self.scale * product
        if self.magnitude is None:
            return whole
        return whole.mul_((self.magnitude.float() / whole.norm(dim=1)).unsqueeze(1))


def split_update(update: LowRank, theirs: str, renaming: Renaming) -> dict[str, LowRank]:
    """Split the update of the checkpoint's weight `theirs` among the model's weights."""
    names, rows = renaming.names(theirs), renaming.rows
    magnitudes: Sequence[Tensor | None] = [None] * len(names)
    if update.magnitude is not None:
        magnitudes = rows(theirs, update.magnitude)
    parts = zip(names, rows(theirs, update.b), magnitudes, strict=True)
    return {name: replace(update, b=b, magnitude=own) for name, b, own in parts}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Adapter:
    """The changes of an adapter, by the model's names of the base's tensors.

    label:     for messages
    updates:   low-rank updates of weights
    replaced:  whole tensors of the adapter
    digest:    of the files
    """

    label: str
    updates: Mapping[str, LowRank]
    replaced: Mapping[str, Tensor]
    digest: str

    @property
    def max_rank(self) -> int:
        """The largest rank of an update."""
        return max((update.rank for update in self.updates.values()), default=0)


def read_adapter(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], renaming: Renaming
) -> Adapter:
    """Read a PEFT folder and check it against the base model.

    shapes:    of all tensors of the base model, by the model's names
    renaming:  of its checkpoint
    Raises InvalidAdapter with all faults.
    """
    files = read_files(folder)
    config = parse_adapter_config(files.config)
    parts = _by_module(files.tensors)
    reader = _Reader(config, shapes, renaming)
    for module, part in parts.items():
        reader.add(module, part)
    if reader.faults:
        shown = "; ".join(reader.faults[:_MAX_SHOWN])
        more = len(reader.faults) - _MAX_SHOWN
        raise InvalidAdapter(
            f"the adapter {folder} does not fit the model: {shown}"
            + (f"; and {more} more" if more > 0 else "")
            + (f". It was trained on {config.base_model}" if config.base_model else "")
        )
    if not parts:
        raise InvalidAdapter(f"the adapter {folder} changes nothing: its file holds no tensors")
    return Adapter(
        label=folder.name, updates=reader.updates, replaced=reader.replaced, digest=files.digest
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterNeeds:
    """The slots that an adapter needs.

    targets:  last parts of the names of the modules that it changes, as in its files
    """

    max_rank: int
    targets: frozenset[str]


def read_needs(folder: Path) -> AdapterNeeds:
    """Return the slots that an adapter needs with any base model. Raises InvalidAdapter."""
    files = read_files(folder)
    parse_adapter_config(files.config)
    changed = {module: part for module, part in _by_module(files.tensors).items() if part.factors}
    ranks = [len(a) for part in changed.values() if (a := part.factors.get("A")) is not None]
    return AdapterNeeds(
        max_rank=max(ranks, default=1),
        targets=frozenset(module.rpartition(".")[2] for module in changed),
    )


@dataclass(slots=True)
class _ModuleTensors:
    """The tensors of one module; `kept` are whole ones, by `weight` or `bias`."""

    factors: dict[str, Tensor] = field(default_factory=dict)
    magnitude: Tensor | None = None
    kept: dict[str, Tensor] = field(default_factory=dict)
    is_embedding: bool = False


def listed(names: Collection[str]) -> str:
    """List names for a message, at most _MAX_SHOWN of them."""
    more = len(names) - _MAX_SHOWN
    return ", ".join(sorted(names)[:_MAX_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _by_module(tensors: Mapping[str, Tensor]) -> dict[str, _ModuleTensors]:
    """Group tensors by module. Raises InvalidAdapter for unknown names."""
    parts: dict[str, _ModuleTensors] = defaultdict(_ModuleTensors)
    unknown = []
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name.removeprefix(_PREFIX))
        if match is None or ".lora_" in match["module"]:
            unknown.append(name)
            continue
        part = parts[match["module"]]
        if match["factor"]:
            part.factors[match["factor"]] = tensor
            part.is_embedding = _EMBEDDING.search(name) is not None
        elif match["magnitude"]:
            part.magnitude = tensor
        else:
            part.kept[match["kept"]] = tensor
    if unknown:
        raise InvalidAdapter(f"the adapter holds tensors that are not supported: {listed(unknown)}")
    return parts


class _Reader:
    """Collects the updates of an adapter's modules, and the faults of the others."""

    def __init__(
        self, config: AdapterConfig, shapes: Mapping[str, tuple[int, ...]], renaming: Renaming
    ) -> None:
        self._config = config
        self._shapes = shapes
        self._renaming = renaming
        self.updates: dict[str, LowRank] = {}
        self.replaced: dict[str, Tensor] = {}
        self.faults: list[str] = []

    def add(self, module: str, part: _ModuleTensors) -> None:
        """Add one module's tensors."""
        if fault := next(self._faults(module, part), None):
            self.faults.append(fault)
            return
        for kind, tensor in part.kept.items():
            theirs = self._stored_name(module, kind)
            parts = self._renaming.parts(theirs, tensor)
            self.replaced |= zip(self._renaming.names(theirs), parts, strict=True)
        if part.factors:
            theirs = self._stored_name(module, "weight")
            self.updates |= split_update(self._update(module, part), theirs, self._renaming)

    def _faults(self, module: str, part: _ModuleTensors) -> Iterator[str]:
        tensors = [*part.factors.values(), *part.kept.values()]
        if part.magnitude is not None:
            tensors.append(part.magnitude)
        for tensor in tensors:
            if tensor.dtype not in _DTYPES:
                yield f"{module} is stored as {tensor.dtype}"
            elif not bool(torch.isfinite(tensor).all()):
                yield f"{module} holds values that are not finite"
        for kind, tensor in part.kept.items():
            yield from self._faults_of_kept(module, kind, tensor)
        if part.factors:
            yield from self._faults_of_update(module, part)
        elif part.magnitude is not None:
            yield f"{module} has a magnitude and no update"

    def _faults_of_update(self, module: str, part: _ModuleTensors) -> Iterator[str]:
        if set(part.factors) != {"A", "B"}:
            (present,) = part.factors
            yield f"{module} has lora_{present} only"
            return
        if (part.magnitude is not None) != self._config.use_dora:
            has = "has a" if part.magnitude is not None else "lacks its"
            yield f"{module} {has} magnitude, and use_dora is {self._config.use_dora}"
        if part.is_embedding and part.magnitude is not None:
            yield f"{module} is an embedding with a magnitude (DoRA), which is not supported"
        if any(factor.dim() != 2 for factor in part.factors.values()):
            yield f"{module} has updates that are not matrices"
            return
        update = self._update(module, part)
        rank = self._config.rank_of(module)
        if (update.a.shape[0], update.b.shape[1]) != (rank, rank):
            yield (
                f"{module} has ranks {update.a.shape[0]} (A) and {update.b.shape[1]} (B) instead "
                f"of {rank} as in adapter_config.json"
            )
        outputs, inputs = update.b.shape[0], update.a.shape[1]
        if update.magnitude is not None and update.magnitude.shape != (outputs,):
            yield f"{module} has a magnitude of {list(update.magnitude.shape)}"
        yield from self._faults_of_place(module, outputs, inputs)

    def _faults_of_kept(self, module: str, kind: str, tensor: Tensor) -> Iterator[str]:
        theirs = self._stored_name(module, kind)
        wanted = self._shapes_of(theirs)
        if not wanted:
            yield f"the model has no {module}.{kind}{_HINTS.get(module, '')}"
            return
        try:
            parts = self._renaming.parts(theirs, tensor)
        except (RuntimeError, IndexError):
            parts = ()
        if [tuple(part.shape) for part in parts] != wanted:
            shown = " and ".join(str(list(shape)) for shape in wanted)
            yield f"{module}.{kind} is {list(tensor.shape)} instead of {shown}"
        yield from self._faults_of_twins(module, theirs, self.replaced)

    def _faults_of_place(self, module: str, outputs: int, inputs: int) -> Iterator[str]:
        theirs = self._stored_name(module, "weight")
        wanted = self._shapes_of(theirs)
        if not wanted:
            yield f"the model has no {module}{_HINTS.get(module, '')}"
            return
        if why := self._renaming.bars_updates(theirs):
            yield f"{module} cannot be updated: {why}"
            return
        whole = [sum(shape[0] for shape in wanted), *wanted[0][1:]]
        if [outputs, inputs] != whole:
            yield f"{module} is for {[outputs, inputs]} instead of {whole}"
        yield from self._faults_of_twins(module, theirs, self.updates)

    def _faults_of_twins(self, module: str, theirs: str, taken: Collection[str]) -> Iterator[str]:
        for name in self._renaming.names(theirs):
            if name in taken:
                yield f"{module} changes {name}, which another module of the adapter also changes"

    def _stored_name(self, module: str, kind: str) -> str:
        """Return a tensor's name in the checkpoint; some adapters omit the leading `model.`."""
        name = f"{module}.{kind}"
        longer = f"model.{name}"
        return longer if not self._shapes_of(name) and self._shapes_of(longer) else name

    def _shapes_of(self, theirs: str) -> list[tuple[int, ...]]:
        """Return the shapes of the model's tensors in one of the checkpoint; [] if unknown."""
        names = self._renaming.names(theirs)
        return [self._shapes[name] for name in names] if self._shapes.keys() >= {*names} else []

    def _update(self, module: str, part: _ModuleTensors) -> LowRank:
        a, b = part.factors["A"], part.factors["B"]
        if part.is_embedding:  # a lookup of rows: [vocabulary, hidden] += A^T B^T
            a, b = b.T, a.T
        magnitude = None if part.magnitude is None else part.magnitude.flatten()
        return LowRank(a=a, b=b, scale=self._config.scale_of(module), magnitude=magnitude)
