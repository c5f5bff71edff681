"""Moves the weights of a loaded model's layers to host memory, as the plan says.

A layer's tensors become views of a buffer on the device, at addresses that never change, into which
`fetcher.py` copies its weights before the layer runs. Norms, routers, biases and adapters stay.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from remora.configs.errors import ConfigError
from remora.configs.machine import read_machine_facts
from remora.configs.planning.kv_budget import human_bytes
from remora.configs.planning.offload_plan import OffloadPlan
from remora.configs.planning.plan import EnginePlan
from remora.engine.fallback.model import FallbackModel
from remora.engine.models.decoder import DecoderBlock, DecoderModel
from remora.engine.offload.fetcher import LayerFetcher
from remora.engine.offload.host_memory import HostWeights
from remora.engine.offload.streams import CopyStreams, copies_to

logger = logging.getLogger(__name__)


class FetchedBlock:
    """A layer at which copies of weights start, or that waits for its own.

    number:    of the layer among the offloaded ones; None = its weights are on the device
    is_first:  whether a pass begins with this layer
    """

    def __init__(
        self, block: DecoderBlock, fetcher: LayerFetcher, number: int | None, *, is_first: bool
    ) -> None:
        self._block, self._fetcher = block, fetcher
        self._number, self._is_first = number, is_first

    def __call__(self, *inputs: Any) -> tuple[Tensor, Tensor]:
        """Run the layer."""
        if self._is_first:
            self._fetcher.begin()
        if self._number is None:
            return self._block(*inputs)
        self._fetcher.acquire(self._number)
        made = self._block(*inputs)
        self._fetcher.release(self._number)
        return made

    def __getattr__(self, name: str) -> Any:
        return getattr(self._block, name)


def offload(model: DecoderModel, plan: OffloadPlan, streams: CopyStreams) -> LayerFetcher | None:
    """Move the weights of the plan's layers to host memory; None = the rank has none of them.

    All weights must be loaded, and adapter slots and routers are not touched.
    """
    chosen = [n for n, layer in enumerate(model.layers) if layer in plan.layers]
    if not chosen:
        return None
    held: list[HostWeights] = []
    for number in chosen:
        holders = list(model.blocks[number].weight_holders())
        tensors = [tensor for holder in holders for tensor in holder.weight_tensors()]
        held.append(HostWeights(tensors, streams.pinned))
        del tensors
        for holder in holders:  # so that one layer at a time is in host memory twice
            holder.set_weight_tensors([each.new_empty(0) for each in holder.weight_tensors()])
    fetcher = LayerFetcher([weights.chunks for weights in held], plan.prefetch, streams)
    numbers = {number: layer for layer, number in enumerate(chosen)}
    for number, layer in numbers.items():
        views = held[layer].tensors(fetcher.buffer(layer))
        for holder in model.blocks[number].weight_holders():
            holder.set_weight_tensors([next(views) for _ in holder.weight_tensors()])
    for number in sorted({0, *chosen}):
        block = FetchedBlock(
            model.blocks[number], fetcher, numbers.get(number), is_first=number == 0
        )
        model.blocks[number] = cast("DecoderBlock", block)
    logger.info(
        "offload: weights of %d layers, %s, are in host memory; buffers on the device take %s",
        len(chosen),
        human_bytes(sum(weights.num_bytes for weights in held)),
        human_bytes(sum(map(len, fetcher.buffers))),
    )
    return fetcher


def offload_as_planned(model: DecoderModel | FallbackModel, plan: EnginePlan) -> None:
    """Do what `offload` does if the plan offloads layers."""
    if plan.offload is None:
        return
    assert isinstance(model, DecoderModel), "plans refuse offloading of others"
    with torch.inference_mode():
        offload(model, plan.offload, copies_to(torch.device(plan.device)))


def check_host_memory(plan: EnginePlan, free_bytes: Callable[[], int] | None = None) -> None:
    """Raise ConfigError if the weights to be offloaded do not fit the free host memory.

    free_bytes:  returns the bytes that can be allocated; None = asks the machine
    """
    if plan.offload is None:
        return
    needed, free = plan.offload.host_bytes, (free_bytes or _free_bytes)()
    if needed > free:
        raise ConfigError(
            f"offload: weights of {len(plan.offload.layers)} layers need {human_bytes(needed)} of "
            f"host memory for a rank, and {human_bytes(free)} are free; keep fewer layers there "
            "(offload.host_memory, offload.num_in_group), or free memory"
        )


def _free_bytes() -> int:
    return read_machine_facts(devices=("cpu",)).available_bytes
