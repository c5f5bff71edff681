"""Administration of the server: models, health, metrics, cache, aborting, tokenising."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

from pydantic import Field

from remora.configs.errors import EngineError, InvalidRequest, RemoraError, Unavailable
from remora.configs.schema import ServeConfig
from remora.configs.version import __version__
from remora.deployments.http.core.fields import Body, parse
from remora.deployments.http.generation.bodies import DetokenizeBody, TokenizeBody
from remora.deployments.http.generation.prompts import encode, render
from remora.deployments.http.generation.request_context import RequestContext
from remora.deployments.http.generation.sampling import check_vocabulary
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.http.generation.weight_update import described
from remora.engine.spec.counts import DraftCounts
from remora.engine.types import PoolingParams, Request, SamplingParams

if TYPE_CHECKING:
    from remora.engine.observe.profiling import Profiler

HEALTH_TOKEN_TIMEOUT_S = 20.0
MAX_DETOKENIZE_IDS = 2**18  # the text of an id may be many times as long as the id in the body
PREFERRED_NAMES = {"max_tokens": "max_new_tokens"}
# Configuration that /server_info hides: paths, addresses and keys.
_UNSHOWN: dict[str, Any] = {
    "model": {"path", "tokenizer_path", "weight_roots", "weight_instances"},
    "lora": {"adapters": {"__all__": {"path"}}, "repo": True, "roots": True, "store": True},
    "engine": {"kv_events_endpoint"},
    "metrics": {"log_config", "push_url", "push_auth", "trace_endpoint"},
    "debug": {"profile_dir", "crash_dump_dir", "tensor_dump_dir", "tensor_dump_input"},
    "limits": {"tenants": {"__all__": {"api_key"}}},
    "api": {"api_key", "admin_api_key", "batch_dir", "response_store"},
}


def model_card(server: ServerState, name: str) -> dict[str, Any]:
    """Return the entry of /v1/models for one of the model's names."""
    base = server.plan.served_model_name
    return {
        "id": name,
        "object": "model",
        "created": server.created,
        "owned_by": "remora",
        "root": name if name == base else _shown_source(server.adapters.source(name)) or name,
        "parent": None if name == base else base,
        "max_model_len": server.plan.max_model_len,
    }


def _shown_source(source: str | None) -> str | None:
    """Return the place of an adapter's files, without what a URL holds of secrets."""
    if source is None or "://" not in source:
        return source
    parts = urlsplit(source)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def model_info(server: ServerState) -> dict[str, Any]:
    """Return the body of SGLang's /model_info."""
    plan = server.plan
    return {
        "model_path": plan.served_model_name,
        "tokenizer_path": plan.served_model_name,
        "served_model_name": plan.served_model_name,
        "is_generation": server.pooling is None,
        "task": plan.task,
        "weight_version": server.weights.version,
        "max_model_len": plan.max_model_len,
        "vocab_size": server.tokenizer.vocab_size,
        "dtype": plan.dtype,
        "preferred_sampling_params": _preferred(server),
    }


def _preferred(server: ServerState) -> dict[str, Any] | None:
    """Return the configured sampling defaults, by SGLang's names."""
    wanted = server.config.sampling.model_dump(exclude_none=True)
    return {PREFERRED_NAMES.get(name, name): value for name, value in wanted.items()} or None


def server_info(server: ServerState) -> dict[str, Any]:
    """Return configuration, plan and counters."""
    plan, stats = server.plan, server.client.stats()
    return {
        "version": __version__,
        "served_model_name": plan.served_model_name,
        "status": _status(server),
        "startup_time": server.part(Startup, Startup.unknown).seconds,
        "context_length": plan.max_model_len,
        "max_total_num_tokens": plan.kv_tokens,
        "max_running_requests": plan.max_running_requests,
        "max_queued_requests": plan.max_queued_requests,
        "page_size": plan.page_size,
        "device": plan.device,
        "dtype": plan.dtype,
        "tp_size": plan.tp_size,
        "pp_size": plan.pp_size,
        "nnodes": server.config.parallel.num_nodes,
        "speculation": _speculation(server),
        **described(server.weights),
        "config": server.config.model_dump(mode="json", exclude=_UNSHOWN),
        "user_config_refused": server.settings.refused,
        "internal_states": [
            {
                "num_running_reqs": stats.num_running,
                "num_queue_reqs": stats.num_waiting,
                "token_usage": stats.kv_usage,
                "last_step_s": stats.last_step_s,
            }
        ],
    }


def load(server: ServerState) -> dict[str, int]:
    """Return the body of vLLM's /load: the sequences that run or wait on this replica."""
    stats = server.client.stats()
    return {"server_load": stats.num_running + stats.num_waiting}


@dataclass(slots=True)
class Startup:
    """The start of a replica: how long it took, in seconds; None = not known yet."""

    seconds: float | None = None

    @classmethod
    def unknown(cls, _: ServeConfig) -> Startup:
        """Return a start whose duration is not known."""
        return cls()


def _status(server: ServerState) -> str:
    if server.calls.is_draining:
        return "draining"
    return "paused" if server.client.is_paused else "ready"


def _speculation(server: ServerState) -> dict[str, Any] | None:
    """Return how rows get drafts, and how many of them were right; None = they get none."""
    spec, stats = server.plan.speculation, server.client.stats()
    if spec is None:
        return None
    return {
        "method": spec.method,
        "max_drafts": spec.max_drafts,
        "adaptive": spec.is_adaptive,
        **_counts(
            DraftCounts(
                stats.drafted_rows_total, stats.draft_tokens_total, stats.accepted_drafts_total
            )
        ),
        "sources": {source: _counts(counts) for source, counts in stats.drafts_by_source},
        "tried_by_position": stats.tried_drafts,
        "right_by_position": stats.right_drafts,
        "draft_time_s": stats.draft_time_total_s,
        "verify_steps": stats.verify_steps_total,
        "verify_time_s": stats.verify_time_total_s,
    }


def _counts(counts: DraftCounts) -> dict[str, float]:
    return {
        "verified_rows": counts.num_rows,
        "draft_tokens": counts.num_drafts,
        "accepted_drafts": counts.num_accepted,
        "acceptance_rate": counts.acceptance_rate,
        "tokens_per_verified_row": counts.tokens_per_row,
    }


def check_health(server: ServerState) -> None:
    """Raise Unavailable unless the engine loop is alive and no step is overdue."""
    try:
        server.client.check_health()
    except EngineError as error:
        raise Unavailable(f"The engine is not healthy: {error}") from error


def check_ready(server: ServerState) -> None:
    """Raise Unavailable unless the replica accepts new requests."""
    check_health(server)
    if server.calls.is_draining:
        raise Unavailable("This replica is about to stop.")


async def check_token(server: ServerState) -> None:
    """Raise Unavailable unless the engine generates a token within HEALTH_TOKEN_TIMEOUT_S."""
    if server.client.is_paused:
        raise Unavailable("Generation is paused, so no token is made; see /continue_generation.")
    eos = server.tokenizer.eos_token_ids
    request = Request(
        request_id="health",
        prompt_ids=[eos[0] if eos else 0],
        sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
        pooling=None if server.pooling is None else PoolingParams(),
    )
    try:
        async with asyncio.timeout(HEALTH_TOKEN_TIMEOUT_S):
            opening = server.calls.open(
                RequestContext(request_id="health"), [request], takes_place=False
            )
            async with aclosing(await opening) as outputs:
                async for _ in outputs:
                    pass
    except (TimeoutError, RemoraError) as error:
        raise Unavailable("The engine did not make a token.") from error


class AbortBody(Body):
    """Body of /abort_request."""

    rid: Annotated[str, Field(max_length=256)] | None = None  # "" from SGLang's clients means none
    abort_all: bool | None = None


async def abort(server: ServerState, body: AbortBody) -> dict[str, Any]:
    """Abort the requests with one id, or all requests. Raises InvalidRequest."""
    if body.abort_all:
        return {"num_aborted": await server.calls.abort_all()}
    if not body.rid:
        raise InvalidRequest("rid is required unless abort_all is true.", "rid")
    # Clients may send the id of the answer instead of the request's id.
    rid = body.rid.removeprefix("chatcmpl-").removeprefix("cmpl-")
    num = await server.calls.abort(body.rid)
    return {"num_aborted": num or await server.calls.abort(rid)}


async def flush_cache(server: ServerState) -> dict[str, Any]:
    """Drop the prefix cache. Raises InvalidRequest while requests are running."""
    if not await server.client.flush_cache():
        raise InvalidRequest(
            "The cache was not flushed: requests are running. Try again when there are none.",
            code="requests_running",
        )
    return {"success": True, "message": "Cache flushed."}


def step_records(server: ServerState) -> dict[str, Any]:
    """Return the records of recent steps. Raises InvalidRequest if they are not kept."""
    records = None if server.inspection is None else server.inspection.records
    if records is None:
        raise InvalidRequest(
            "No step records are kept: metrics.max_step_records is 0.", code="not_enabled"
        )
    return {"records": records.recent()}


class ProfileBody(Body):
    """Body of /start_profile. The operator, not the caller, sets the folder of traces."""

    num_steps: Annotated[int, Field(ge=1, le=1_000_000)] | None = None


def profiler(server: ServerState) -> Profiler:
    """Return the profiler. Raises InvalidRequest if there is none."""
    found = None if server.inspection is None else server.inspection.profiler
    if found is None:
        raise InvalidRequest("There is no profiler: set debug.profile_dir.", code="not_enabled")
    return found


async def tokenize(server: ServerState, body: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the token ids of a prompt, of several, or of a conversation; and headers."""
    parsed = parse(TokenizeBody, body)
    headers = server.report_ignored(parsed)
    await server.model(parsed.model)
    special = parsed.add_special_tokens
    if parsed.messages is not None:
        texts = [await render(server, parsed.messages, parsed)]
        param, special = "messages", bool(special)
    else:
        texts = parsed.prompt if isinstance(parsed.prompt, list) else [parsed.prompt]
        param, special = "prompt", special is not False
    all_ids = await encode(server, texts, add_special_tokens=special, param=param)
    is_list = isinstance(parsed.prompt, list)
    answer: dict[str, Any] = {
        "count": [len(ids) for ids in all_ids] if is_list else len(all_ids[0]),
        "max_model_len": server.plan.max_model_len,
        "tokens": all_ids if is_list else all_ids[0],
    }
    if parsed.return_token_strs:
        strs = [[server.tokenizer.entry(token_id) for token_id in ids] for ids in all_ids]
        answer["token_strs"] = strs if is_list else strs[0]
    return answer, headers


async def detokenize(server: ServerState, body: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the text of token ids, under vLLM's, SGLang's and llama.cpp's names; and headers."""
    parsed = parse(DetokenizeBody, body)
    headers = server.report_ignored(parsed)
    await server.model(parsed.model)
    is_list = bool(parsed.tokens) and isinstance(parsed.tokens[0], list)
    all_ids = parsed.tokens if is_list else [parsed.tokens]
    num_ids, most = sum(map(len, all_ids)), max(MAX_DETOKENIZE_IDS, server.plan.max_model_len)
    if num_ids > most:
        message = f"tokens has {num_ids} ids; at most {most} are allowed. Send fewer at a time."
        raise InvalidRequest(message, "tokens", limit="max_detokenize_ids")
    for ids in all_ids:
        check_vocabulary(ids, server.tokenizer.vocab_size, "tokens")

    def decode() -> list[str]:
        skip = bool(parsed.skip_special_tokens)
        return [server.tokenizer.decode(ids, skip_special_tokens=skip) for ids in all_ids]

    texts = await asyncio.to_thread(decode)
    text = texts if is_list else texts[0]
    return {"prompt": text, "text": text, "content": text}, headers
