"""llama.cpp's /completion and /infill: from a body to a job.

As in llama.cpp, an answer is as long as the context allows by default, and a stop text is not part
of it. Parameters that a body omits have the model's defaults.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import partial

from remora.configs.errors import InvalidRequest
from remora.deployments.http.core.errors import unsupported
from remora.deployments.http.core.fields import parse
from remora.deployments.http.generation.bodies import PromptInput
from remora.deployments.http.generation.constraints import output_constraint
from remora.deployments.http.generation.endpoint import Endpoint
from remora.deployments.http.generation.prompts import encode, usual_cut
from remora.deployments.http.generation.request import (
    GenerationRequest,
    PromptSettings,
    prepare,
)
from remora.deployments.http.generation.request_context import RequestContext
from remora.deployments.http.generation.routes import Route
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.http.llamacpp.answers import LlamaJob
from remora.deployments.http.llamacpp.bodies import (
    InfillBody,
    LlamaBody,
    LlamaCompletionBody,
    Part,
)
from remora.deployments.http.llamacpp.settings import llama_sampling, settings_of
from remora.engine.tokens.infill import infill_format


async def prepare_llama_completion(
    server: ServerState, body: LlamaCompletionBody, context: RequestContext
) -> LlamaJob:
    """Check everything that can be checked without the engine. Raises RequestError."""
    prompts = [await _prompt(server, parts) for parts in body.prompt]
    return await _job(server, body, context, prompts, param="prompt")


async def prepare_infill(
    server: ServerState, body: InfillBody, context: RequestContext
) -> LlamaJob:
    """Check everything that can be checked without the engine. Raises RequestError."""
    found = infill_format(server.tokenizer)
    if found is None:
        raise InvalidRequest(
            f"{server.plan.served_model_name} was not made to fill in the middle: it has no such "
            "tokens. Use /completion, or a model for code.",
            code="not_offered",
        )
    extra = [(part.filename or "file", part.text) for part in body.input_extra or ()]
    prompt = found.prompt(body.input_prefix, body.input_suffix, extra) + (body.prompt or "")
    return await _job(server, body, context, [prompt], param="input_prefix")


async def _prompt(server: ServerState, parts: Sequence[Part]) -> PromptInput:
    """Return a prompt of texts and token ids, joined to ids. Raises PromptTooLong."""
    if len(parts) == 1:
        return parts[0]
    texts = [part for part in parts if isinstance(part, str)]
    encoded = iter(await encode(server, texts, add_special_tokens=False, param="prompt"))
    begins_with_text = isinstance(parts[0], str)
    ids = server.tokenizer.encode("", add_special_tokens=True) if begins_with_text else []
    for part in parts:
        ids = ids + (next(encoded) if isinstance(part, str) else part)
    return ids


async def _job(
    server: ServerState,
    body: LlamaBody,
    context: RequestContext,
    prompts: Sequence[PromptInput],
    *,
    param: str,
) -> LlamaJob:
    model = await server.model(body.model)
    _check(body)
    constraint = output_constraint(server, body)
    sampling = llama_sampling(server, body, constraint)
    # Entries of the prefix cache are shared among equal salts.
    salt = secrets.token_hex(8) if body.cache_prompt is False else ""
    options = PromptSettings(
        cut=usual_cut(server, sampling.max_tokens),
        param=param,
        count_param="n_cmpl",
        scored_param="n_probs",
        is_scored_whole=not body.stream,
    )
    made = [
        GenerationRequest(
            prompt=prompt,
            sampling=sampling,
            model=model,
            constraint=constraint,
            may_heal=isinstance(body, LlamaCompletionBody),
            cache_salt=salt,
        )
        for prompt in prompts
    ]
    limit = server.plan.max_sequence_tokens
    return LlamaJob(
        context=context,
        requests=await prepare(server, context, made, options),
        streams=bool(body.stream),
        body=body,
        model=model.name,
        tokenizer=server.tokenizer,
        settings=settings_of(sampling, n_ctx=limit, body=body),
        n_ctx=limit,
        is_list=len(prompts) * sampling.n > 1,
        is_dry=body.limit == 0,
    )


def _check(body: LlamaBody) -> None:
    for name in ("n_indent", "t_max_predict_ms"):
        if body.stream and (getattr(body, name) or 0) > 0:
            raise unsupported(name, f"{name} is not available with stream.")
    if body.n is not None and body.n_cmpl not in (None, body.n):
        raise InvalidRequest(f"n is {body.n} and n_cmpl {body.n_cmpl}; send one of them.", "n")


LLAMA_COMPLETION = Endpoint(
    partial(parse, LlamaCompletionBody), prepare_llama_completion, kind="completion"
)
LLAMA_INFILL = Endpoint(partial(parse, InfillBody), prepare_infill, kind="completion")
LLAMA_ROUTES = (
    Route("/completion", LLAMA_COMPLETION, LlamaCompletionBody),
    Route("/infill", LLAMA_INFILL, InfillBody),
)
