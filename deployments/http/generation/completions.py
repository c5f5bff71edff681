"""Text completions: from a body to checked requests for the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from remora.configs.errors import InvalidRequest
from remora.deployments.http.core.errors import unsupported
from remora.deployments.http.generation.bodies import CompletionBody, PromptInput
from remora.deployments.http.generation.constraints import output_constraint
from remora.deployments.http.generation.logprobs import LogprobWriter
from remora.deployments.http.generation.prompts import Cut, cut_of, given_embeddings
from remora.deployments.http.generation.request import (
    GenerationRequest,
    PromptSettings,
    check_hidden,
    prepare,
)
from remora.deployments.http.generation.request_context import RequestContext
from remora.deployments.http.generation.sampling import openai_sampling
from remora.deployments.http.generation.server_state import (
    ServedModel,
    ServerState,
    check_together,
    logprob_writer,
    with_prompt_logprobs,
)
from remora.deployments.http.prompt_embeddings.prompts import refuse_with_embeddings
from remora.engine.embeddings import PromptEmbeddings
from remora.engine.tokens.infill import infill_format
from remora.engine.types import Request, SamplingParams

if TYPE_CHECKING:
    from remora.engine.tokens.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16


def _check(body: CompletionBody) -> None:
    check_together(
        stream=bool(body.stream),
        prompt_logprobs=body.prompt_logprobs,
        has_stream_options=body.stream_options is not None,
    )
    n = body.n or 1
    _check_best_of(body, n)
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequest("max_tokens may be 0 only with echo.", "max_tokens")


def _check_best_of(body: CompletionBody, n: int) -> None:
    if body.best_of is None or body.best_of == n or body.is_beam_search:
        return
    if body.best_of < n:
        message = f"best_of ({body.best_of}) must not be less than n ({n})."
        raise InvalidRequest(message, "best_of")
    if body.stream:
        message = "best_of greater than n is not available with stream."
        raise InvalidRequest(message, "best_of")


def _sampling(server: ServerState, body: CompletionBody, max_tokens: int) -> SamplingParams:
    n = body.n or 1
    num_made = n if body.is_beam_search else max(n, body.best_of or n)
    scored_by = 0 if num_made > n else None  # `best` ranks by log-probability
    return openai_sampling(
        body,
        server,
        max_tokens=max_tokens,
        logprobs=scored_by if body.logprobs is None else body.logprobs,
        prompt_logprobs=_larger(body.prompt_logprobs, body.logprobs if body.echo else None),
        n=num_made,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedCompletion:
    """A checked request with one or many prompts, independent of the API's format.

    prompts:   tokens of each prompt
    shown:     text of each prompt if the response includes it, else empty
    echoes:    text of each prompt if the response repeats it, else empty
    n:         replies to each prompt in the response, out of `sampling.n` generated
    is_dry:    whether no output is wanted (echo with max_tokens 0); the engine still generates one
               token, which the response omits
    """

    body: CompletionBody
    context: RequestContext
    model: ServedModel
    prompts: list[list[int]]
    shown: list[str]
    echoes: list[str]
    n: int
    is_dry: bool
    sampling: SamplingParams
    requests: tuple[Request, ...]
    logprobs: LogprobWriter


async def prepare_completion(
    server: ServerState, body: CompletionBody, context: RequestContext
) -> PreparedCompletion:
    """Return the request after all checks that do not need the engine.

    Raises InvalidRequest, PromptTooLong, UnknownModel.
    """
    model = await server.model(body.model)
    if body.prompt_embeds is None:
        body = with_prompt_logprobs(server, body)
    _check(body)
    is_dry = body.max_tokens == 0
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else max(1, body.max_tokens)
    sampling = _sampling(server, body, max_tokens)
    cut = cut_of(body, server, max_tokens)
    options = PromptSettings(
        add_special_tokens=body.add_special_tokens is not False,
        cut=cut,
        task=_task(server, body),
        count_param="n" if sampling.n == (body.n or 1) else "best_of",
    )
    constraint = output_constraint(server, body)
    given = await _given(server, body)
    requests = await prepare(
        server,
        context,
        [
            GenerationRequest(
                prompt=prompt,
                sampling=sampling,
                model=model,
                constraint=constraint,
                may_heal=not body.suffix,
                priority=body.priority or 0,
                cache_salt=body.cache_salt or "",
            )
            for prompt in given
        ],
        options,
    )
    check_hidden(server, requests)
    prompts = [list(request.prompt_ids) for request in requests]
    return PreparedCompletion(
        body=body,
        context=context,
        model=model,
        prompts=prompts,
        shown=await _texts(server, _with_ids(given)) if body.return_prompt_text else [],
        echoes=await _echoes(server, body, prompts, cut) if body.echo else [],
        n=body.n or 1,
        is_dry=is_dry,
        sampling=sampling,
        requests=requests,
        logprobs=logprob_writer(server, body),
    )


async def _given(
    server: ServerState, body: CompletionBody
) -> Sequence[PromptInput | PromptEmbeddings]:
    if body.prompt_embeds is None:
        return _with_suffix(server.tokenizer, body) if body.suffix else body.prompt
    asked = ("echo", "suffix", "task_id", "truncate_prompt_tokens", "return_prompt_text")
    needs_ids = {name: getattr(body, name) not in (None, False, "") for name in asked}
    needs_ids["prompt_logprobs"] = body.prompt_logprobs is not None
    refuse_with_embeddings("prompt_embeds", needs_ids)
    return await given_embeddings(server, body.prompt_embeds, "prompt_embeds")


def _with_ids(prompts: Sequence[PromptInput | PromptEmbeddings]) -> list[PromptInput]:
    return [prompt for prompt in prompts if not isinstance(prompt, PromptEmbeddings)]


def _task(server: ServerState, body: CompletionBody) -> list[int]:
    for name, value in (("echo", body.echo), ("suffix", body.suffix)):
        if body.task_id is not None and value:
            raise unsupported(name, f"{name} is not available with task_id.")
    return server.tasks.ids(body.task_id)


def _larger(first: int | None, second: int | None) -> int | None:
    return max((k for k in (first, second) if k is not None), default=None)


async def _echoes(
    server: ServerState, body: CompletionBody, prompts: Sequence[list[int]], cut: Cut | None
) -> list[str]:
    """Return the text of each prompt, without truncated parts."""
    if cut is None:
        return await _texts(server, body.prompt)
    if body.truncate_prompt_tokens is not None:
        return await _texts(server, prompts)
    pairs = zip(body.prompt, prompts, strict=True)
    shown = [given if len(ids) < cut.num_tokens else ids for given, ids in pairs]
    return await _texts(server, shown)


async def _texts(server: ServerState, prompts: Sequence[PromptInput]) -> list[str]:
    def text_of(prompt: PromptInput) -> str:
        if isinstance(prompt, str):
            return prompt
        return server.tokenizer.decode(prompt, skip_special_tokens=False)

    return await asyncio.to_thread(lambda: [text_of(prompt) for prompt in prompts])


def _with_suffix(tokenizer: Tokenizer, body: CompletionBody) -> list[str]:
    """Return fill-in-the-middle prompts. Raises InvalidRequest."""
    found = infill_format(tokenizer)
    if found is None:
        raise unsupported("suffix", "suffix: this model was not made to fill in the middle.")
    if body.echo:
        raise unsupported("echo", "echo is not available with suffix.")
    texts = [prompt for prompt in body.prompt if isinstance(prompt, str)]
    if len(texts) < len(body.prompt):
        raise InvalidRequest("suffix needs prompts that are texts.", "suffix")
    return [found.prompt(text, body.suffix or "") for text in texts]
