"""From a configuration's adapters to what an engine does about them.

One adapter alone is merged into the weights, which costs nothing afterwards. Several lie beside
the weights, and requests choose.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal

from remora.configs.errors import ConfigError, InvalidAdapter
from remora.configs.planning.lora_slots import LoRASlotConfig
from remora.configs.sections.lora import LoraSection
from remora.engine.protocols import (
    NO_ADAPTERS,
    AdapterPool,
    Adapting,
    Renaming,
    UpdatePlace,
    WeightSource,
)
from remora.lora.adapter import read_needs
from remora.lora.cpu_pool import CpuAdapterPool
from remora.lora.files import read_files
from remora.lora.merge import merging
from remora.lora.sources import local_folders

log = logging.getLogger(__name__)

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
USUAL_RANK = 16


def configured(section: LoraSection) -> Adapting:
    """Return what a configuration asks for. Raises ConfigError for adapters that are broken."""
    if section.dynamic:
        return _room_only(section)
    if not section.adapters:
        return NO_ADAPTERS
    if section.merges:
        return Adapting(edit=merging(Path(section.adapters[0].path)))
    return pooling(
        {adapter.name: Path(adapter.path) for adapter in section.adapters},
        num_slots=min(section.max_loras_per_batch, len(section.adapters)),
        max_rank=section.max_lora_rank,
        targets=section.target_modules,
        eviction=section.eviction,
    )


def _room_only(section: LoraSection) -> Adapting:
    """Make room for adapters that are to come, and for those that are there, if they are whole."""
    needs = []
    for folder in local_folders(section):
        try:
            needs.append(read_needs(folder))
        except InvalidAdapter as error:
            log.warning("%s", error)
    return pooling(
        num_slots=section.max_loras_per_batch,
        max_rank=section.max_lora_rank or max((need.max_rank for need in needs), default=None),
        targets=section.target_modules,
        usual={*LINEARS, *(target for need in needs for target in need.targets)},
        eviction=section.eviction,
    )


def pooling(
    folders: Mapping[str, Path] | None = None,
    *,
    num_slots: int = 8,
    max_rank: int | None = None,
    targets: Collection[str] | None = None,
    usual: Collection[str] = LINEARS,
    eviction: Literal["lru", "fifo"] = "lru",
) -> Adapting:
    """Return what serves adapters beside the base model, each by its name.

    folders:    of adapters that are there from the start
    num_slots:  most adapters of one step
    max_rank:   most that is accepted; None = what these adapters need
    targets:    last words of the names of modules that may be changed; None = those that these
                adapters change, or `usual` if there are no adapters yet
    eviction:   which adapter leaves its slot first
    Raises ConfigError.
    """
    folders = folders or {}
    try:
        needs = [read_needs(folder) for folder in folders.values()]
    except InvalidAdapter as error:
        raise ConfigError(str(error)) from error
    changed = {target for need in needs for target in need.targets}
    room = LoRASlotConfig(
        num_slots=num_slots,
        max_rank=max_rank or max((need.max_rank for need in needs), default=USUAL_RANK),
        targets=tuple(sorted(targets or changed or usual)),
        eviction=eviction,
    )
    lora_ids = {name: instance for instance, name in enumerate(folders, 1)}

    def make_pool(
        room: LoRASlotConfig,
        places: Mapping[str, UpdatePlace | None],
        base: WeightSource,
        renaming: Renaming,
    ) -> AdapterPool:
        if targets:
            _check_targets(room, places)
        pool = CpuAdapterPool(room, places, base, renaming)
        try:
            for instance, folder in enumerate(folders.values(), 1):
                pool.prepare(instance, folder)
        except InvalidAdapter as error:
            raise ConfigError(str(error)) from error
        return pool

    return Adapting(room=room, make_pool=make_pool, lora_ids=lora_ids)


def _check_targets(room: LoRASlotConfig, places: Mapping[str, UpdatePlace | None]) -> None:
    there = {name.split(".")[-2] for name in places}
    if unknown := sorted(set(room.targets) - there):
        raise ConfigError(
            f"lora.target_modules names {', '.join(unknown)}, and this model has no such modules "
            "that adapters may change: leave them out, or unset it for all linear layers"
        )


def digests(section: LoraSection) -> tuple[str, ...]:
    """Return what differs where the adapters' files do, of those that are there from the start.

    Those that may come and go are compared when they are loaded. Raises ConfigError.
    """
    if section.dynamic:
        return ()
    try:
        return tuple(read_files(Path(adapter.path)).digest for adapter in section.adapters)
    except InvalidAdapter as error:
        raise ConfigError(str(error)) from error
