"""Makes route keys from requests: session, prompt pages, adapter.

Page hashes equal the replica's, because the replica's own code prepares the prompt: same bodies,
templates and tokenizer, without running anything. That prepares each prompt twice, so only the
policy prefix does it. The adapter is read from a field of the body, whether or not it exists.

Nothing is refused here: a malformed body has no pages, and the replica answers with the error.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from remora.configs.errors import ConfigError, RemoraError
from remora.configs.facts import MachineFacts, ModelFacts
from remora.configs.multiple_models import name_of
from remora.configs.planning.plan import make_plan
from remora.configs.schema import ServeConfig
from remora.deployments.adapters.served_adapters import FixedAdapters
from remora.deployments.http.app import GENERATION
from remora.deployments.http.endpoints import OLLAMA_ROUTES
from remora.deployments.http.generation.endpoint import Endpoint
from remora.deployments.http.generation.request_context import RequestContext
from remora.deployments.http.generation.server_state import ServedEngine, ServerState
from remora.deployments.http.integration.short_paths import SHORT_PATHS, full_path
from remora.deployments.http.rtp_llm.bodies import CONFIG_NAMES, is_rtp
from remora.deployments.http.shared_paths import text_routes
from remora.deployments.routing.key import RouteKey
from remora.engine.grammar.constraint import Constraint
from remora.engine.grammar.service import GrammarStats
from remora.engine.kv.hashes import page_hashes
from remora.engine.models.checkpoint import read_config
from remora.engine.models.config import DecoderConfig
from remora.engine.models.locate import locate_model
from remora.engine.tokens.configured import configured_tokenizer
from remora.engine.tokens.generation_config import read_generation_defaults
from remora.engine.types import Grammar, Matcher, Request

log = logging.getLogger(__name__)

# Of English text; accurate enough to distinguish long prompts from short ones.
BYTES_PER_TOKEN = 4
MAX_NAME_CHARS = 512
# Bodies name a session in one of these fields, the first found.
SESSION_FIELDS = ("prompt_cache_key", "user")
# Field of SGLang's bodies that names an adapter in addition to `model`.
_SGLANG, _LORA_PATH = "/generate", "lora_path"
# Field of TGI's parameters that does.
_TGI, _ADAPTER_ID = ("/generate", "/generate_stream", "/"), "adapter_id"
# Field of RTP-LLM's generate_config that does.
_RTP, _ADAPTER_NAME = ("/", "/batch_infer"), "adapter_name"
# Tag that Ollama's clients append to a name without one.
_OLLAMA, _LATEST = "/api/", ":latest"
# Memory does not matter here, and a prompt's limits must not depend on this machine.
_ANY_MACHINE = MachineFacts(
    num_cores=1,
    total_bytes=2**60,
    available_bytes=2**60,
    cpu_name="",
    cpu_features=(),
    devices=("cpu", "cuda:0"),
)


class PromptKeys:
    """Makes the keys of one model's requests. With the policy prefix it loads the tokenizer."""

    def __init__(self, config: ServeConfig) -> None:
        self._session_header = config.routing.session_header.lower()
        self._page_size = config.engine.page_size
        routes = (*GENERATION, *text_routes(config.api.generate_dialect), *OLLAMA_ROUTES)
        by_path = {r.path: r.endpoint for r in routes}
        # A routing service sees paths as clients write them.
        short = {p: by_path[full_path(p)] for p in SHORT_PATHS if full_path(p) in by_path}
        self._endpoints: Mapping[str, Endpoint[Any]] = by_path | short
        policy = config.routing.policy
        self._served = _rehearsal(config) if policy == "prefix" else None
        # A merged adapter is served under every name.
        self._reads_adapters = policy == "lora" and not config.lora.merges
        self._base = name_of(config)

    @property
    def paths(self) -> Iterable[str]:
        """The paths whose requests have prompts."""
        return self._endpoints.keys()

    async def of(
        self, path: str, headers: Mapping[str, str], body: Any, owner: str = ""
    ) -> RouteKey:
        """Return the key of a request.

        path:   without the application's route prefix
        body:   parsed, as the replica parses it; None = no body, or not JSON
        owner:  of the request's API key, which may have a prefix cache of its own
        """
        session = self._session(headers, body)
        endpoint = self._endpoints.get(path)
        if self._served is not None and endpoint is not None and body is not None:
            try:
                context = RequestContext(request_id="route", owner=owner)
                job, _ = await endpoint.job(self._served, body, context)
                if job.requests:  # empty for a request that only loads a model
                    return self._key_of(session, job.requests)
            except RemoraError as error:
                log.debug("routing: no pages of a prompt: %s", error)
            except Exception:
                # A boundary: the replica reports this error; routing must not fail.
                log.warning("routing: cannot prepare a prompt of %s", path, exc_info=True)
        length = headers.get("content-length", "")
        num_tokens = int(length) // BYTES_PER_TOKEN if length.isdecimal() else 0
        adapter = self._adapter(path, body) if endpoint is not None else None
        return RouteKey(session=session, num_tokens=num_tokens, adapter=adapter)

    def _key_of(self, session: str | None, requests: Sequence[Request]) -> RouteKey:
        first = requests[0]
        return RouteKey(
            session=session,
            page_hashes=page_hashes(first.namespace, first.kept_prompt_ids, self._page_size),
            num_tokens=sum(len(request.prompt_ids) for request in requests),
        )

    def _session(self, headers: Mapping[str, str], body: Any) -> str | None:
        found = [headers.get(self._session_header)]
        if isinstance(body, dict):
            found += [body.get(name) for name in SESSION_FIELDS]
        return _first_name(found)

    def _adapter(self, path: str, body: Any) -> str | None:
        """Return the adapter that a body names; the first, if it names several."""
        if not self._reads_adapters or not isinstance(body, dict):
            return None
        given = body.get(_LORA_PATH) if path == _SGLANG else None
        found = given if isinstance(given, list) else [given]
        parameters = body.get("parameters")
        if path in _TGI and isinstance(parameters, dict):
            found = [*found, parameters.get(_ADAPTER_ID)]
        if path in _RTP and is_rtp(body):
            found = [*found, *_adapters_of_rtp(body)]
        name = _first_name((*found, body.get("model"))) or self._base
        if path.startswith(_OLLAMA) and name != self._base:
            name = name.removesuffix(_LATEST)
        return None if name == self._base else name.removeprefix(f"{self._base}:")


def _adapters_of_rtp(body: Mapping[str, Any]) -> list[Any]:
    """Return the adapter names of RTP-LLM's body; its own fields come before the config's."""
    found: list[Any] = []
    for place in (body, *(body.get(name) for name in CONFIG_NAMES)):
        given = place.get(_ADAPTER_NAME) if isinstance(place, dict) else None
        found += given if isinstance(given, list) else [given]
    return found


def _first_name(found: Iterable[Any]) -> str | None:
    names = (name for name in found if isinstance(name, str) and name)
    return next((name[:MAX_NAME_CHARS] for name in names), None)


class _Uncompiled:
    """A constraint that is never applied."""

    num_bytes = 0

    def matcher(self) -> Matcher:
        raise NotImplementedError


class _NoGrammars:
    """Accepts every constraint without compiling it, which would cost the most."""

    async def compile(self, constraint: Constraint, *, param: str) -> Grammar:
        return _Uncompiled()

    def stats(self) -> GrammarStats:
        raise NotImplementedError


def _rehearsal(config: ServeConfig) -> ServerState | None:
    """Return a server that prepares requests; None, with a warning, if the model is unreadable."""
    try:
        path = locate_model(config.model, with_weights=False)
        # This process uses no GPU, also where the replicas' `auto` finds one.
        is_named = config.engine.device != "auto"
        machine = _ANY_MACHINE if is_named else replace(_ANY_MACHINE, devices=("cpu",))
        facts = _facts_of(read_config(path, config.model.config_overrides))
        plan = make_plan(config, facts, machine, path)
        tokenizer = configured_tokenizer(config.model, path, vocab_size=facts.vocab_size)
    except (ConfigError, OSError) as error:
        log.warning(
            "routing: cannot read the model, so requests are routed by load alone: %s", error
        )
        return None
    tokenizer.limit_rendering(
        max_seconds=config.limits.template_timeout_s, max_chars=config.limits.max_template_chars
    )
    return ServerState.over(
        ServedEngine(
            client=cast("Any", SimpleNamespace(stats=None)),  # never used
            config=config,
            tokenizer=tokenizer,
            plan=plan,
            grammars=_NoGrammars(),
            generation_defaults=read_generation_defaults(plan.model_path),
            adapters=FixedAdapters(config.lora),
            # Inputs of a pooling model have no pages.
        )
    )


def _facts_of(model: DecoderConfig) -> ModelFacts:
    """Return the facts that a plan needs, except those of the weights.

    The replica's own function builds the model with torch, which a gateway does not need.
    """
    return ModelFacts(
        architecture=model.architecture,
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        vocab_size=model.vocab_size,
        max_position=model.max_position,
        dtype="bfloat16",
        num_parameters=0,
    )
