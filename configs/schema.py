"""The schema of a remora configuration: its sections, and rules between sections.

    model        weights, number formats, tokenizer
    engine       device, KV cache, scheduling, CUDA graphs, KV events
    offload      weights in host memory
    sampling     defaults of sampling parameters
    pooling      embeddings and scores
    lora         LoRA adapters
    grammar      constrained output
    speculation  drafts of coming tokens
    parallel     replicas and ranks
    routing      which replica answers a request
    autoscaling  how many replicas run
    api          HTTP timeouts, strictness, parsers
    limits       what one request may ask for, and tenants
    metrics      metrics, traces, logs
    warmup       what runs before a replica is ready
    debug        checks, dumps, profiles

`sections/` holds one module per section. Validation is pure: it opens no file and looks for no
device; `planning/` decides what depends on the model or the machine, and `live_update.py` lists the
keys that may change while a replica runs. A default gives way to a written value; two written
values that contradict each other are refused. `validation_messages.py` words the errors.
"""

from __future__ import annotations

from collections.abc import Iterator

from remora.configs.fields import Section
from remora.configs.sections.api import ApiSection
from remora.configs.sections.autoscaling import AutoscalingSection
from remora.configs.sections.debug import DebugSection
from remora.configs.sections.engine import EngineSection
from remora.configs.sections.grammar import GrammarSection
from remora.configs.sections.limits import LimitsSection
from remora.configs.sections.lora import LoraSection
from remora.configs.sections.metrics import MetricsSection
from remora.configs.sections.model import ModelSection
from remora.configs.sections.offload import OffloadSection
from remora.configs.sections.parallel import ParallelSection
from remora.configs.sections.pooling import PoolingSection
from remora.configs.sections.routing import RoutingSection
from remora.configs.sections.sampling import SamplingSection
from remora.configs.sections.speculation import SpeculationSection
from remora.configs.sections.warmup import WarmupSection

BUILTIN_MODEL = "smollm2-135m-instruct"
BUILTIN_MODELS = (BUILTIN_MODEL, "all-minilm-l6-v2")


class ServeConfig(Section):
    """Configuration of one served model: the `args` of its Ray Serve application."""

    model: ModelSection
    """Model, number formats, tokenizer."""

    engine: EngineSection = EngineSection()
    """Device, KV cache, scheduling, CUDA graphs."""

    offload: OffloadSection = OffloadSection()
    """Weights in host memory."""

    sampling: SamplingSection = SamplingSection()
    """Defaults of sampling parameters."""

    pooling: PoolingSection = PoolingSection()
    """Embeddings and scores."""

    lora: LoraSection = LoraSection()
    """LoRA adapters."""

    grammar: GrammarSection = GrammarSection()
    """Constrained output."""

    speculation: SpeculationSection = SpeculationSection()
    """Speculative decoding: drafts of coming tokens."""

    parallel: ParallelSection = ParallelSection()
    """Replicas and ranks."""

    routing: RoutingSection = RoutingSection()
    """Choice of the replica for a request."""

    autoscaling: AutoscalingSection = AutoscalingSection()
    """Number of replicas, by load and latency."""

    api: ApiSection = ApiSection()
    """HTTP: timeouts, strictness, parsers."""

    limits: LimitsSection = LimitsSection()
    """Limits of one request, and tenants."""

    metrics: MetricsSection = MetricsSection()
    """Metrics, traces, logs."""

    warmup: WarmupSection = WarmupSection()
    """Requests run before a replica is ready."""

    debug: DebugSection = DebugSection()
    """Checks, dumps and profiles."""

    @property
    def needs_key(self) -> bool:
        """Whether callers need an API key."""
        return self.api.api_key is not None or self.limits.has_tenant_keys

    @property
    def separates_keys(self) -> bool:
        """Whether each API key has a prefix cache of its own."""
        return self.needs_key and not self.api.share_prefix_cache

    @property
    def live_weights_keys(self) -> tuple[str, ...]:
        """The set keys by which weights or memory change while requests are served."""
        model = self.model
        keys = (
            ("model.weight_roots", bool(model.weight_roots)),
            ("model.weight_loaders", bool(model.weight_loaders)),
            ("model.weight_upload_limit", model.weight_upload_limit is not None),
            ("model.weight_instances", bool(model.weight_instances)),
            ("model.share_weights", model.share_weights),
            ("engine.sleep_mode", self.engine.sleep_mode),
        )
        return tuple(key for key, is_set in keys if is_set)

    def _conflicts_of_live_weights(self) -> Iterator[tuple[str, str]]:
        has_adapters = self.lora.dynamic or bool(self.lora.adapters)
        for is_excluded, why in (
            (has_adapters, "excludes adapters, which fit one set of weights"),
            (self.engine.compile, "excludes engine.compile"),
            (self.offload.key is not None, f"excludes {self.offload.key}"),
            (self.debug.tensor_dump_dir is not None, "excludes debug.tensor_dump_dir"),
        ):
            for key in self.live_weights_keys if is_excluded else ():
                section, _, name = key.partition(".")
                yield section, f"{name} {why}"
        if self.engine.sleep_mode and self.model.delete_after_load:
            yield "engine", "sleep_mode excludes model.delete_after_load: waking reads the files"
        if self.model.weight_instances and self.model.weight_upload_limit is None:
            yield "model", "weight_instances needs weight_upload_limit, the most bytes to take"
        if self.model.share_weights and self.model.delete_after_load:
            yield "model", "share_weights excludes delete_after_load: it reads the files"
        if self.model.weight_upload_limit is not None and self.parallel.num_nodes > 1:
            yield "model", "weight_upload_limit needs parallel.num_nodes 1"

    def _conflicts(self) -> Iterator[tuple[str, str]]:
        model, engine, parallel = self.model, self.engine, self.parallel
        is_scaled, dumps = self.autoscaling.is_on, self.debug.tensor_dump_dir is not None
        is_replicated = is_scaled or parallel.num_replicas > 1
        if is_scaled and "num_replicas" in parallel.model_fields_set:
            yield "parallel", "num_replicas and autoscaling.max_replicas are both set; remove one"
        if is_scaled and self.autoscaling.min_replicas == 0 and self.routing.gateway == "off":
            yield "routing", "autoscaling.min_replicas 0 needs gateway auto or on"
        if self.routing.policy == "prefix" and not engine.prefix_cache:
            yield "routing", "policy prefix needs engine.prefix_cache"
        if model.delete_after_load and (is_replicated or parallel.num_nodes > 1):
            yield "model", "delete_after_load needs one replica on one node"
        if model.delete_after_load and self.lora.dynamic:
            yield "model", "delete_after_load excludes lora.dynamic"
        yield from self._conflicts_of_live_weights()
        if engine.compile and self.offload.key is not None:
            yield "engine", f"compile excludes {self.offload.key}, by which layers wait for copies"
        by_torch = engine.device == "cpu" and engine.cpu_kernels == "torch"
        if dumps and not (by_torch and parallel.num_ranks == 1):
            needed = "engine.device cpu, engine.cpu_kernels torch, and one rank"
            yield "debug", f"tensor_dump_dir needs {needed}"
        if self.api.share_prefix_cache and not self.needs_key:
            yield "api", "share_prefix_cache has no effect without api_key or limits.tenants"
        if self.api.hidden_states and parallel.pp_size > 1:
            yield "api", "hidden_states needs parallel.pp_size 1"
        if model.skip_tokenizer:
            grammar, why = self.grammar, "needs a tokenizer, and model.skip_tokenizer is true"
            if "backend" in grammar.model_fields_set and grammar.backend != "none":
                yield "grammar", f"backend {why}"
            if grammar.token_healing:
                yield "grammar", f"token_healing {why}"
