"""Adapters: the section `lora` of a configuration."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Self

from pydantic import Field, model_validator

from remora.configs.fields import Name, Section


class AdapterEntry(Section):
    """One adapter."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
    """Name that clients put into `model`, alone or behind the model's own: `base:adapter`."""

    path: Name
    """Folder in PEFT's layout: adapter_config.json and adapter_model.safetensors."""


class LoraSection(Section):
    """Adapters."""

    adapters: list[AdapterEntry] = Field(default_factory=list, max_length=1024)
    """Adapters that are there from the start. One alone is merged into the weights while they load,
    before any quantisation: it costs nothing afterwards, and the model without it is not served.
    Several lie beside the weights, and requests choose one, or none."""

    max_loras_per_batch: int = Field(default=8, ge=1, le=1024)
    """Adapters that requests of one step may use; others wait. Memory for each is reserved."""

    max_lora_rank: int | None = Field(default=None, ge=1, le=4096)
    """Largest rank of an adapter beside the weights; unset: that of the largest one."""

    @property
    def merges(self) -> bool:
        """Whether the adapter becomes a part of the weights."""
        return len(self.adapters) == 1

    @model_validator(mode="after")
    def _check(self) -> Self:
        counts = Counter(adapter.name for adapter in self.adapters)
        doubled = [name for name, count in counts.items() if count > 1]
        if doubled:
            raise ValueError(f"two adapters are called {doubled[0]!r}; give each a name of its own")
        return self
