"""The adapters of one rank in CPU memory, ready to be copied into slots on the device.

`prepare` reads and checks an adapter and keeps this rank's shard, in any thread; `install` copies
it into a slot between two steps. The content of a lora_id never changes: a reloaded name gets a
new lora_id. Knows neither names nor requests.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from remora.configs.errors import InvalidAdapter
from remora.configs.planning.lora_slots import LoRASlotConfig
from remora.engine.protocols import AdapterFacts, Renaming, UpdatePlace, WeightSource
from remora.lora.adapter import Adapter, LowRank, listed, read_adapter

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_ONLY_MERGED = "requires that the adapter is served alone, merged into the weights"


@dataclass(frozen=True, slots=True)
class _ShardedUpdate:
    """This rank's shard of the update of one weight, as LowRankSlots.write takes it.

    a:  [rank, inputs of this rank];  b: [outputs of this rank, rank], scaled
    """

    place: UpdatePlace
    a: Tensor
    b: Tensor


class CpuAdapterPool:
    """AdapterPool of one rank.

    places:    slots of updates, by the names of all weights that have some; None = other stage
    base:      the weights of the model
    renaming:  of its checkpoint
    """

    def __init__(
        self,
        room: LoRASlotConfig,
        places: Mapping[str, UpdatePlace | None],
        base: WeightSource,
        renaming: Renaming,
    ) -> None:
        self._room = room
        self._places = places
        self._base = base
        self._renaming = renaming
        shapes = base.shapes()
        # The head is updated separately from the embedding, even where they share a weight.
        self._shapes = {_HEAD: shapes[_EMBEDDING], **shapes}
        self._slots = {id(place.slots): place.slots for place in places.values() if place}
        self._updates: dict[int, tuple[_ShardedUpdate, ...]] = {}
        self._lock = threading.Lock()

    def prepare(self, lora_id: int, folder: Path) -> AdapterFacts:
        """Read an adapter, check it and keep this rank's shard. Raises InvalidAdapter."""
        adapter = read_adapter(folder, self._shapes, self._renaming)
        self._check(adapter, folder)
        updates = tuple(
            _shard(update, place)
            for name, update in adapter.updates.items()
            if (place := self._places.get(name)) is not None
        )
        with self._lock:
            self._updates[lora_id] = updates
        return AdapterFacts(
            max_rank=adapter.max_rank,
            num_bytes=sum(update.a.nbytes + update.b.nbytes for update in updates),
            digest=adapter.digest,
        )

    def discard(self, lora_id: int) -> None:
        """Free an adapter that is not installed any more; no error if it is unknown."""
        with self._lock:
            self._updates.pop(lora_id, None)

    def install(self, slot: int, lora_id: int) -> None:
        """Write an adapter into a slot, counted from 1, and overwrite its content."""
        with self._lock:
            updates = self._updates[lora_id]
        for slots in self._slots.values():
            slots.clear(slot - 1)
        for update in updates:
            update.place.slots.write(slot - 1, update.place.part, update.a, update.b)

    def _check(self, adapter: Adapter, folder: Path) -> None:
        """Raise InvalidAdapter if an adapter cannot be used from a slot."""
        room, faults = self._room, []
        replaced = self._changed(adapter.replaced)
        if replaced:
            faults.append(
                f"it replaces whole tensors ({listed(replaced)}; modules_to_save), which "
                f"{_ONLY_MERGED}"
            )
        if any(update.magnitude is not None for update in adapter.updates.values()):
            faults.append(f"it uses DoRA (use_dora), which {_ONLY_MERGED}")
        modules = {name: name.removesuffix(".weight") for name in adapter.updates}
        others = [n for n, module in modules.items() if module.split(".")[-1] not in room.targets]
        if others:
            faults.append(
                f"it changes {listed(others)}, and the slots hold changes of "
                f"{', '.join(room.targets)} only"
            )
        unslotted = adapter.updates.keys() - self._places.keys() - {*others}
        if unslotted:
            faults.append(
                f"it changes {listed(unslotted)}, which have no slots (routed experts and their "
                f"routers, latent attention, positions); this {_ONLY_MERGED}"
            )
        if adapter.max_rank > room.max_rank:
            faults.append(
                f"its rank is {adapter.max_rank}, and the slots hold ranks up to {room.max_rank}; "
                f"set lora.max_lora_rank to {adapter.max_rank} or more"
            )
        if faults:
            raise InvalidAdapter(f"the adapter {folder} cannot be loaded: {'; '.join(faults)}")

    def _changed(self, replaced: Mapping[str, Tensor]) -> list[str]:
        """Return the tensors that differ from the base's: PEFT stores unchanged ones, too."""
        changed = []
        for name, tensor in replaced.items():
            stored = name if name in self._base.shapes() else _EMBEDDING  # a tied head
            ((_, own),) = self._base.read([stored])
            if not torch.equal(own.to(tensor.dtype), tensor):
                changed.append(name)
        return changed


def _shard(update: LowRank, place: UpdatePlace) -> _ShardedUpdate:
    """Return a rank's shard in the dtype of its slots."""
    a, b = (update.b.T, update.a.T) if place.is_lookup else (update.a, update.b)
    dtype = place.slots.a.dtype
    scaled = b[place.outputs].float() * update.scale
    return _ShardedUpdate(place, a[:, place.inputs].to(dtype, copy=True), scaled.to(dtype))
