"""What an operator may say: the sections and keys of a remora configuration.

Every key that stands here has an effect today. Sections without keys mark the place of what is
to come; a key written into them is refused like any other unknown key. Where things belong:

    model        which weights, by which name, in which number format; tokenizer, vision tower
    engine       device, memory, KV cache, scheduling, attention, graphs, quantised compute
    sampling     how tokens are chosen where a request says nothing (`sampling.py`)
    lora         adapters (`lora.py`): where they are, how many, when they load
    grammar      constrained output (`grammar.py`)
    spec         speculative decoding
    parallel     replicas and ranks (`parallel.py`): data, tensor, pipeline, expert
    routing      which replica answers a request (`routing.py`)
    autoscaling  how many replicas, by which signal (`autoscaling.py`)
    api          HTTP: limits, timeouts, strictness, parsers of tools and reasoning
    limits       how much one request may ask for (`limits.py`)
    metrics      counters, traces, logs

Validation is pure: it opens no model and looks for no device. What depends on them is decided in
`plan.py`; what may change while a replica runs stands in `in_place.py`. A default gives way to a
written value; two written values that contradict each other are refused. `messages.py` turns
pydantic's errors into ours.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from remora.configs.autoscaling import AutoscalingSection
from remora.configs.fields import Bytes, Name, PowerOfTwo, Seconds, Secret, Section, conflict
from remora.configs.grammar import GrammarSection
from remora.configs.limits import LimitsSection
from remora.configs.lora import LoraSection
from remora.configs.parallel import ParallelSection
from remora.configs.routing import RoutingSection
from remora.configs.sampling import SamplingSection

BUILTIN_MODEL = "smollm2-135m-instruct"


class ModelSection(Section):
    """Which model is served, by which name, in which number format."""

    path: Name
    """Folder in Hugging Face layout, a .gguf file, or the built-in model smollm2-135m-instruct.
    Best absolute: a relative path counts from the folder that the replica runs in."""

    served_name: Name | None = None
    """Name that clients put into `model`. Default: the last part of `path`, without .gguf."""

    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Number format of weights, activations and KV cache; auto = the checkpoint's own."""

    quantization: Literal["none", "int8", "int4"] = "none"
    """Format that the weights are rounded to at start-up, on a CPU with native kernels: int8 halves
    them (groups of 64), int4 makes them a third (groups of 32; the head stays int8)."""

    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = "auto"
    """How weights are read; dummy = random numbers, for trials without weight files."""

    context_length: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    """Most tokens of one sequence, prompt and output. Default: what the model was made for."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.path.endswith(".gguf") and self.load_format == "safetensors":
            raise conflict("load_format", "path is a .gguf file; use load_format auto or gguf")
        return self


class EngineSection(Section):
    """Device, memory and scheduling."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs; auto = cuda where there is one, else cpu."""

    num_threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Compute threads of one rank. Default: physical cores divided by the ranks that share them."""

    cpu_kernels: Literal["auto", "native", "torch"] = "auto"
    """What computes on a CPU. native = step programs, which need a C++ compiler and pages of a
    multiple of 16 tokens; torch = the slower reference; auto = native where it can be had."""

    page_size: Annotated[int, Field(ge=1, le=256), PowerOfTwo] = 16
    """Tokens per page of the KV cache, the unit of memory and of prefix reuse; a power of two."""

    kv_memory: Bytes | None = None
    """Memory of one replica's KV cache, in bytes or as 512MiB, 2GiB. Default: see mem_fraction."""

    kv_tokens: Annotated[int, Field(ge=1, le=2**40)] | None = None
    """Size of the KV cache in tokens, rounded down to pages; instead of kv_memory."""

    mem_fraction: Annotated[float, Field(gt=0, le=0.95)] | None = None
    """Share of the memory left beside the weights (on a GPU: and beside what a step needs, which is
    measured) that becomes KV cache when neither kv_memory nor kv_tokens is given; never more than
    max_running_requests sequences of full length. Default: 0.25 on a CPU, 0.9 on a GPU."""

    attention_backend: Literal["auto", "torch", "triton"] = "auto"
    """Whose kernels attend on a GPU; auto = triton where it is installed. A CPU has torch's only,
    or native ones: see cpu_kernels."""

    deterministic: bool = False
    """Whether a row's numbers must be the same bits whichever rows are beside it. Native kernels of
    CPUs are so anyway; a GPU takes slower products and attention, and no adapters in slots."""

    overlap: bool | None = None
    """Whether a step is planned while the device computes the one before. Default: on a GPU."""

    graph_max_rows: Annotated[int, Field(ge=0, le=65_536)] | None = None
    """Most sequences of a decode step that is recorded as a CUDA graph; larger steps are launched
    kernel by kernel. 0 = no graphs. Default: max_running_requests."""

    graph_split: Annotated[int, Field(ge=1, le=65_536)] = 256
    """Graphs are recorded for 1, 2 and 4 sequences and for multiples of graph_fine up to this many;
    beyond it for multiples of graph_step."""

    graph_fine: Annotated[int, Field(ge=1, le=1024)] = 8
    """See graph_split."""

    graph_step: Annotated[int, Field(ge=1, le=1024)] = 16
    """See graph_split."""

    max_running_requests: Annotated[int, Field(ge=1, le=65_536)] = 64
    """Most sequences computed in one step; the others wait."""

    max_step_tokens: Annotated[int, Field(ge=1, le=2**20)] = 512
    """Most tokens computed in one step, decoding sequences and prompt chunks together."""

    prefill_chunk_tokens: Annotated[int, Field(ge=1, le=2**20)] = 512
    """Most prompt tokens of one sequence in one step; longer prompts take several steps."""

    max_queued_requests: Annotated[int, Field(ge=0, le=2**20)] = 256
    """Most sequences that wait; a request beyond this is refused with HTTP 429."""

    max_queued_tokens: Annotated[int, Field(ge=1, le=2**40)] | None = None
    """Most tokens of prompts that wait, likewise; a single one always may. Default: 4 KV caches."""

    queue_timeout_s: Seconds = 60.0
    """Seconds that a request waits for its turn; beyond it HTTP 503."""

    prefix_cache: bool = True
    """Whether the KV of a finished sequence is kept for prompts that begin alike."""

    schedule_conservativeness: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Factor on the output length that admission expects: higher = fewer preemptions, less use."""

    step_timeout_s: Seconds = 60.0
    """Seconds after which a single step counts as hung and the replica as unhealthy."""

    random_seed: Annotated[int, Field(ge=0, le=2**64 - 1)] = 0
    """Base of the seeds drawn for requests that bring none."""

    low_priority_first: bool = False
    """Whether a smaller `priority` of a request means sooner."""

    priority_preemption_gap: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """A waiting request preempts a running one whose priority is lower by more than this.
    Default: never."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        written = self.model_fields_set
        if self.kv_memory is not None and self.kv_tokens is not None:
            raise conflict("kv_tokens", "kv_memory is set too; keep one of the two")
        if "mem_fraction" in written and (self.kv_memory or self.kv_tokens):
            other = "kv_memory" if self.kv_memory else "kv_tokens"
            raise conflict("mem_fraction", f"{other} is set too and decides alone; keep one")
        for key in ("prefill_chunk_tokens", "max_running_requests"):
            if {key, "max_step_tokens"} <= written and getattr(self, key) > self.max_step_tokens:
                raise conflict(key, f"must not exceed max_step_tokens ({self.max_step_tokens})")
        return self


class SpecSection(Section):
    """Speculative decoding."""


class ApiSection(Section):
    """HTTP: limits, timeouts, strictness."""

    unknown_fields: Literal["warn", "reject"] = "warn"
    """Request fields that no API defines: warn = left out and named in a response header
    (x-remora-ignored-fields), reject = HTTP 400."""

    max_body_bytes: Bytes = 16 * 2**20
    """Largest request body, in bytes or as 16MiB; beyond it HTTP 413."""

    drain_timeout_s: Seconds | None = None
    """Seconds that a stopping replica gives its running requests to finish; beyond it they end with
    an error. Default: the longest a request may take (request_timeout_s), else 120."""

    request_timeout_s: Seconds | None = None
    """Seconds after which a request is aborted. Default: no limit."""

    api_key: Secret | None = None
    """Key that every route but health and metrics asks for: env:NAME or file:/path (one key a
    line). Default: none is asked for."""

    admin_api_key: Secret | None = None
    """Key of the administrative routes (flush_cache, abort_request, ...), likewise. Default: they
    answer callers on this machine only."""

    tool_parser: str = "auto"
    """Format in which the model writes tool calls: auto = told from the chat template, none, or a
    name; `remora config parsers` lists them."""

    reasoning_parser: str = "auto"
    """Format in which the model writes its thought: auto, none, or a name, likewise."""

    reasoning_field: Literal["both", "reasoning", "reasoning_content"] = "both"
    """Name of the field of a chat's answer that holds the model's thought."""

    generate_dialect: Literal["auto", "sglang", "tgi", "lightllm"] = "auto"
    """Whose bodies /generate takes; auto = told from each body (text or input_ids: SGLang, inputs:
    TGI)."""

    stream_text: Literal["cumulative", "delta"] = "cumulative"
    """What an event of a /generate stream in SGLang's dialect holds: all text so far, or what is
    new."""

    response_store: Name = "memory"
    """Where /v1/responses keeps answers for `previous_response_id`: memory (of one replica), none,
    or file:/path of a database that the replicas of one machine share."""

    response_ttl_s: Seconds = 3600.0
    """Seconds that a stored response is kept."""

    batch_dir: Name | None = None
    """Folder for the files of /v1/files and /v1/batches. Default: these routes are off."""

    @property
    def drain_s(self) -> float:
        """Seconds that a stopping replica gives its running requests."""
        return self.drain_timeout_s or self.request_timeout_s or 120.0


class MetricsSection(Section):
    """Counters, traces, logs."""

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] | None = None
    """Least important of our lines in a replica's log. Default: that of Serve's logging_config."""


class ServeConfig(Section):
    """Configuration of one served model: the `args` of its Ray Serve application."""

    model: ModelSection
    """Which model is served, by which name, in which number format."""

    engine: EngineSection = EngineSection()
    """Device, memory and scheduling."""

    sampling: SamplingSection = SamplingSection()
    """How tokens are chosen where a request says nothing."""

    lora: LoraSection = LoraSection()
    """Adapters."""

    grammar: GrammarSection = GrammarSection()
    """Constrained output."""

    spec: SpecSection = SpecSection()
    """Speculative decoding; no keys yet."""

    parallel: ParallelSection = ParallelSection()
    """Replicas and ranks."""

    routing: RoutingSection = RoutingSection()
    """Which replica answers a request, and what happens while none can."""

    autoscaling: AutoscalingSection = AutoscalingSection()
    """How many replicas, by which signal."""

    @model_validator(mode="after")
    def _check_replicas(self) -> Self:
        if self.autoscaling.is_on and "num_replicas" in self.parallel.model_fields_set:
            raise conflict("parallel", "num_replicas and autoscaling.max_replicas are both set")
        to_zero = self.autoscaling.is_on and self.autoscaling.min_replicas == 0
        if to_zero and self.routing.gateway == "off":
            raise conflict("routing", "gateway is off, but autoscaling.min_replicas 0 needs it")
        if self.routing.policy == "prefix" and not self.engine.prefix_cache:
            raise conflict("routing", "policy prefix needs engine.prefix_cache")
        return self

    api: ApiSection = ApiSection()
    """HTTP: limits, timeouts, strictness."""

    limits: LimitsSection = LimitsSection()
    """How much one request may ask for."""

    metrics: MetricsSection = MetricsSection()
    """Counters, traces, logs."""
