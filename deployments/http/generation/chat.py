"""Conversations: from a body to a checked request for the engine.

Every chat API translates its body into a ChatBody, which is checked here, once, and formats the
replies itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from remora.configs.errors import InvalidRequest
from remora.deployments.http.core.errors import unsupported
from remora.deployments.http.generation.bodies import ChatBody
from remora.deployments.http.generation.constraints import (
    RESPONSE_FORMAT,
    constraint_of,
    output_constraint,
)
from remora.deployments.http.generation.logprobs import LogprobWriter
from remora.deployments.http.generation.prompts import cut_of, render
from remora.deployments.http.generation.reasoning import check_effort, opened
from remora.deployments.http.generation.replies import Replies
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
from remora.deployments.http.generation.tools import tool_use_of
from remora.deployments.parsers.replies import ParserFactory
from remora.deployments.parsers.tools import ToolChoice, ToolUse
from remora.engine.types import Output, Request, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedChat:
    """A checked conversation, independent of the API's format.

    prompt:        the conversation as rendered by the template
    make_parser:   makes the parser of one reply's text
    counts_calls:  whether a reply with tool calls has the finish reason `tool_calls`
    """

    body: ChatBody
    context: RequestContext
    model: ServedModel
    prompt: str
    request: Request
    logprobs: LogprobWriter
    make_parser: ParserFactory = lambda: None
    counts_calls: bool = True

    @property
    def prompt_ids(self) -> Sequence[int]:
        """The token ids of the prompt."""
        return self.request.prompt_ids

    @property
    def sampling(self) -> SamplingParams:
        """The sampling parameters."""
        return self.request.sampling

    def tokens_of(self, output: Output) -> list[Output]:
        """Return an output as outputs of one token each."""
        return self.logprobs.split(output)

    def replies(self) -> Replies:
        """Return an empty set of replies for the request's outputs."""
        n = self.sampling.n
        return Replies(1, n, self.make_parser, counts_calls=self.counts_calls)


def _check(server: ServerState, body: ChatBody, use: ToolUse) -> None:
    check_together(
        stream=bool(body.stream),
        prompt_logprobs=body.prompt_logprobs,
        has_stream_options=body.stream_options is not None,
    )
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true.", "top_logprobs")
    is_drawn = not body.is_beam_search
    if is_drawn and body.best_of is not None and body.best_of != (body.n or 1):
        raise unsupported("best_of", "best_of is supported only when it equals n.")
    found = constraint_of(body)
    if use.is_forced and found is not None and found[1] != RESPONSE_FORMAT:
        message = f"tool_choice {use.choice} cannot be combined with {found[1]}."
        raise InvalidRequest(message, "tool_choice")
    server.formats.check_tools(use)


def _sampling(
    server: ServerState, body: ChatBody, use: ToolUse, max_tokens: int | None
) -> SamplingParams:
    is_new = body.max_completion_tokens is not None
    return openai_sampling(
        body,
        server,
        max_tokens=max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        names={"max_tokens": "max_completion_tokens" if is_new else "max_tokens"},
        shown_special_ids=server.formats.shown_special_ids(use),
    )


async def prepare_chat(
    server: ServerState, body: ChatBody, context: RequestContext
) -> PreparedChat:
    """Return the conversation after all checks that do not need the engine.

    Raises InvalidRequest, PromptTooLong, UnknownModel.
    """
    body = with_prompt_logprobs(server, body)
    use = tool_use_of(body)
    model = await server.model(body.model)
    _check(server, body, use)
    max_tokens = body.max_completion_tokens
    if max_tokens is None:
        max_tokens = body.max_tokens
    sampling = _sampling(server, body, use, max_tokens)
    constraint = output_constraint(server, body)
    options = PromptSettings(
        add_special_tokens=bool(body.add_special_tokens),
        cut=cut_of(body, server, max_tokens),
        task=server.tasks.ids(body.task_id),
        param="messages",
        scored_param="top_logprobs",
        tools_param="functions" if body.is_old else "tools",
        is_scored_whole=not body.stream,  # a stream is written piece by piece
    )
    prompt = await render(server, body.messages, body, is_cut=options.cut is not None)
    check_effort(server, body, prompt)
    is_held = constraint is not None or use.is_forced
    prompt = opened(server.formats, body, prompt, is_held=is_held)
    continues = bool(body.continue_final_message)
    generation = GenerationRequest(
        prompt=prompt,
        sampling=sampling,
        model=model,
        default_max_tokens=server.generation_defaults.get("max_tokens"),
        constraint=constraint,
        use=use,
        reasoning=server.formats.reasoning_budget(
            prompt, budget=body.thinking_token_budget, continues=continues, use=use
        ),
        may_heal=False,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        prediction=None if body.prediction is None else body.prediction.text,
    )
    (request,) = await prepare(server, context, [generation], options)
    check_hidden(server, [request])
    return PreparedChat(
        body=body,
        context=context,
        model=model,
        prompt=prompt,
        request=request,
        logprobs=logprob_writer(server, body),
        make_parser=server.formats.make_parser(
            prompt=prompt,
            use=use,
            separate_reasoning=body.separate_reasoning is not False,
            stream_reasoning=body.stream_reasoning is not False,
            continues=continues,
            skip_special_tokens=sampling.skip_special_tokens,
            note=server.metrics.count_call_fault,
        ),
        counts_calls=use.choice is not ToolChoice.NAMED,
    )
