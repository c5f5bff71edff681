"""The state shared by request handlers: engine, tokenizer, metrics, limits and more."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from remora.configs.errors import InvalidRequest, UnknownModel
from remora.configs.facts import ModelFacts
from remora.configs.planning.plan import EnginePlan
from remora.configs.schema import ServeConfig
from remora.configs.version import __version__
from remora.deployments.adapters.served_adapters import Adapters
from remora.deployments.http.core.body_limits import limit
from remora.deployments.http.core.fields import Body, OpenAIBody
from remora.deployments.http.core.metrics import Metrics
from remora.deployments.http.core.settings import Settings
from remora.deployments.http.core.tenants import Tenants
from remora.deployments.http.core.unknown_fields import (
    IgnoredFields,
    UnknownFieldLog,
    find_ignored,
)
from remora.deployments.http.generation.encoding import Encoder
from remora.deployments.http.generation.logprobs import LogprobWriter
from remora.deployments.http.generation.request_tracker import RequestLimits, RequestTracker
from remora.deployments.http.generation.task_prompts import TaskPrompts
from remora.deployments.http.generation.weight_update import FixedWeights, Weights
from remora.deployments.observing.request_log import RequestLog
from remora.deployments.observing.request_trace import RequestObservers
from remora.deployments.parsers.replies import ReplyFormats
from remora.engine.grammar.constraint import Constraint
from remora.engine.protocols import EngineClient
from remora.engine.types import Grammar

if TYPE_CHECKING:
    from remora.engine.grammar.service import GrammarStats
    from remora.engine.observe.inspection import Inspection
    from remora.engine.pooling.facts import PoolingFacts
    from remora.engine.pooling.texts import Framer, PairTemplate
    from remora.engine.tokens.tokenizer import Tokenizer


MAX_SHOWN = 32
ALL = -1  # as many likely tokens as there are

OpenAIBodyT = TypeVar("OpenAIBodyT", bound=OpenAIBody)
PartT = TypeVar("PartT")


class GrammarMaker(Protocol):
    """Compiles constraints. Implemented by `engine.grammar.service`."""

    async def compile(self, constraint: Constraint, *, param: str) -> Grammar:
        """Return the compiled constraint. Raises InvalidRequest, which names `param`."""
        ...

    def stats(self) -> GrammarStats:
        """Return the counters."""
        ...


@dataclass(eq=False, kw_only=True)
class ServedEngine:
    """A running engine and what is served with it, as a replica creates them.

    generation_defaults:  the model's generation_config
    weights:              None = weights and memory stay as they are
    pooling:              facts of a pooling model; None = the model generates text
    inspection:           profiling and inspection of the engine; None = not available
    facts:                shape of the checkpoint's model; None = it has not been read
    """

    client: EngineClient
    tokenizer: Tokenizer
    plan: EnginePlan
    config: ServeConfig
    grammars: GrammarMaker
    generation_defaults: Mapping[str, Any]
    adapters: Adapters
    weights: Weights | None = None
    pooling: PoolingFacts | None = None
    inspection: Inspection | None = None
    facts: ModelFacts | None = None


@dataclass(frozen=True, slots=True)
class PoolingSide:
    """The text side of a pooling model.

    framer:    turns texts into rows; None = there is no tokenizer
    template:  pair template of a generating reranker; None = the tokenizer frames pairs
    """

    facts: PoolingFacts
    framer: Framer | None
    template: PairTemplate | None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model of a request: the base model, or an adapter of it.

    lora_id:  of the adapter in the engine; 0 = the base model
    """

    name: str
    lora_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerState:
    """The state that request handlers need."""

    client: EngineClient
    tokenizer: Tokenizer
    encoder: Encoder
    adapters: Adapters
    settings: Settings
    grammars: GrammarMaker
    formats: ReplyFormats
    metrics: Metrics
    calls: RequestTracker
    inspection: Inspection | None
    weights: Weights
    tasks: TaskPrompts
    created: int
    pooling: PoolingSide | None = None
    facts: ModelFacts | None = None
    _parts: dict[type, Any] = field(default_factory=dict)

    @classmethod
    def over(cls, server: ServedEngine) -> ServerState:
        """Return the state of a running engine."""
        metrics = Metrics(
            server.client.stats,
            server.plan.served_model_name,
            grammar_stats=server.grammars.stats,
            adapter_stats=server.adapters.stats,
            keys=server.config.metrics,
        )
        api = server.config.api
        settings = Settings(server.config, server.plan, server.generation_defaults)
        calls = RequestTracker(
            server.client,
            metrics,
            RequestLimits.of(server.config, server.plan),
            Tenants(server.config.limits),
        )
        calls.observers = RequestObservers(
            [RequestLog(lambda: settings.config.metrics, server.tokenizer)]
        )
        return cls(
            client=server.client,
            tokenizer=server.tokenizer,
            encoder=Encoder.configured(server.tokenizer, api),
            adapters=server.adapters,
            settings=settings,
            grammars=server.grammars,
            formats=ReplyFormats.of(
                server.tokenizer,
                tool_parser=api.tool_parser,
                reasoning_parser=api.reasoning_parser,
            ),
            metrics=metrics,
            calls=calls,
            inspection=server.inspection,
            weights=server.weights or FixedWeights(server.config.model.weight_version),
            tasks=TaskPrompts.configured(api, server.tokenizer),
            created=int(time.time()),
            pooling=_pooling_side(server),
            facts=server.facts,
        )

    @property
    def config(self) -> ServeConfig:
        """The current configuration."""
        return self.settings.config

    @property
    def plan(self) -> EnginePlan:
        """The current plan, with the current limits of the queue."""
        return self.settings.plan

    @property
    def generation_defaults(self) -> Mapping[str, Any]:
        """Defaults of parameters that a request omits."""
        return self.settings.generation_defaults

    def adopt(self, config: ServeConfig) -> None:
        """Apply another configuration to new requests; running ones keep theirs."""
        self.settings.adopt(config)
        self.client.limit_queue(self.plan)
        self.calls.limits = RequestLimits.of(config, self.plan)
        self.calls.tenants.adopt(config.limits)

    def part(self, kind: type[PartT], make: Callable[[ServeConfig], PartT]) -> PartT:
        """Return the API's single object of this type, created at the first call."""
        if kind not in self._parts:
            self._parts[kind] = make(self.config)
        found: PartT = self._parts[kind]
        return found

    async def model(self, name: str | None, param: str = "model") -> ServedModel:
        """Return the model of this name; None = the base model. Raises UnknownModel."""
        base = self.plan.served_model_name
        if name is None or name == base:
            return ServedModel(base, 0)
        short = name.removeprefix(f"{base}:")
        lora_id = await self.adapters.find(short)
        if lora_id is not None:
            return ServedModel(short, lora_id)
        if self.config.api.any_model_name:
            return ServedModel(base, 0)
        listed = ", ".join(map(repr, self.names[:MAX_SHOWN]))
        more = len(self.names) - MAX_SHOWN
        raise UnknownModel(
            f"The model {name[:200]!r} does not exist; this server serves {listed}"
            f"{f' and {more} more' if more > 0 else ''}.",
            param,
        )

    @property
    def fingerprint(self) -> str:
        """OpenAI's `system_fingerprint`: changes with whatever may change answers to one seed."""
        plan = self.plan
        parts = (
            __version__,
            plan.served_model_name,
            self.weights.version,
            plan.device,
            plan.dtype,
            plan.quantization,
            plan.kv_dtype,
            plan.tp_size,
            plan.pp_size,
            plan.random_seed,
        )
        return "fp_" + hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    @property
    def names(self) -> list[str]:
        """The served model name and the names of the adapters."""
        return [self.plan.served_model_name, *self.adapters.names]

    @property
    def field_log(self) -> UnknownFieldLog:
        """The log of unknown fields."""
        return self.part(UnknownFieldLog, lambda _config: UnknownFieldLog())

    def find_ignored(self, body: Body, *also: str) -> IgnoredFields:
        """Return a body's unknown fields, as `unknown_fields.find_ignored`; may raise."""
        return find_ignored(body, *also, reject=self.config.api.unknown_fields == "reject")

    def report_ignored(self, body: Body) -> dict[str, str]:
        """Log a body's unknown fields and return the headers that name them; may raise."""
        ignored = self.find_ignored(body)
        self.field_log.note(ignored)
        return ignored.headers


def _pooling_side(server: ServedEngine) -> PoolingSide | None:
    facts = server.pooling
    if facts is None:
        return None
    from remora.engine.pooling.texts import Framer, PairTemplate

    framer = Framer(server.tokenizer) if server.tokenizer.takes_text else None
    return PoolingSide(facts, framer, PairTemplate.of(facts, server.config.pooling))


def with_prompt_logprobs(server: ServerState, body: OpenAIBodyT) -> OpenAIBodyT:
    """Return the body, with prompt log-probabilities requested if `api.prompt_logprobs` is set."""
    if body.prompt_logprobs == ALL:
        return body.model_copy(update={"prompt_logprobs": _all_tokens(server, "prompt_logprobs")})
    wanted = server.config.api.prompt_logprobs and not body.stream
    if not wanted or body.prompt_logprobs is not None:
        return body
    return body.model_copy(update={"prompt_logprobs": 0})


def _all_tokens(server: ServerState, param: str) -> int:
    """Return how many tokens the vocabulary has, if so many likely ones may be asked for."""
    found, allowed = server.tokenizer.vocab_size, limit("max_top_logprobs")
    if found > allowed:
        message = (
            f"{param}: -1 asks for all {found} tokens of the vocabulary; at most {allowed} are "
            "allowed (limits.max_top_logprobs)."
        )
        raise InvalidRequest(message, param, limit="max_top_logprobs")
    return found


def logprob_writer(server: ServerState, body: OpenAIBody) -> LogprobWriter:
    """Return the writer of log-probabilities in the answers to a body."""
    as_ids = body.return_tokens_as_token_ids
    if as_ids is None:
        as_ids = server.config.api.tokens_as_ids
    return LogprobWriter(server.tokenizer, as_ids=as_ids)


def check_together(*, stream: bool, prompt_logprobs: int | None, has_stream_options: bool) -> None:
    """Raise InvalidRequest for a field that needs or excludes `stream`."""
    if has_stream_options and not stream:
        raise InvalidRequest(
            "stream_options is allowed only when stream is true.", "stream_options"
        )
    if prompt_logprobs is not None and stream:
        raise InvalidRequest("prompt_logprobs is not available with stream.", "prompt_logprobs")
