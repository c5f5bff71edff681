"""The section `offload`: weights of layers in host memory, copied to the GPU before their use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from remora.configs.fields import Bytes, Section

Layers = Annotated[int, Field(ge=1, le=65_536)]


class OffloadSection(Section):
    """Weights in host memory, for models that do not fit a GPU. Outputs are the same; every step
    copies the weights of these layers over the bus."""

    host_memory: Bytes | None = None
    """Most host memory for weights, of each rank, in bytes or as 16GiB. As many whole layers as fit
    are kept there, evenly spread over the model. Default: none."""

    group_size: Layers | None = None
    """Instead of host_memory: the layers of a rank form groups of this many, and the last
    num_in_group of each are in host memory. Default: none."""

    num_in_group: Layers = 1
    """Layers of each group that are in host memory. Needs group_size."""

    prefetch_layers: Annotated[int, Field(ge=0, le=64)] = 1
    """How many offloaded layers ahead copies begin, each to a buffer of its own on the GPU. More
    hide more of the copying and take more memory. 0 = one buffer, and a copy begins when its layer
    is reached. Needs host_memory or group_size."""

    @property
    def key(self) -> str | None:
        """The key by which weights are offloaded; None = they are not."""
        if self.group_size is not None:
            return "offload.group_size"
        return None if self.host_memory is None else "offload.host_memory"

    @property
    def num_buffers(self) -> int:
        """Layers that have room on the GPU at the same time."""
        return max(1, self.prefetch_layers)

    def _conflicts(self) -> Iterator[tuple[str, str]]:
        written = self.model_fields_set
        if self.host_memory is not None and self.group_size is not None:
            yield "group_size", "host_memory is set too; remove one of the two"
        if "num_in_group" in written and self.group_size is None:
            yield "num_in_group", "needs group_size"
        if "prefetch_layers" in written and self.key is None:
            yield "prefetch_layers", "needs host_memory or group_size"
        if self.group_size is not None and self.num_in_group > self.group_size:
            yield "num_in_group", f"must not exceed group_size ({self.group_size})"
