"""The section `engine`: device, KV cache, scheduling, CUDA graphs, KV events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from remora.configs.fields import Bytes, Name, PowerOfTwo, Seconds, Section

AttentionName = Literal[
    "auto", "torch", "triton", "flashinfer", "fa2", "fa3", "fa4", "torch_varlen"
]
KVDtype = Literal["auto", "bfloat16", "float16", "float32", "int8", "fp8_e4m3", "fp8_e5m2"]
KV_8_BIT = ("int8", "fp8_e4m3", "fp8_e5m2")
SchedulePolicy = Literal["fcfs", "lpm", "dfs-weight", "lof", "random"]
LayerNumber = Annotated[int, Field(ge=0, le=65_535)]
GraphRows = Annotated[int, Field(ge=1, le=65_536)]


class EngineSection(Section):
    """Device, KV cache, scheduling, CUDA graphs."""

    # Device and numerics

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device that the model runs on. auto = cuda if a GPU is available, else cpu."""

    num_threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Compute threads of each rank. Default: physical cores divided by the ranks on the machine."""

    cpu_kernels: Literal["auto", "native", "torch"] = "auto"
    """Kernels on a CPU. native = compiled step programs, which need a C++ compiler (except from a
    wheel that contains them) and a page_size that is a multiple of 16; torch = the slower
    reference; auto = native if possible."""

    attention_backend: AttentionName = "auto"
    """Attention kernels on a GPU: remora's own (triton), those of an installed library (flashinfer;
    fa2, fa3, fa4 = FlashAttention; torch_varlen = torch's build of it), or torch operations, the
    reference. auto = triton if it is installed. On a CPU cpu_kernels decides."""

    attention_splits: Annotated[int, Field(ge=1, le=256)] | None = None
    """Most parts into which Triton kernels split the keys of a decoding sequence; 1 = no split.
    Default: chosen by the number of sequences and keys; 32 if attention_split_tokens is set."""

    attention_split_tokens: Annotated[int, Field(ge=32, le=2**20)] | None = None
    """Length of each part in tokens, independent of the other sequences in the batch. Parts are
    longer where there would be more than attention_splits. Default: chosen like attention_splits;
    128 if that is set."""

    deterministic: bool = False
    """Whether the results of a sequence are bit-identical whatever else is in its batch. Native CPU
    kernels always are. On a GPU this selects slower matrix products and attention, and excludes
    adapters in slots."""

    step_timeout_s: Seconds = 60.0
    """Seconds after which a running step counts as hung and the replica becomes unhealthy."""

    logit_processors: dict[Name, Name] = Field(default_factory=dict, max_length=64)
    """Functions that change logits: the name that requests use (`custom_logit_processor`) ->
    module:attribute on the replica's Python path. Default: none. Code that clients send is never
    run."""

    sleep_mode: bool = False
    """Whether requests may release the memory of weights and KV cache (/sleep and /wake_up,
    /release_memory_occupation and /resume_memory_occupation). Same requirements as
    model.weight_roots, except for the memory."""

    random_seed: Annotated[int, Field(ge=0, le=2**64 - 1)] = 0
    """Base of the seeds for requests without a seed."""

    # KV cache

    page_size: Annotated[int, Field(ge=1, le=256), PowerOfTwo] = 16
    """Tokens per page of the KV cache, the unit of allocation and prefix reuse; a power of two."""

    kv_dtype: KVDtype = "auto"
    """Format of cached K and V. int8, fp8_e4m3, fp8_e5m2 = 8 bits with scales (kv_scales_file),
    which hold almost twice the tokens of 16 bits in the same memory: int8 is the most accurate for
    most models, fp8_e4m3 for keys with a few large channels. auto = the format that
    the checkpoint declares for K and V (kv_cache_scheme, kv_cache_quant_algo), else the model's."""

    kv_dtype_skip_layers: Annotated[list[LayerNumber], Field(max_length=4096)] = Field(
        default_factory=list
    )
    """Layers, counted from 0, whose K and V stay in the model's format: for a few layers with keys
    that 8 bits do not hold. Default: none."""

    kv_scales_file: Name | None = None
    """JSON file of static scales of K and V for an 8-bit kv_dtype, in the format of vLLM and SGLang
    (a scale for each layer and tensor-parallel rank) or LightLLM (for each layer, or for each of
    its KV heads). They replace the scales of tokens; greater values are clipped. Default: the
    scales of the checkpoint if it has some for kv_dtype, else each token and head has its own."""

    kv_memory: Bytes | None = None
    """Size of one replica's KV cache, in bytes or as 512MiB, 2GiB. Default: see mem_fraction."""

    kv_tokens: Annotated[int, Field(ge=1, le=2**40)] | None = None
    """Size of the KV cache in tokens, rounded down to whole pages; instead of kv_memory."""

    mem_fraction: Annotated[float, Field(gt=0, le=0.95)] | None = None
    """Fraction of the memory left after the weights (on a GPU also after the measured memory of a
    step) that becomes KV cache when neither kv_memory nor kv_tokens is set. The KV cache never
    exceeds max_running_requests sequences of full length. Default: 0.9 on a GPU; on a CPU 0.25, and
    at most 2,048 tokens for each of max_running_requests, or one sequence of full length."""

    total_mem_fraction: Annotated[float, Field(gt=0, le=0.98)] | None = None
    """Fraction of the device's total memory for weights, steps and KV cache together, of all ranks
    that share the device; instead of mem_fraction."""

    memory_reserve: Bytes | None = None
    """Device memory left for other programs, in bytes or as 2GiB. Default: none."""

    window_pages: Literal["auto", "off"] = "auto"
    """Whether sliding-window layers have their own pages and free those behind the window. auto =
    if sequences can be longer than two windows (one window if every layer has one), or if
    window_ratio or window_saving is set; off = all layers keep every token."""

    window_ratio: Annotated[float, Field(gt=0, le=1)] | None = None
    """Tokens stored for sliding-window layers per token of the other layers. A lower ratio leaves
    more memory for long sequences; a sequence of n tokens needs at most (window +
    prefill_chunk_tokens) / n. Default: 0.5; if every layer has a window, what sequences of full
    length need."""

    window_saving: Annotated[float, Field(ge=0, le=1)] | None = None
    """Instead of window_ratio, its position between 1 (window_saving 0: as many tokens as the other
    layers) and what sequences of full length need (window_saving 1)."""

    prefix_cache: bool = True
    """Whether the KV of finished sequences is kept and reused for prompts with the same prefix."""

    share_prompts: bool = True
    """Whether the outputs of one request (n, best_of) share the full pages of its prompt, which are
    computed and stored once, with or without prefix_cache. false = each output computes what the
    prefix cache does not have. The beams of a search always share."""

    prefix_eviction: Literal["lru", "lfu"] = "lru"
    """Cached prefix to evict first: lru = least recently used, lfu = least frequently used."""

    # Scheduling

    max_running_requests: Annotated[int, Field(ge=1, le=65_536)] | None = None
    """Most sequences computed in one step; the others wait. Default: 64 on a CPU; on a GPU 256, and
    512 from 60 GiB of memory on."""

    max_step_tokens: Annotated[int, Field(ge=1, le=2**20)] | None = None
    """Most tokens computed in one step: decoding sequences and prompt chunks together. Default on
    a CPU: 512, for models with experts 2048; on a GPU by its memory: 2048 below 20 GiB, 4096 below
    60, 8192 below 160, else 16384."""

    prefill_chunk_tokens: Annotated[int, Field(ge=1, le=2**20)] | None = None
    """Most prompt tokens of one sequence in one step; longer prompts take several steps. Default:
    the default of max_step_tokens, or max_step_tokens if that is smaller."""

    chunked_prefill: bool = True
    """Whether a prompt may take several steps. false = a prompt waits until one step has room for
    all of it, and max_step_tokens defaults to at least the context length."""

    max_prefill_tokens: Annotated[int, Field(ge=1, le=2**20)] | None = None
    """Most prompt tokens of all sequences in one step. A longer prompt that may not be chunked runs
    alone. Default: max_step_tokens."""

    max_prefill_requests: Annotated[int, Field(ge=1, le=65_536)] | None = None
    """Most sequences in prefill in one step. Default: no limit."""

    mixed_steps: bool = True
    """Whether prefill and decode share steps. false = prefill has its own steps, which run first:
    first tokens come sooner and running outputs stall meanwhile."""

    max_queued_requests: Annotated[int, Field(ge=0, le=2**20)] = 256
    """Most waiting sequences; further requests get HTTP 429."""

    max_queued_tokens: Annotated[int, Field(ge=1, le=2**40)] | None = None
    """Most prompt tokens of waiting sequences; further requests get HTTP 429, unless the queue is
    empty. Default: the capacity of 4 KV caches."""

    queue_timeout_s: Seconds = 60.0
    """Seconds that a request may wait in the queue; then HTTP 503."""

    schedule_policy: SchedulePolicy = "fcfs"
    """Order of waiting requests of equal priority: fcfs = by arrival, lpm = longest cached prefix,
    dfs-weight = requests that share long prefixes together, lof = longest possible output, random.
    Later arrivals skip a request at most 64 times."""

    admission_interval_steps: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Steps between two admissions of waiting requests while others run."""

    admission_interval_s: Annotated[float, Field(ge=0, le=60)] = 0.0
    """Least seconds between two admissions while others run."""

    poll_interval_steps: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Steps after which a busy engine reads new requests and aborts."""

    schedule_conservativeness: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Factor on the output length that admission expects. Higher = fewer preemptions, lower use of
    the KV cache."""

    expected_output_tokens: Annotated[int, Field(ge=1, le=2**20)] | None = None
    """Output tokens that admission expects of each request (at most its max_tokens, at least 1.1
    times its current output). Default: a share of max_tokens that adapts to preemptions."""

    full_reserve_usage: Annotated[float, Field(ge=0, le=1)] | None = None
    """Fraction of the KV cache in use from which admission reserves a request's full max_tokens.
    0 = always. Default: never."""

    min_reserved_tokens: Annotated[int, Field(ge=0, le=2**20)] = 0
    """Least tokens that admission reserves for the output of each request, within its
    max_tokens."""

    free_kv_fraction: Annotated[float, Field(ge=0, le=0.95)] = 0.0
    """Fraction of the KV cache that admission leaves free while requests run."""

    use_priorities: bool = True
    """Whether a request's `priority` counts. false = all requests are equal."""

    low_priority_first: bool = False
    """Whether requests with a lower `priority` value run first."""

    priority_preemption_gap: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """A waiting request preempts a running one whose priority is lower by more than this.
    Default: never."""

    # Overlap, CUDA graphs and torch.compile

    overlap: bool | None = None
    """Whether the next step is planned while the device computes the current one. Default: on
    GPUs, except with attention_backend torch or speculation."""

    graph_max_rows: Annotated[int, Field(ge=0, le=65_536)] | None = None
    """Most sequences of a decode step that is captured as a CUDA graph; larger steps launch kernel
    by kernel. 0 = no graphs. Default: max_running_requests."""

    graph_rows: Annotated[list[GraphRows], Field(min_length=1, max_length=1024)] | None = None
    """Batch sizes to capture, instead of graph_max_rows, graph_split, graph_fine and graph_step.
    Sizes above max_running_requests are ignored."""

    graph_prompt_tokens: Annotated[int, Field(ge=0, le=65_536)] | None = None
    """Most tokens of a step with prompts that is captured as a CUDA graph; larger steps launch
    kernel by kernel. 0 = none. Default: 2048 with attention_backend triton, none with pipeline
    stages or another backend."""

    graph_padding: bool = True
    """Whether a step is padded to the next captured size. false = only steps of exactly a captured
    size run as graphs."""

    graph_max_tokens: Annotated[int, Field(ge=1, le=2**30)] | None = None
    """Longest sequence, in tokens, that runs in a graph; steps with longer ones launch kernel by
    kernel. Default: no limit."""

    graph_gc: bool = False
    """Whether Python's garbage collector runs during graph capture, which slows capture down."""

    graph_split: Annotated[int, Field(ge=1, le=65_536)] = 256
    """Up to this batch size graphs are captured for 1, 2, 4 and multiples of graph_fine; above it
    for multiples of graph_step."""

    graph_fine: Annotated[int, Field(ge=1, le=1024)] = 8
    """Step between captured batch sizes up to graph_split."""

    graph_step: Annotated[int, Field(ge=1, le=1024)] = 16
    """Step between captured batch sizes above graph_split."""

    compile: bool = False
    """Whether decode steps of torch operations run through torch.compile. It takes seconds to
    minutes at each start, and on a CPU a C++ compiler. Prefill and sequences with adapters run
    uncompiled. Prefer native CPU kernels where available: they are faster."""

    compile_max_rows: Annotated[int, Field(ge=1, le=65_536)] = 32
    """Most sequences of a decode step that is compiled; larger steps run uncompiled."""

    # KV events

    kv_events_endpoint: Name | None = None
    """ZeroMQ address for prefix-cache events (page stored, removed, all cleared) in vLLM's format.
    An address with * is bound (tcp://*:5557), by only one replica on a machine; any other is
    connected to. Default: no events. Needs remora[kv-events]."""

    kv_events_topic: Annotated[str, Field(max_length=256)] = ""
    """Topic of the KV events."""

    def _conflicts(self) -> Iterator[tuple[str, str]]:
        yield from self._memory_conflicts()
        yield from self._window_conflicts()
        for key in ("prefill_chunk_tokens", "max_prefill_tokens", "max_running_requests"):
            if key not in self.model_fields_set or self.max_step_tokens is None:
                continue
            if (getattr(self, key) or 0) > self.max_step_tokens:
                yield key, f"must not exceed max_step_tokens ({self.max_step_tokens})"
        yield from self._keys_without_effect()

    def _memory_conflicts(self) -> Iterator[tuple[str, str]]:
        if self.kv_memory is not None and self.kv_tokens is not None:
            yield "kv_tokens", "kv_memory is set too; remove one of the two"
        for key in ("mem_fraction", "total_mem_fraction"):
            if key in self.model_fields_set and (self.kv_memory or self.kv_tokens):
                other = "kv_memory" if self.kv_memory else "kv_tokens"
                yield key, f"{other} is set too and takes precedence; remove one"
        if "mem_fraction" in self.model_fields_set and self.total_mem_fraction is not None:
            yield "mem_fraction", "total_mem_fraction is set too; remove one of the two"

    def _window_conflicts(self) -> Iterator[tuple[str, str]]:
        for key in ("window_ratio", "window_saving"):
            if getattr(self, key) is not None and self.window_pages == "off":
                yield key, "window_pages is off; remove one of the two"
        if self.window_ratio is not None and self.window_saving is not None:
            yield "window_saving", "window_ratio is set too; remove one of the two"

    def _keys_without_effect(self) -> Iterator[tuple[str, str]]:
        """Yield keys that have no effect because of another one."""
        written = self.model_fields_set
        for key, is_set, needed in (
            ("low_priority_first", self.low_priority_first, "use_priorities"),
            ("priority_preemption_gap", bool(self.priority_preemption_gap), "use_priorities"),
            ("compile_max_rows", "compile_max_rows" in written, "compile"),
            ("kv_events_endpoint", self.kv_events_endpoint is not None, "prefix_cache"),
            ("kv_events_topic", bool(self.kv_events_topic), "kv_events_endpoint"),
            ("prefix_eviction", "prefix_eviction" in written, "prefix_cache"),
        ):
            if is_set and not getattr(self, needed):
                yield key, f"needs {needed}"
        if self.graph_rows is not None:
            for key in ("graph_max_rows", "graph_split", "graph_fine", "graph_step"):
                if key in written:
                    yield key, "graph_rows is set too and takes precedence; remove one"
        if not self.chunked_prefill and self.prefill_chunk_tokens is not None:
            yield "prefill_chunk_tokens", "chunked_prefill is false; remove one of them"
        if self.expected_output_tokens is not None and "schedule_conservativeness" in written:
            yield (
                "schedule_conservativeness",
                "expected_output_tokens is set too, and is not scaled; remove one of them",
            )
