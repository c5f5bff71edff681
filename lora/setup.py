"""Turns a configuration's adapters into the engine's `Adapting`.

A single adapter is merged into the weights, which costs nothing per step. Several are kept in
slots, and each request names its own.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal

from remora.configs.errors import ConfigError, InvalidAdapter, Unavailable
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
from remora.lora.files import read_files, resolved
from remora.lora.merge import merging
from remora.lora.sources import Sources, is_remote_source, local_folders

log = logging.getLogger(__name__)

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
USUAL_RANK = 16


def configured(section: LoraSection) -> Adapting:
    """Return the adapters of a configuration. Raises ConfigError for broken adapters."""
    if section.dynamic:
        return _dynamic(section)
    if not section.adapters:
        return NO_ADAPTERS
    if section.merges:
        (folder,) = _static_folders(section).values()
        return Adapting(edit=merging(folder))
    return pooling(
        _static_folders(section),
        num_slots=min(section.max_loras_per_batch, len(section.adapters)),
        max_rank=section.max_lora_rank,
        targets=section.target_modules,
        eviction=section.eviction,
    )


def _static_folders(section: LoraSection) -> dict[str, Path]:
    """Return the folders of the configured adapters by name; remote ones are downloaded.

    Raises ConfigError.
    """
    sources = Sources.configured(section)
    folders = {}
    for adapter in section.adapters:
        try:
            is_remote = is_remote_source(adapter.path)
            folders[adapter.name] = sources.fetch(adapter.path) if is_remote else Path(adapter.path)
        except (InvalidAdapter, Unavailable) as error:
            raise ConfigError(f"lora.adapters, {adapter.name}: {error}") from error
    return folders


def _dynamic(section: LoraSection) -> Adapting:
    """Plan slots for adapters that are loaded later, sized by the valid ones that exist now."""
    needs = []
    for folder in local_folders(section):
        try:
            needs.append(read_needs(resolved(folder)))
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
    """Serve several adapters next to the base model, each by its name.

    folders:    of the adapters to load at the start
    num_slots:  largest number of adapters in one step
    max_rank:   largest rank that is accepted; None = the largest of these adapters
    targets:    last parts of the names of modules that adapters may change; None = the modules
                that these adapters change, or `usual` if there are no adapters yet
    eviction:   which adapter is evicted from its slot first
    Raises ConfigError.
    """
    folders = {name: resolved(folder) for name, folder in (folders or {}).items()}
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
    lora_ids = {name: lora_id for lora_id, name in enumerate(folders, 1)}

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
            for lora_id, folder in enumerate(folders.values(), 1):
                pool.prepare(lora_id, folder)
        except InvalidAdapter as error:
            raise ConfigError(str(error)) from error
        return pool

    return Adapting(room=room, make_pool=make_pool, lora_ids=lora_ids)


def _check_targets(room: LoRASlotConfig, places: Mapping[str, UpdatePlace | None]) -> None:
    there = {name.split(".")[-2] for name in places}
    if unknown := sorted(set(room.targets) - there):
        raise ConfigError(
            f"lora.target_modules names {', '.join(unknown)}, but this model has no such modules "
            "that adapters may change: remove them, or unset the key for all linear layers"
        )


def digests(section: LoraSection) -> tuple[str, ...]:
    """Return the digests of the configured adapters' files, to compare between ranks.

    Empty if lora.dynamic is set: adapters are then compared when they are loaded.
    Raises ConfigError.
    """
    if section.dynamic:
        return ()
    try:
        folders = _static_folders(section).values()
        return tuple(read_files(resolved(folder)).digest for folder in folders)
    except InvalidAdapter as error:
        raise ConfigError(str(error)) from error
