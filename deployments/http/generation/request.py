"""One request in no API's terms, and the checks that every request passes before the engine.

Each API translates its body to a GenerationRequest for each prompt. `prepare` tokenises the
prompts, checks everything that needs no engine, once, and compiles constraints:

    body -> GenerationRequest (an API's folder) -> engine Request (here) -> RequestTracker.open

It does not know bodies. Errors name the caller's fields, which `PromptSettings` holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from remora.configs.errors import InvalidRequest
from remora.configs.planning.plan import EnginePlan
from remora.deployments.http.core.body_limits import check_sequences, limit
from remora.deployments.http.core.errors import unsupported
from remora.deployments.http.generation.bodies import PromptInput
from remora.deployments.http.generation.constraints import OutputConstraint, compile_constraint
from remora.deployments.http.generation.logprobs import check_scored
from remora.deployments.http.generation.prompts import Cut, check_room, encode, prompt_ids
from remora.deployments.http.generation.request_context import RequestContext
from remora.deployments.http.generation.server_state import ServedModel, ServerState
from remora.deployments.parsers.tools import NO_TOOLS, ToolUse
from remora.engine.embeddings import PromptEmbeddings
from remora.engine.types import Grammar, ReasoningBudget, Request, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What is generated from one prompt.

    prompt:              text (for a conversation: as the chat template renders it), token ids, or
                         embeddings
    sampling:            `max_tokens` None = as many as fit, or `default_max_tokens`
    default_max_tokens:  lowered to the room that the prompt leaves
    name:                by which the prompt alone can be aborted; None = the request's id
    use:                 tools of a conversation
    may_heal:            whether the last token of a text may be generated anew
    prediction:          text that the output is expected to have; None = nothing is expected
    """

    prompt: PromptInput | PromptEmbeddings
    sampling: SamplingParams
    model: ServedModel
    default_max_tokens: int | None = None
    name: str | None = None
    constraint: OutputConstraint | None = None
    use: ToolUse = NO_TOOLS
    reasoning: ReasoningBudget | None = None
    may_heal: bool = True
    priority: int = 0
    cache_salt: str = ""
    prediction: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSettings:
    """What the prompts of one request have in common, and the caller's names of their fields.

    cut:              how prompts that are too long are truncated; None = they are refused
    task:             ids put before each prompt
    param:            the prompts
    count_param:      the number of outputs
    scored_param:     log-probabilities
    tools_param:      the tools
    is_scored_whole:  whether log-probabilities of the whole answer are in memory together
    is_repeated:      whether every event of a stream repeats all of them
    """

    add_special_tokens: bool = True
    cut: Cut | None = None
    task: list[int] = field(default_factory=list)
    param: str = "prompt"
    count_param: str = "n"
    scored_param: str = "logprobs"
    tools_param: str = "tools"
    is_scored_whole: bool = True
    is_repeated: bool = False


async def prepare(
    server: ServerState,
    context: RequestContext,
    requests: Sequence[GenerationRequest],
    options: PromptSettings,
) -> tuple[Request, ...]:
    """Return the engine's requests after all checks that need no engine.

    Raises InvalidRequest and PromptTooLong.
    """
    num_outputs = sum(request.sampling.n for request in requests)
    is_many = num_outputs == len(requests) > 1
    param = options.param if is_many else options.count_param
    check_sequences(num_outputs, param)
    server.calls.check_size(num_outputs, param)
    all_ids = await prompt_ids(
        server,
        [request.prompt for request in requests],
        add_special_tokens=options.add_special_tokens,
        param=options.param,
        cut=options.cut,
        before=options.task,
    )
    samplings = [
        _limited(request, len(ids), server.plan, options.param)
        for request, ids in zip(requests, all_ids, strict=True)
    ]
    if options.is_scored_whole:
        lengths = [len(ids) for ids in all_ids]
        check_scored(samplings, lengths, options.scored_param, is_repeated=options.is_repeated)
    made, grammars = list[Request](), dict[OutputConstraint | None, Grammar | None]()
    for request, ids, sampling in zip(requests, all_ids, samplings, strict=True):
        found = request.constraint
        if found not in grammars:
            grammars[found] = await compile_constraint(
                server, found, request.use, tools_param=options.tools_param
            )
        made.append(
            Request(
                request_id=request.name or context.request_id,
                prompt_ids=ids,
                sampling=sampling,
                priority=request.priority,
                cache_salt=_salt(server, context, request),
                grammar=grammars[found],
                heal=_heals(server, request, sampling, grammars[found]),
                reasoning=request.reasoning,
                lora_id=request.model.lora_id,
                kept_tokens=len(options.task),
                prediction_ids=await _predicted(server, request),
                embeddings=_embeddings(request.prompt),
            )
        )
    return tuple(made)


def _embeddings(prompt: PromptInput | PromptEmbeddings) -> PromptEmbeddings | None:
    return prompt if isinstance(prompt, PromptEmbeddings) else None


def check_hidden(server: ServerState, requests: Sequence[Request]) -> None:
    """Raise InvalidRequest if requests ask for hidden states that are not available."""
    name = "return_hidden_states"
    if not any(request.sampling.hidden_states for request in requests):
        return
    if not server.config.api.hidden_states:
        raise unsupported(name, f"{name}: hidden states are off; set api.hidden_states.")
    longest = server.plan.max_sequence_tokens
    num_tokens = 0
    for request in requests:
        num_prompt, num_output = len(request.prompt_ids), request.sampling.max_tokens
        num_tokens += longest if num_output is None else num_prompt + num_output
    allowed = limit("max_hidden_tokens")
    if num_tokens > allowed:
        message = (
            f"{name}: prompts and outputs may have {num_tokens} tokens together; at most {allowed} "
            "are allowed with hidden states. Send less at a time, or lower the limit of the output."
        )
        raise InvalidRequest(message, name, limit="max_hidden_tokens")


def _salt(server: ServerState, context: RequestContext, request: GenerationRequest) -> str:
    """Return the salt of the request's prefix-cache entries, which other keys do not have."""
    if not context.owner or server.config.api.share_prefix_cache:
        return request.cache_salt
    return f"{context.owner}:{request.cache_salt}"


async def _predicted(server: ServerState, request: GenerationRequest) -> Sequence[int]:
    """Return the tokens of the prediction, where it can speed the answer up."""
    if not request.prediction or server.plan.speculation is None:
        return ()
    (ids,) = await encode(
        server, [request.prediction], add_special_tokens=False, param="prediction.content"
    )
    return ids[: server.plan.max_sequence_tokens]


def _limited(
    request: GenerationRequest, num_prompt: int, plan: EnginePlan, param: str
) -> SamplingParams:
    """Return the sampling with the default of `max_tokens`. Raises PromptTooLong."""
    sampling, default = request.sampling, request.default_max_tokens
    check_room(num_prompt, sampling.max_tokens, plan, param)
    if sampling.max_tokens is not None or default is None:
        return sampling
    return replace(sampling, max_tokens=min(default, plan.max_sequence_tokens - num_prompt))


def _heals(
    server: ServerState,
    request: GenerationRequest,
    sampling: SamplingParams,
    grammar: Grammar | None,
) -> bool:
    """Return whether the last token of the prompt is generated anew."""
    is_free = grammar is None and sampling.prompt_logprobs is None
    is_wanted = server.config.grammar.token_healing and request.may_heal
    return is_wanted and is_free and isinstance(request.prompt, str)
