"""Adapters beside the weights of one rank: its share of each in the host's memory, ready for slots.

An adapter is read, checked and cut by `prepare`, in any thread and as long as it takes; `install`
copies it into a slot between two steps. What an instance holds never changes: a name that is loaded
anew is another instance. Knows neither names nor who uses what.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from remora.configs.errors import InvalidAdapter
from remora.configs.planning.lora_slots import LoRASlotConfig
from remora.engine.protocols import AdapterFacts, Renaming, UpdatePlace, WeightSource
from remora.lora.adapter import Adapter, LowRank, read_adapter

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_MAX_SHOWN = 8


@dataclass(frozen=True, slots=True)
class _Share:
    """What this rank holds of the update of one weight, in the order of LowRankSlots.write.

    a:  [rank, inputs held];  b: [outputs held, rank], scaled
    """

    place: UpdatePlace
    a: Tensor
    b: Tensor


class CpuAdapterPool:
    """AdapterPool of one rank.

    places:    of updates, by the names of all weights that have one; None = on another stage
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
        # The head is updated apart from the embedding, also where they share a weight.
        self._shapes = {_HEAD: shapes[_EMBEDDING], **shapes}
        self._slots = {id(place.slots): place.slots for place in places.values() if place}
        self._shares: dict[int, tuple[_Share, ...]] = {}
        self._lock = threading.Lock()

    def prepare(self, lora_id: int, folder: Path) -> AdapterFacts:
        """Read an adapter, check it and keep this rank's share. Raises InvalidAdapter."""
        adapter = read_adapter(folder, self._shapes, self._renaming)
        self._check(adapter, folder)
        shares = tuple(self._cut(adapter))
        with self._lock:
            self._shares[lora_id] = shares
        return AdapterFacts(
            max_rank=adapter.max_rank,
            num_bytes=sum(share.a.nbytes + share.b.nbytes for share in shares),
            digest=adapter.digest,
        )

    def discard(self, lora_id: int) -> None:
        """Forget an adapter that will not be installed any more; also one that is not there."""
        with self._lock:
            self._shares.pop(lora_id, None)

    def install(self, slot: int, lora_id: int) -> None:
        """Put an adapter into a slot, counted from 1, in the place of what is there."""
        with self._lock:
            shares = self._shares[lora_id]
        for slots in self._slots.values():
            slots.clear(slot - 1)
        for share in shares:
            share.place.slots.write(slot - 1, share.place.part, share.a, share.b)

    def _check(self, adapter: Adapter, folder: Path) -> None:
        """Raise InvalidAdapter if an adapter cannot lie beside the weights."""
        room, faults = self._room, []
        replaced = self._changed(adapter.replaced)
        if replaced:
            faults.append(
                f"it replaces whole tensors ({_some(replaced)}; modules_to_save), which only an "
                "adapter that is served alone, merged into the weights, may do"
            )
        if any(update.magnitude is not None for update in adapter.updates.values()):
            faults.append(
                "it is a DoRA (use_dora), which only an adapter that is served alone, merged into "
                "the weights, may be"
            )
        strange = [name for name in adapter.updates if _module(name) not in room.targets]
        if strange:
            faults.append(
                f"it changes {_some(strange)}, and there is room for changes of "
                f"{', '.join(room.targets)} only"
            )
        placeless = adapter.updates.keys() - self._places.keys() - {*strange}
        if placeless:
            faults.append(
                f"it changes {_some(placeless)}, beside which nothing can lie (routed experts and "
                "what chooses them, latent attention, positions): only an adapter that is served "
                "alone, merged into the weights, may do so"
            )
        if adapter.max_rank > room.max_rank:
            faults.append(
                f"its rank is {adapter.max_rank}, and there is room for {room.max_rank}; set "
                f"lora.max_lora_rank to {adapter.max_rank} or more"
            )
        if faults:
            raise InvalidAdapter(f"the adapter {folder} cannot be loaded: {'; '.join(faults)}")

    def _changed(self, replaced: Mapping[str, Tensor]) -> list[str]:
        """Return which tensors are not the base's: PEFT stores embedding and head with updates."""
        changed = []
        for name, tensor in replaced.items():
            stored = name if name in self._base.shapes() else _EMBEDDING  # of a head that is tied
            ((_, own),) = self._base.read([stored])
            if not torch.equal(own.to(tensor.dtype), tensor):
                changed.append(name)
        return changed

    def _cut(self, adapter: Adapter) -> Iterable[_Share]:
        for name, update in adapter.updates.items():
            place = self._places.get(name)
            if place is not None:
                yield _cut(update, place)


def _cut(update: LowRank, place: UpdatePlace) -> _Share:
    """Return a rank's share, in the number format of its slots."""
    a, b = (update.b.T, update.a.T) if place.is_lookup else (update.a, update.b)
    dtype = place.slots.a.dtype
    scaled = b[place.outputs].float() * update.scale
    return _Share(
        place=place,
        a=a[:, place.inputs].to(dtype, copy=True),
        b=scaled.to(dtype),
    )


def _module(name: str) -> str:
    """Return the last word of a module's name."""
    return name.removesuffix(".weight").rpartition(".")[2]


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    more = len(listed) - _MAX_SHOWN
    return ", ".join(listed[:_MAX_SHOWN]) + (f" and {more} more" if more > 0 else "")
