"""The section `debug`: checks, dumps and profiles of a running server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from remora.configs.fields import Name, Seconds, Section


class DebugSection(Section):
    """Checks, dumps and profiles; all off by default."""

    log_step_times: bool = False
    """Whether each step logs its work and a breakdown of its time."""

    fail_on_nan: bool = False
    """Whether logits that are NaN or infinite fail the whole engine, so that the replica is
    replaced. false = only the affected request fails, with HTTP 500."""

    profile_dir: Name | None = None
    """Directory for torch profiler traces that the administrative routes /start_profile and
    /stop_profile record. Default: these routes are off."""

    tensor_dump_dir: Name | None = None
    """Directory for the outputs of each layer, one safetensors file per forward pass. Needs
    engine.device cpu, engine.cpu_kernels torch, and one rank. Default: no dumps."""

    tensor_dump_passes: Annotated[int, Field(ge=1, le=10_000_000)] = 1000
    """Forward passes to dump; later ones are not dumped."""

    tensor_dump_input: Name | None = None
    """File with a JSON list of token ids that a replica runs once at start, to be dumped. Default:
    none."""

    crash_dump_dir: Name | None = None
    """Directory for crash dumps: when the engine fails, the requests of the last five minutes are
    written there (prompts, parameters and outputs, one JSON object per line). Default: no dumps."""

    core_dump: bool = False
    """Whether a replica whose engine fails prints the stacks of all threads and aborts, which
    leaves a core file where the system allows it. false = it exits."""

    trace_memory_s: Seconds | None = None
    """Seconds between two log lines with the Python source lines whose memory has grown. Slows
    Python down. Default: no tracing."""

    trace_memory_frames: Annotated[int, Field(ge=1, le=64)] = 1
    """Stack frames shown for each of these source lines."""

    def _conflicts(self) -> Iterator[tuple[str, str]]:
        if "trace_memory_frames" in self.model_fields_set and self.trace_memory_s is None:
            yield "trace_memory_frames", "has no effect without trace_memory_s"
        for key in ("tensor_dump_passes", "tensor_dump_input"):
            if key in self.model_fields_set and self.tensor_dump_dir is None:
                yield key, "has no effect without tensor_dump_dir"
