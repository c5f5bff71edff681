"""The section `lora`: LoRA adapters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from remora.configs.fields import Bytes, Name, Seconds, Section

MAX_ADAPTER_BYTES = 4 * 2**30
ADAPTER_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"


class AdapterEntry(Section):
    """One adapter."""

    name: Annotated[str, Field(pattern=f"^{ADAPTER_NAME}$")]
    """Model name that clients use for the adapter, alone or as `base:adapter`."""

    path: Name
    """Directory in PEFT's layout: adapter_config.json and adapter_model.safetensors; or OWNER/NAME
    of the Hugging Face hub, or a URL that fsspec reads (s3://BUCKET/PATH)."""


class LoraSection(Section):
    """LoRA adapters."""

    adapters: list[AdapterEntry] = Field(default_factory=list, max_length=1024)
    """Adapters available from the start. Without `dynamic`, a single adapter is merged into the
    weights while they load, before quantisation: it has no cost at run time, and the base model is
    not served. Otherwise adapters are kept apart from the weights, and each request uses one or
    none."""

    dynamic: bool = False
    """Whether adapters can be loaded and unloaded while the model serves, through the API or from
    `repo`. A single adapter is then not merged."""

    max_loras_per_batch: int = Field(default=8, ge=1, le=1024)
    """Most adapters used in one step; requests for others wait. Memory is reserved for all of these
    slots."""

    max_lora_rank: int | None = Field(default=None, ge=1, le=4096)
    """Largest rank of an adapter that is not merged. Default: the largest rank in `adapters`, else
    16."""

    target_modules: list[Name] | None = Field(default=None, max_length=64)
    """Modules that adapters may change, by the last part of their names (q_proj, ...), in the
    checkpoint's or Llama's naming. Default: all that `adapters` change, else all linear
    layers."""

    max_loaded_loras: int = Field(default=32, ge=1, le=65_536)
    """Adapters that a replica keeps in host memory; others are read again when a request uses
    them."""

    eviction: Literal["lru", "fifo"] = "lru"
    """Adapter to evict from its slot first: lru = least recently used, fifo = loaded first."""

    repo: Name | None = None
    """Directory with one subdirectory per adapter, whose name is the model name; scanned every
    `repo_period_s`. A URL that fsspec reads (s3://BUCKET/PATH) is a directory too, except hf://.
    env:NAME reads the path from a variable. Needs `dynamic`."""

    repo_period_s: Seconds = 10.0
    """Seconds between two scans of `repo`."""

    roots: list[Name] = Field(default_factory=list, max_length=64)
    """Directories, and URLs such as s3://bucket/adapters or hf://owner, from which the API may load
    adapters, in addition to `repo`. Needs `dynamic`."""

    store: Name | None = None
    """File that records the adapters loaded through the API, so that they survive restarts. Needs
    `dynamic`."""

    load_timeout_s: Seconds = 300.0
    """Seconds to load one adapter on all replicas."""

    max_adapter_bytes: Annotated[Bytes, Field(le=MAX_ADAPTER_BYTES)] = MAX_ADAPTER_BYTES
    """Largest adapter file, in bytes or as 1GiB; each rank reads it into memory whole."""

    @property
    def merges(self) -> bool:
        """Whether the only adapter is merged into the weights."""
        return len(self.adapters) == 1 and not self.dynamic

    def _conflicts(self) -> Iterator[tuple[str, str]]:
        counts = Counter(adapter.name for adapter in self.adapters)
        doubled = [name for name, count in counts.items() if count > 1]
        if doubled:
            yield "adapters", f"two have the name {doubled[0]!r}; names must be unique"
        for key in ("repo", "store", "roots"):
            if getattr(self, key) and not self.dynamic:
                yield key, "needs dynamic; set it to true"
        if self.max_loaded_loras < self.max_loras_per_batch and self.dynamic:
            yield (
                "max_loaded_loras",
                f"must be at least max_loras_per_batch ({self.max_loras_per_batch})",
            )
