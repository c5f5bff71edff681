"""Warm-up requests, which a replica runs before it is ready, to do first-time work.

Each routine builds a request from a prompt. Requests go directly to the engine, without metrics.
Pooling models have no routines: their inputs are embedded or scored.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from remora.configs.errors import ConfigError, RequestError
from remora.configs.sections.warmup import WarmupSection
from remora.deployments.http.core.fields import parse
from remora.deployments.http.generation.bodies import ChatBody
from remora.deployments.http.generation.chat import prepare_chat
from remora.deployments.http.generation.request_context import RequestContext
from remora.deployments.http.generation.sampling import check_vocabulary
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.http.pooling.requests import NO_TEXT, framer_of
from remora.engine.grammar.constraint import Constraint, ConstraintKind
from remora.engine.types import PoolingParams, Request, SamplingParams

# The step of the prompt, and two that follow one another. More would only delay the start: where
# ranks share cores, a step takes a third of a second.
OUTPUT_TOKENS = 3
SENTENCE = "The capital of France is"

Prompt = str | Sequence[int]


async def warm_up(server: ServerState, section: WarmupSection) -> float | None:
    """Run the configured routines; return the seconds to the first token of the last request.

    Task prompts are computed in any case, because their KV stays cached, except where each API key
    has a prefix cache of its own.
    Raises ConfigError for a routine, an input or a task prompt that the model cannot run.
    """
    if server.pooling is not None:
        await _compute_rows(server, section)
        return None
    first_token_s = await _run_routines(server, section) if section.enabled else None
    await server.tasks.compute(
        server.client,
        server.plan.max_sequence_tokens,
        runs=not server.config.separates_keys,
    )
    return first_token_s


async def _run_routines(server: ServerState, section: WarmupSection) -> float:
    first_token_s = 0.0
    default: list[Prompt] = [SENTENCE] if server.tokenizer.takes_text else [[0]]
    for _ in range(section.iterations):
        for name in section.routines:
            for given in section.inputs or default:
                try:
                    first_token_s = await _run(server, await ROUTINES[name](server, given))
                except RequestError as error:
                    message = f"warmup: cannot run the routine {name!r}: {error}"
                    raise ConfigError(message) from error
    await server.client.flush_cache()
    return first_token_s


async def _compute_rows(server: ServerState, section: WarmupSection) -> None:
    """Embed or score the inputs. Raises ConfigError."""
    if not section.enabled:
        return
    if section.routines != ["generate"]:
        raise ConfigError(
            f"warmup.routines apply to generating models; this model is for {server.plan.task}. "
            "Remove warmup.routines; warmup.inputs are computed."
        )
    default: list[Prompt] = [SENTENCE] if server.tokenizer.takes_text else [[0]]
    for _ in range(section.iterations):
        for given in section.inputs or default:
            try:
                await _run(server, _row(server, given))
            except RequestError as error:
                raise ConfigError(f"warmup: cannot compute an input: {error}") from error


def _row(server: ServerState, given: Prompt) -> Request:
    if isinstance(given, str):
        framer = framer_of(server, "warmup.inputs")
        (row,) = framer.rows([given], max_tokens=server.plan.max_sequence_tokens)
        ids = row.token_ids
    else:
        ids = given[: server.plan.max_sequence_tokens]
        check_vocabulary(list(ids), server.tokenizer.vocab_size, "warmup.inputs")
    return Request(request_id=_name(), prompt_ids=ids, sampling=NO_TEXT, pooling=PoolingParams())


async def _run(server: ServerState, request: Request) -> float:
    started = time.perf_counter()
    first_token_s = None
    async with aclosing(server.client.generate(request)) as outputs:
        async for _ in outputs:
            first_token_s = first_token_s or time.perf_counter() - started
    return first_token_s or 0.0


def _plain(server: ServerState, given: Prompt, sampling: SamplingParams) -> Request:
    if isinstance(given, str):
        ids = server.tokenizer.encode(given, add_special_tokens=True)
    else:
        ids = list(given)
    check_vocabulary(ids, server.tokenizer.vocab_size, "warmup.inputs")
    room = server.plan.max_sequence_tokens - OUTPUT_TOKENS
    return Request(request_id=_name(), prompt_ids=ids[-room:] or [0], sampling=sampling)


def _name() -> str:
    return f"warm-up-{uuid.uuid4().hex}"


_GREEDY = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
_LOGPROBS = replace(_GREEDY, logprobs=5, prompt_logprobs=5)
_SAMPLED = replace(
    _GREEDY,
    temperature=0.8,
    top_k=50,
    top_p=0.9,
    min_p=0.05,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    seed=0,
)


async def _generate(server: ServerState, given: Prompt, *, sampling: SamplingParams) -> Request:
    return _plain(server, given, sampling)


async def _grammar(server: ServerState, given: Prompt) -> Request:
    constraint = Constraint(kind=ConstraintKind.REGEX, source="[a-z ]{1,40}")
    grammar = await server.grammars.compile(constraint, param="warmup.routines")
    sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0)
    return replace(_plain(server, given, sampling), grammar=grammar)


async def _chat(server: ServerState, given: Prompt) -> Request:
    text = given
    if not isinstance(text, str):
        text = server.tokenizer.decode(text, skip_special_tokens=True)
    messages = [{"role": "user", "content": text}]
    fields = {"messages": messages, "max_tokens": OUTPUT_TOKENS, "temperature": 0}
    return (
        await prepare_chat(server, parse(ChatBody, fields), RequestContext(request_id=_name()))
    ).request


ROUTINES: Mapping[str, Callable[[ServerState, Prompt], Awaitable[Request]]] = {
    "generate": partial(_generate, sampling=_GREEDY),
    "sample": partial(_generate, sampling=_SAMPLED),
    "logprobs": partial(_generate, sampling=_LOGPROBS),
    "grammar": _grammar,
    "chat": _chat,
}
