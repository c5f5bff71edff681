"""A LoRA adapter: what it changes of which tensor of the base model.

Made from a PEFT folder and checked against the base before anybody gets it: names, shapes, ranks
and values. Fused modules (qkv_proj, gate_up_proj) become the base's separate ones; an update of the
embedding becomes one of its weight like any other's.

Legend: O outputs, I inputs, r rank.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from remora.configs.errors import InvalidAdapter
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
# What a fused module is made of, in the order of its rows.
_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_HINTS = {"lm_head": " of its own: its head is the embedding's weight (tie_word_embeddings)"}
_MAX_SHOWN = 8
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LowRank:
    """An update of a weight [O, I]: W + scale B A.

    a:          [r, I]
    b:          [O, r]
    magnitude:  [O] or None; the length that each row is brought to after the update (DoRA,
                arXiv:2402.09353)
    """

    a: Tensor
    b: Tensor
    scale: float
    magnitude: Tensor | None = None

    @property
    def rank(self) -> int:
        """r."""
        return self.a.shape[0]

    def rows(self, start: int, stop: int) -> LowRank:
        """Return the update of rows of the weight only."""
        magnitude = None if self.magnitude is None else self.magnitude[start:stop]
        return LowRank(a=self.a, b=self.b[start:stop], scale=self.scale, magnitude=magnitude)

    def updated(self, weight: Tensor) -> Tensor:
        """Return the updated weight [O, I] in float32."""
        product = self.b.float() @ self.a.float()
        whole = weight.float() + self.scale * product
        if self.magnitude is None:
            return whole
        return whole.mul_((self.magnitude.float() / whole.norm(dim=1)).unsqueeze(1))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Adapter:
    """All that an adapter changes, by names of the base's tensors.

    label:     for people
    updates:   low-rank changes of weights
    replaced:  tensors that the adapter brings along whole
    digest:    which differs between adapters
    """

    label: str
    updates: Mapping[str, LowRank]
    replaced: Mapping[str, Tensor]
    digest: str

    @property
    def max_rank(self) -> int:
        """The largest rank of an update."""
        return max((update.rank for update in self.updates.values()), default=0)


def read_adapter(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> Adapter:
    """Read a PEFT folder and check it against the base model.

    shapes:  of all tensors of the base model, by their names in its checkpoint
    Raises InvalidAdapter, which says all that was found wrong.
    """
    files = read_files(folder)
    config = parse_adapter_config(files.config)
    parts = _sorted_out(files.tensors)
    reader = _Reader(config, shapes)
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
    """The room that an adapter takes beside the weights.

    targets:  last words of the names of the modules that it changes, those of fused ones apart
    """

    max_rank: int
    targets: frozenset[str]


def read_needs(folder: Path) -> AdapterNeeds:
    """Return what an adapter needs, whatever the base model. Raises InvalidAdapter."""
    files = read_files(folder)
    parse_adapter_config(files.config)
    changed = {module: part for module, part in _sorted_out(files.tensors).items() if part.factors}
    ranks = [len(a) for part in changed.values() if (a := part.factors.get("A")) is not None]
    words = {module.rpartition(".")[2] for module in changed}
    return AdapterNeeds(
        max_rank=max(ranks, default=1),
        targets=frozenset(part for word in words for part in _FUSED.get(word, (word,))),
    )


@dataclass(slots=True)
class _Part:
    """The tensors of one module; `kept` are whole ones, by weight or bias."""

    factors: dict[str, Tensor] = field(default_factory=dict)
    magnitude: Tensor | None = None
    kept: dict[str, Tensor] = field(default_factory=dict)
    is_embedding: bool = False


def _sorted_out(tensors: Mapping[str, Tensor]) -> dict[str, _Part]:
    """Put tensors together by module. Raises InvalidAdapter on names that mean nothing to us."""
    parts: dict[str, _Part] = defaultdict(_Part)
    strange = []
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name.removeprefix(_PREFIX))
        if match is None or ".lora_" in match["module"]:
            strange.append(name)
            continue
        part = parts[match["module"]]
        if match["factor"]:
            part.factors[match["factor"]] = tensor
            part.is_embedding = _EMBEDDING.search(name) is not None
        elif match["magnitude"]:
            part.magnitude = tensor
        else:
            part.kept[match["kept"]] = tensor
    if strange:
        raise InvalidAdapter(
            f"the adapter holds tensors that are not supported: {', '.join(strange[:_MAX_SHOWN])}"
            + (f" and {len(strange) - _MAX_SHOWN} more" if len(strange) > _MAX_SHOWN else "")
        )
    return parts


class _Reader:
    """Goes over an adapter's modules; what fits is kept, what does not becomes a fault."""

    def __init__(self, config: AdapterConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._config = config
        self._shapes = shapes
        self.updates: dict[str, LowRank] = {}
        self.replaced: dict[str, Tensor] = {}
        self.faults: list[str] = []

    def add(self, module: str, part: _Part) -> None:
        """Take one module's tensors."""
        for fault in self._faults(module, part):
            self.faults.append(fault)
            return
        for kind, tensor in part.kept.items():
            self.replaced[self._base_name(module, kind)] = tensor
        if part.factors:
            self.updates |= dict(self._split(module, self._update(module, part)))

    def _faults(self, module: str, part: _Part) -> Iterator[str]:
        tensors = [*part.factors.values(), *part.kept.values()]
        if part.magnitude is not None:
            tensors.append(part.magnitude)
        for tensor in tensors:
            if tensor.dtype not in _DTYPES:
                yield f"{module} is stored as {tensor.dtype}"
            elif not bool(torch.isfinite(tensor).all()):
                yield f"{module} holds values that are not finite"
        for kind, tensor in part.kept.items():
            yield from self._faults_of_shape(f"{module}.{kind}", module, kind, tensor.shape)
        if part.factors:
            yield from self._faults_of_update(module, part)
        elif part.magnitude is not None:
            yield f"{module} has a magnitude and no update"

    def _faults_of_update(self, module: str, part: _Part) -> Iterator[str]:
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
            yield f"{module} has updates that are no matrices"
            return
        update = self._update(module, part)
        rank = self._config.rank_of(module)
        if (update.a.shape[0], update.b.shape[1]) != (rank, rank):
            yield (
                f"{module} has ranks {update.a.shape[0]} (A) and {update.b.shape[1]} (B) instead "
                f"of {rank}, which adapter_config.json says"
            )
        outputs, inputs = update.b.shape[0], update.a.shape[1]
        if update.magnitude is not None and update.magnitude.shape != (outputs,):
            yield f"{module} has a magnitude of {list(update.magnitude.shape)}"
        yield from self._faults_of_shape(module, module, "weight", (outputs, inputs))

    def _faults_of_shape(
        self, shown: str, module: str, kind: str, shape: tuple[int, ...]
    ) -> Iterator[str]:
        parts = [self._shapes.get(self._base_name(part, kind)) for part in self._separate(module)]
        if any(part is None for part in parts):
            yield f"the model has no {shown}{_HINTS.get(module, '')}"
            return
        found = [part for part in parts if part is not None]
        wanted = (sum(part[0] for part in found), *found[0][1:])
        if tuple(shape) != wanted:
            yield f"{shown} is for {list(shape)} instead of {list(wanted)}"
        elif len(parts) > 1 and kind != "weight":
            yield f"{shown} is replaced as a whole, which is not supported for fused modules"

    def _base_name(self, module: str, kind: str) -> str:
        """Return a tensor's name in the checkpoint; some adapters leave the first word out."""
        name = f"{module}.{kind}"
        longer = f"model.{name}"
        return longer if name not in self._shapes and longer in self._shapes else name

    def _update(self, module: str, part: _Part) -> LowRank:
        a, b = part.factors["A"], part.factors["B"]
        if part.is_embedding:  # it looks rows up: [vocabulary, hidden] += A^T B^T
            a, b = b.T, a.T
        magnitude = None if part.magnitude is None else part.magnitude.flatten()
        return LowRank(a=a, b=b, scale=self._config.scale_of(module), magnitude=magnitude)

    def _split(self, module: str, update: LowRank) -> Iterator[tuple[str, LowRank]]:
        start = 0
        for part in self._separate(module):
            name = self._base_name(part, "weight")
            stop = start + self._shapes[name][0]
            yield name, update.rows(start, stop)
            start = stop

    def _separate(self, module: str) -> list[str]:
        """Return the modules that the base has in the place of a fused one; else the module."""
        parent, dot, last = module.rpartition(".")
        if last not in _FUSED or self._base_name(module, "weight") in self._shapes:
            return [module]
        return [f"{parent}{dot}{part}" for part in _FUSED[last]]
