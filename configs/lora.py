"""Adapters: the section `lora` of a configuration."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from remora.configs.fields import Name, Section


class AdapterEntry(Section):
    """One adapter."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
    """Name that clients put into `model`, alone or behind the model's own: `base:adapter`."""

    path: Name
    """Folder in PEFT's layout: adapter_config.json and adapter_model.safetensors."""


class LoraSection(Section):
    """Adapters."""

    adapters: list[AdapterEntry] = Field(default_factory=list, max_length=1)
    """Adapter that is merged into the weights while they load, before any quantisation: it costs
    nothing afterwards, and the model without it is not served. One at most as yet."""
