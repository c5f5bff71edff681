"""What an operator may say: the sections and keys of a remora configuration.

Every key that stands here has an effect today. Sections without keys mark the place of what is
to come; a key written into them is refused like any other unknown key. Where things belong:

    model        which weights, by which name, in which number format; tokenizer (`model.py`)
    engine       device, attention (`engine.py`), KV cache (`memory.py`), scheduling
                 (`scheduling.py`), overlap and graphs (`recording.py`)
    sampling     how tokens are chosen where a request says nothing (`sampling.py`)
    lora         adapters (`lora.py`): where they are, how many, when they load
    grammar      constrained output (`grammar.py`)
    spec         speculative decoding
    parallel     replicas and ranks (`parallel.py`): data, tensor, pipeline, expert
    pooling      embeddings and scores (`pooling.py`)
    routing      which replica answers a request (`routing.py`)
    autoscaling  how many replicas, by which signal (`autoscaling.py`)
    api          HTTP: timeouts, strictness, parsers of tools and reasoning (`api.py`)
    limits       how much one request may ask for (`limits.py`)
    metrics      counters, traces, logs (`metrics.py`)
    warmup       what is run before a replica is ready (`warmup.py`)
    debug        checks of numbers, dumps, profiles (`debug.py`)

Validation is pure: it opens no model and looks for no device. What depends on them is decided in
`plan.py`; what may change while a replica runs stands in `in_place.py`. A default gives way to a
written value; two written values that contradict each other are refused. `messages.py` turns
pydantic's errors into ours.
"""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from remora.configs.fields import Section, conflict
from remora.configs.sections.api import ApiSection
from remora.configs.sections.autoscaling import AutoscalingSection
from remora.configs.sections.debug import DebugSection
from remora.configs.sections.engine import EngineSection
from remora.configs.sections.grammar import GrammarSection
from remora.configs.sections.limits import LimitsSection
from remora.configs.sections.lora import LoraSection
from remora.configs.sections.metrics import MetricsSection
from remora.configs.sections.model import ModelSection
from remora.configs.sections.parallel import ParallelSection
from remora.configs.sections.pooling import PoolingSection
from remora.configs.sections.routing import RoutingSection
from remora.configs.sections.sampling import SamplingSection
from remora.configs.sections.warmup import WarmupSection

BUILTIN_MODEL = "smollm2-135m-instruct"
BUILTIN_MODELS = (BUILTIN_MODEL, "all-minilm-l6-v2")


class SpecSection(Section):
    """Speculative decoding."""


class ServeConfig(Section):
    """Configuration of one served model: the `args` of its Ray Serve application."""

    model: ModelSection
    """Which model is served, by which name, in which number format."""

    engine: EngineSection = EngineSection()
    """Device, memory and scheduling."""

    sampling: SamplingSection = SamplingSection()
    """How tokens are chosen where a request says nothing."""

    pooling: PoolingSection = PoolingSection()
    """What is made of hidden states where no text is made."""

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

    @model_validator(mode="after")
    def _check_files(self) -> Self:
        if not self.model.delete_after_load:
            return self
        several = self.autoscaling.is_on or self.parallel.num_replicas > 1
        if several or self.parallel.num_nodes > 1:
            raise conflict("model", "delete_after_load is for one replica on one node")
        if self.lora.dynamic:
            raise conflict("model", "delete_after_load: lora.dynamic reads the files again")
        return self

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        for key in ("weight_roots", "weight_loaders"):
            if not getattr(self.model, key):
                continue
            if self.autoscaling.is_on or self.parallel.num_replicas > 1:
                raise conflict("model", f"{key}: each replica would have weights of its own")
            if self.parallel.num_ranks > 1:
                raise conflict("model", f"{key}: weights of several ranks cannot change together")
            if self.lora.dynamic or self.lora.adapters:
                raise conflict("model", f"{key}: adapters belong to the weights that they change")
            if self.engine.compile:
                raise conflict("model", f"{key}: engine.compile would compile anew amid requests")
            if self.debug.tensor_dump_dir is not None:
                raise conflict("model", f"{key}: debug.tensor_dump_dir listens at the first ones")
        return self

    @model_validator(mode="after")
    def _check_dump(self) -> Self:
        has_layers = self.engine.device == "cpu" and self.engine.cpu_kernels == "torch"
        if self.debug.tensor_dump_dir and not (has_layers and self.parallel.num_ranks == 1):
            raise conflict(
                "debug",
                "tensor_dump_dir needs engine.device cpu, engine.cpu_kernels torch, and one rank",
            )
        return self

    @model_validator(mode="after")
    def _check_hidden(self) -> Self:
        if self.api.hidden_states and self.parallel.pp_size > 1:
            raise conflict("api", "hidden_states needs parallel.pp_size 1")
        return self

    @model_validator(mode="after")
    def _check_texts(self) -> Self:
        if not self.model.skip_tokenizer:
            return self
        if "backend" in self.grammar.model_fields_set and self.grammar.backend != "none":
            raise conflict("grammar", "backend needs a tokenizer, and model.skip_tokenizer is true")
        if self.grammar.token_healing:
            raise conflict("grammar", "token_healing needs a tokenizer: see model.skip_tokenizer")
        return self

    api: ApiSection = ApiSection()
    """HTTP: limits, timeouts, strictness."""

    limits: LimitsSection = LimitsSection()
    """How much one request may ask for."""

    metrics: MetricsSection = MetricsSection()
    """Counters, traces, logs."""

    warmup: WarmupSection = WarmupSection()
    """What is run before a replica is ready."""

    debug: DebugSection = DebugSection()
    """Looking inside: checks of numbers, dumps, profiles."""
