"""Looking inside a running server: the section `debug` of a configuration."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from remora.configs.fields import Name, Seconds, Section, conflict


class DebugSection(Section):
    """Looking inside: checks of numbers, dumps, profiles. All off by default."""

    log_step_times: bool = False
    """Whether a line is logged for each step that says what it computed and where its time went."""

    fail_on_nan: bool = False
    """Whether logits that are not finite end the whole engine, so that the replica is replaced.
    Otherwise they end the request that they belong to, with HTTP 500, and no other."""

    profile_dir: Name | None = None
    """Folder for traces of torch's profiler, which the administrative routes /start_profile and
    /stop_profile then record. Default: these routes are off."""

    tensor_dump_dir: Name | None = None
    """Folder for what each layer gives, a safetensors file for each forward pass. Needs
    engine.device cpu, engine.cpu_kernels torch, and one rank. Default: nothing is written."""

    tensor_dump_passes: Annotated[int, Field(ge=1, le=10_000_000)] = 1000
    """Forward passes that are written there; later ones are not."""

    tensor_dump_input: Name | None = None
    """File with a JSON list of token ids that a replica runs once when it starts, so that the dump
    has it."""

    crash_dump_dir: Name | None = None
    """Folder into which the requests of the last five minutes are written when the engine fails:
    prompts, parameters and answers, one JSON object a line. Default: nothing is written."""

    core_dump: bool = False
    """Whether a replica whose engine has failed aborts, and leaves a core file where the system
    allows it, rather than exits. Stacks of all threads are printed."""

    trace_memory_s: Seconds | None = None
    """Seconds between two log lines about which lines of Python code hold more memory than before.
    Slows Python down. Default: no tracing."""

    trace_memory_frames: Annotated[int, Field(ge=1, le=64)] = 1
    """Callers to show with each of these lines."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if "trace_memory_frames" in self.model_fields_set and self.trace_memory_s is None:
            raise conflict("trace_memory_frames", "has no effect without trace_memory_s")
        for key in ("tensor_dump_passes", "tensor_dump_input"):
            if key in self.model_fields_set and self.tensor_dump_dir is None:
                raise conflict(key, "has no effect without tensor_dump_dir")
        return self
