"""Device, memory and scheduling: the section `engine` of a configuration."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from remora.configs.fields import Name, Seconds, Section, conflict
from remora.configs.sections.engine_graphs import RecordingKeys
from remora.configs.sections.engine_kv_events import KVEventKeys
from remora.configs.sections.engine_memory import MemoryKeys
from remora.configs.sections.engine_scheduling import SchedulingKeys


class DeviceKeys(Section):
    """What computes, and how exactly."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs; auto = cuda where there is one, else cpu."""

    num_threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Compute threads of one rank. Default: physical cores divided by the ranks that share them."""

    cpu_kernels: Literal["auto", "native", "torch"] = "auto"
    """What computes on a CPU. native = step programs, which need a C++ compiler and pages of a
    multiple of 16 tokens; torch = the slower reference; auto = native where it can be had."""

    attention_backend: Literal["auto", "torch", "triton"] = "auto"
    """Whose kernels attend on a GPU; auto = triton where it is installed. A CPU has torch's only,
    or native ones: see cpu_kernels."""

    attention_splits: Annotated[int, Field(ge=1, le=256)] | None = None
    """Most parts into which triton's kernels divide the keys of a decoding sequence; 1 = they do
    not. Default: by how many sequences and keys there are; with a fixed division, 32."""

    attention_split_tokens: Annotated[int, Field(ge=32, le=2**20)] | None = None
    """Length of these parts, in tokens, whichever sequences are beside; longer where there would
    be more than attention_splits. Default: as above; with a fixed number 128."""

    deterministic: bool = False
    """Whether a row's numbers must be the same bits whichever rows are beside it. Native kernels of
    CPUs are so anyway; a GPU takes slower products and attention, and no adapters in slots."""

    step_timeout_s: Seconds = 60.0
    """Seconds after which a single step counts as hung and the replica as unhealthy."""

    logit_processors: dict[Name, Name] = Field(default_factory=dict, max_length=64)
    """Functions that change logits, by the names that requests ask for them
    (`custom_logit_processor`): module:attribute on the replica's Python path. Default: none; code
    that clients send is never run."""

    random_seed: Annotated[int, Field(ge=0, le=2**64 - 1)] = 0
    """Base of the seeds drawn for requests that bring none."""


class EngineSection(KVEventKeys, RecordingKeys, SchedulingKeys, MemoryKeys, DeviceKeys):
    """Device, memory and scheduling."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        written = self.model_fields_set
        if self.kv_memory is not None and self.kv_tokens is not None:
            raise conflict("kv_tokens", "kv_memory is set too; keep one of the two")
        for key in ("mem_fraction", "total_mem_fraction"):
            if key in written and (self.kv_memory or self.kv_tokens):
                other = "kv_memory" if self.kv_memory else "kv_tokens"
                raise conflict(key, f"{other} is set too and decides alone; keep one")
        if "mem_fraction" in written and self.total_mem_fraction is not None:
            raise conflict("mem_fraction", "total_mem_fraction is set too; keep one of the two")
        self._check_windows()
        for key in ("prefill_chunk_tokens", "max_prefill_tokens", "max_running_requests"):
            if {key, "max_step_tokens"} <= written and (
                getattr(self, key) or 0
            ) > self.max_step_tokens:
                raise conflict(key, f"must not exceed max_step_tokens ({self.max_step_tokens})")
        self._check_useless(written)
        return self

    def _check_windows(self) -> None:
        for key in ("window_ratio", "window_saving"):
            if getattr(self, key) is not None and self.window_pages == "off":
                raise conflict(key, "window_pages is off; leave one of the two out")
        if self.window_ratio is not None and self.window_saving is not None:
            raise conflict("window_saving", "window_ratio is set too; keep one of the two")

    def _check_useless(self, written: set[str]) -> None:
        """Raise for a key that another one leaves without effect."""
        if not self.use_priorities:
            for key in ("low_priority_first", "priority_preemption_gap"):
                if getattr(self, key):
                    raise conflict(key, "needs use_priorities")
        if self.graph_rows is not None:
            for key in ("graph_max_rows", "graph_split", "graph_fine", "graph_step"):
                if key in written:
                    raise conflict(key, "graph_rows is set too and decides alone; keep one")
        if "compile_max_rows" in written and not self.compile:
            raise conflict("compile_max_rows", "needs compile")
        if self.kv_events_endpoint is not None and not self.prefix_cache:
            raise conflict("kv_events_endpoint", "needs prefix_cache")
        if self.kv_events_topic and self.kv_events_endpoint is None:
            raise conflict("kv_events_topic", "needs kv_events_endpoint")
        if "prefix_eviction" in written and not self.prefix_cache:
            raise conflict("prefix_eviction", "needs prefix_cache")
        if not self.chunked_prefill and "prefill_chunk_tokens" in written:
            raise conflict("prefill_chunk_tokens", "chunked_prefill is off; keep one of the two")
        if self.expected_output_tokens is not None and "schedule_conservativeness" in written:
            raise conflict(
                "schedule_conservativeness",
                "expected_output_tokens is set too, and is not scaled; keep one of the two",
            )
