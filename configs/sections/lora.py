"""Adapters: the section `lora` of a configuration."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from remora.configs.fields import Bytes, Name, Seconds, Section, conflict

MAX_ADAPTER_BYTES = 4 * 2**30
ADAPTER_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"


class AdapterEntry(Section):
    """One adapter."""

    name: Annotated[str, Field(pattern=f"^{ADAPTER_NAME}$")]
    """Name that clients put into `model`, alone or behind the model's own: `base:adapter`."""

    path: Name
    """Folder in PEFT's layout: adapter_config.json and adapter_model.safetensors. With `dynamic`
    also hf://OWNER/NAME and addresses that fsspec reads (s3://BUCKET/PATH)."""


class LoraSection(Section):
    """Adapters."""

    adapters: list[AdapterEntry] = Field(default_factory=list, max_length=1024)
    """Adapters that are there from the start. One alone is merged into the weights while they load,
    before any quantisation: it costs nothing afterwards, and the model without it is not served.
    Several lie beside the weights, and requests choose one, or none."""

    dynamic: bool = False
    """Whether adapters come and go while the model serves: by the API, or from `repo`. One adapter
    alone is then not merged."""

    max_loras_per_batch: int = Field(default=8, ge=1, le=1024)
    """Adapters that requests of one step may use; others wait. Memory for each is reserved."""

    max_lora_rank: int | None = Field(default=None, ge=1, le=4096)
    """Largest rank of an adapter beside the weights; unset: that of the largest one that is there
    at the start, or 16."""

    target_modules: list[Name] | None = Field(default=None, max_length=64)
    """Last words of the names of modules that adapters beside the weights may change (q_proj, ...),
    the checkpoint's or Llama's; unset: those that the adapters of the start change, or all linear
    layers if there are none."""

    max_loaded_loras: int = Field(default=32, ge=1, le=65_536)
    """Adapters that a replica holds in the host's memory; others are read again when a request
    asks for them."""

    eviction: Literal["lru", "fifo"] = "lru"
    """Which adapter leaves its place first: the least recently used, or the first that came."""

    repo: Name | None = None
    """Folder with a subfolder for each adapter, whose name is the model name; looked at again every
    `repo_period_s`. env:NAME reads it from a variable. Needs `dynamic`."""

    repo_period_s: Seconds = 10.0
    """Seconds between two looks into `repo`."""

    roots: list[Name] = Field(default_factory=list, max_length=64)
    """Folders, and addresses such as s3://bucket/adapters or hf://owner, from which the API may
    load. `repo` is one of them."""

    store: Name | None = None
    """File in which the adapters that were loaded by the API are kept over restarts. Needs
    `dynamic`."""

    load_timeout_s: Seconds = 300.0
    """Seconds that one adapter may take to load, at all replicas."""

    max_adapter_bytes: Annotated[Bytes, Field(le=MAX_ADAPTER_BYTES)] = MAX_ADAPTER_BYTES
    """Largest file of an adapter; each rank reads it into memory whole."""

    @property
    def merges(self) -> bool:
        """Whether the adapter becomes a part of the weights."""
        return len(self.adapters) == 1 and not self.dynamic

    @model_validator(mode="after")
    def _check(self) -> Self:
        counts = Counter(adapter.name for adapter in self.adapters)
        doubled = [name for name, count in counts.items() if count > 1]
        if doubled:
            raise ValueError(f"two adapters are called {doubled[0]!r}; give each a name of its own")
        for key in ("repo", "store", "roots"):
            if getattr(self, key) and not self.dynamic:
                raise conflict(key, "adapters come and go only with dynamic; set it to true")
        if self.max_loaded_loras < self.max_loras_per_batch and self.dynamic:
            raise conflict(
                "max_loaded_loras",
                f"at least max_loras_per_batch ({self.max_loras_per_batch}) must be held",
            )
        return self
