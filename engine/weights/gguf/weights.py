"""Reads weights from GGUF files, with the model's names and in Hugging Face's row order.

Quantised blocks are dequantised one tensor at a time, or taken as stored. The families' differences
are in `families.py`; this module undoes what converters do to values: rows of q and k in the order
of interleaved rotation, norms with an offset, latent attention's projection in two halves.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from remora.configs.errors import ConfigError
from remora.engine.protocols import QuantisedTensor
from remora.engine.weights.gguf.families import family_of
from remora.engine.weights.gguf.family import head_dim, num_layers, whole
from remora.engine.weights.gguf.file import GGUFFile, GGUFTensor, read_gguf
from remora.engine.weights.gguf.names import QKV, is_weight, our_names
from remora.kernels.quantised.weight_kinds import WeightKind

KEYS, VALUES, BOTH = "k_b_proj.weight", "v_b_proj.weight", "kv_b_proj.weight"


class GGUFWeights:
    """WeightSource over the tensors of a GGUF model, the largest first.

    The extra copy of a tensor that is being read is then smaller than the tensors still to load.

    dtype:        of dequantised tensors
    num_threads:  threads that dequantise
    """

    def __init__(
        self, path: Path, *, dtype: torch.dtype = torch.float32, num_threads: int = 1
    ) -> None:
        self.label = path.name
        self._dtype, self._num_threads = dtype, num_threads
        file = read_gguf(path)
        self._family = family_of(file)
        self._permuted_heads: dict[str, int] = {}
        if self._family.is_permuted:
            num_heads = whole(file, "attention.head_count")
            num_kv_heads = whole(file, "attention.head_count_kv", num_heads)
            self._permuted_heads = {"q_proj": num_heads, "k_proj": num_kv_heads}
        last = num_layers(file)
        named = [
            (name, tensor)
            for stored in file.tensors
            if is_weight(stored.name, last)
            for name, tensor in _parts(stored, our_names(stored.name, self._family.names), file)
        ]
        named.sort(key=lambda pair: math.prod(pair[1].shape), reverse=True)
        self._tensors = dict(named)
        self._halves = _take_halves(self._tensors)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of every tensor."""
        plain = {name: tensor.shape for name, tensor in self._tensors.items()}
        return plain | {name: _joined_shape(*halves) for name, halves in self._halves.items()}

    def read(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of these names."""
        for name, tensor in self._tensors.items():
            if name in names:
                yield name, self._as_trained(name, self._values(tensor))
        for name, (keys, values) in self._halves.items():
            if name in names:
                yield name, joined(self._values(keys), self._values(values))

    def quantised(self) -> Mapping[str, QuantisedTensor]:
        """Return the weights whose blocks are known as a kind."""
        return {
            name: QuantisedTensor(label=tensor.kind.name, shape=tensor.shape)
            for name, tensor in self._tensors.items()
            if tensor.is_kind
        }

    def kinds(self, names: Collection[str]) -> Iterator[tuple[str, WeightKind]]:
        """Yield the weights of these names, in blocks as stored."""
        for name, tensor in self._tensors.items():
            if name in names and tensor.is_kind:
                kind, num_heads = tensor.weight(), self._num_permuted(name)
                if num_heads:
                    kind = kind.select(half_split_rows(torch.arange(kind.shape[0]), num_heads))
                yield name, kind

    def _values(self, tensor: GGUFTensor) -> Tensor:
        return tensor.read(self._dtype, num_threads=self._num_threads)

    def _num_permuted(self, name: str) -> int:
        """Return how many heads have their rows in the order of interleaved rotation."""
        return self._permuted_heads.get(name.split(".")[-2], 0)

    def _as_trained(self, name: str, values: Tensor) -> Tensor:
        num_heads = self._num_permuted(name)
        if num_heads:
            return half_split_rows(values, num_heads)
        if self._family.norm_offset and name.endswith("norm.weight"):
            return values - self._family.norm_offset
        return values


def _parts(
    tensor: GGUFTensor, names: tuple[str, ...], file: GGUFFile
) -> Iterator[tuple[str, GGUFTensor]]:
    """Yield the parts of a tensor with their names."""
    if "{}" in names[0]:
        for number in range(tensor.shape[0]):
            one = tensor.rows(number, 1)
            yield names[0].format(number), replace(one, shape=tensor.shape[1:])
    elif len(names) > 1:
        first = 0
        for name, count in zip(names, _row_counts(tensor, names, file), strict=True):
            yield name, tensor.rows(first, count)
            first += count
    elif names[0].endswith("shared_expert_gate.weight"):
        yield names[0], replace(tensor, shape=(1, tensor.shape[-1]))
    else:
        yield names[0], tensor


def _row_counts(tensor: GGUFTensor, names: tuple[str, ...], file: GGUFFile) -> tuple[int, ...]:
    """Return the number of rows of each projection in a tensor."""
    counts = (tensor.shape[0] // len(names),) * len(names)
    if all(QKV[at] in name for at, name in enumerate(names)):
        num_heads = whole(file, "attention.head_count")
        num_kv_heads = whole(file, "attention.head_count_kv", num_heads)
        counts = tuple(heads * head_dim(file) for heads in (num_heads, num_kv_heads, num_kv_heads))
    if sum(counts) != tensor.shape[0]:
        raise ConfigError(
            f"{tensor.file}: {tensor.name} has {tensor.shape[0]} rows, which are not those of "
            f"{len(names)} products of {', '.join(map(str, counts))} rows. "
            "Is the file of the model that its metadata describes?"
        )
    return counts


def _take_halves(
    tensors: dict[str, GGUFTensor],
) -> dict[str, tuple[GGUFTensor, GGUFTensor]]:
    """Remove the two halves that map latents to keys and values, where they are separate tensors.

    Some files also hold the whole tensor, which is then kept.
    """
    halves = {}
    for name in [name for name in tensors if name.endswith(KEYS)]:
        prefix = name.removesuffix(KEYS)
        keys, values = tensors.pop(name), tensors.pop(f"{prefix}{VALUES}", None)
        if values is None:
            raise ConfigError(
                f"{keys.file} has {keys.name} without its attn_v_b. Is the download complete?"
            )
        if f"{prefix}{BOTH}" not in tensors:
            halves[f"{prefix}{BOTH}"] = (keys, values)
    return halves


def _joined_shape(keys: GGUFTensor, values: GGUFTensor) -> tuple[int, int]:
    num_heads, size, key_size = keys.shape
    return num_heads * (key_size + values.shape[1]), size


def joined(keys: Tensor, values: Tensor) -> Tensor:
    """Join the halves: for each head the rows of its key, then those of its value.

    keys:    [num_heads, latent, key], transposed
    values:  [num_heads, value, latent]
    """
    return torch.cat((keys.transpose(1, 2), values), dim=1).flatten(0, 1)


def half_split_rows(values: Tensor, num_heads: int) -> Tensor:
    """Undo the row order of interleaved rotation: pairs (2i, 2i + 1) become (i, i + dim / 2).

    values:  [num_heads * head_dim, ...]
    """
    pairs = values.view(num_heads, -1, 2, *values.shape[1:])
    return pairs.transpose(1, 2).reshape(values.shape)
