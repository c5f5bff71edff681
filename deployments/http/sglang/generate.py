"""SGLang's /generate: from a body to a job.

A single text returns an object; a list of texts (or n > 1) returns a list, and its stream events
have an `index`. Events are cumulative, or hold only new output with `api.stream_text: delta`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from remora.configs.errors import InvalidRequest
from remora.deployments.http.core.errors import unsupported
from remora.deployments.http.core.sse import Chunk, ChunkWriter
from remora.deployments.http.generation.bodies import PromptInput
from remora.deployments.http.generation.constraints import output_constraint
from remora.deployments.http.generation.endpoint import Job
from remora.deployments.http.generation.logprobs import LogprobWriter
from remora.deployments.http.generation.prompts import given_embeddings, usual_cut
from remora.deployments.http.generation.replies import Replies
from remora.deployments.http.generation.request import (
    GenerationRequest,
    PromptSettings,
    check_hidden,
    prepare,
)
from remora.deployments.http.generation.request_context import RequestContext
from remora.deployments.http.generation.request_tracker import OutputStream
from remora.deployments.http.generation.sampling import (
    as_seed,
    beam_params,
    check_vocabulary,
    sampling_params,
)
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.http.prompt_embeddings.prompts import (
    SentEmbeddings,
    refuse_with_embeddings,
)
from remora.deployments.http.sglang.answers import AnswerOptions, AnswerWriter, Prompt
from remora.deployments.http.sglang.bodies import GenerateBody, PromptOptions
from remora.engine.embeddings import PromptEmbeddings
from remora.engine.types import Output, SamplingParams

DEFAULT_MAX_NEW_TOKENS = 128
PREFIX = "sampling_params."
_NAMES = {
    "max_tokens": "sampling_params.max_new_tokens",
    "min_tokens": "sampling_params.min_new_tokens",
    "logprobs": "top_logprobs_num",
    "prompt_logprobs": "top_logprobs_num",
    "logprob_token_ids": "token_ids_logprob",
    "seed": "sampling_params.sampling_seed",
    "include_stop_in_output": "sampling_params.no_stop_trim",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateJob(Job):
    """A checked request of one or several prompts.

    is_list:   whether the response is a list
    is_delta:  whether a stream event holds only new output
    """

    body: GenerateBody
    prompts: list[Prompt]
    is_list: bool
    is_delta: bool
    answers: AnswerOptions

    async def result(self, outputs: OutputStream) -> Any:
        """Return the whole response."""
        replies = self.replies()
        writer = AnswerWriter(self.prompts, replies, self.answers, is_delta=False)
        await replies.gather(outputs)
        answers = [writer.write(reply) async for reply in replies.each()]
        return answers if self.is_list else answers[0]

    def writer(self) -> GenerateWriter:
        """Return the writer of a streamed response."""
        return GenerateWriter(self)

    def replies(self) -> Replies:
        """Return a reader of the outputs."""
        return Replies(len(self.prompts), self.requests[0].sampling.n)


class GenerateWriter(ChunkWriter):
    """Writes a reply so far, or its new part, once enough is new."""

    def __init__(self, job: GenerateJob) -> None:
        self._replies = job.replies()
        self._is_list = job.is_list
        self._answers = AnswerWriter(job.prompts, self._replies, job.answers, is_delta=job.is_delta)

    def chunks(self, prompt: int, output: Output) -> Sequence[Chunk]:
        """Return the chunk of one output, if one is due."""
        reply = self._replies.add(prompt, output)
        if not self._answers.is_due(reply):
            return ()
        answer = self._answers.write(reply)
        if self._is_list:
            answer["index"] = self._replies.number(reply)
        return (answer,)


def _check_n(options: Sequence[PromptOptions]) -> None:
    n = options[0].sampling.n or 1
    if any((one.sampling.n or 1) != n for one in options):
        message = "n must be the same for all prompts of a batch."
        raise unsupported("sampling_params.n", message)


def _sampling(server: ServerState, body: GenerateBody, options: PromptOptions) -> SamplingParams:
    fields = options.sampling
    max_tokens = fields.max_new_tokens
    min_tokens = fields.min_new_tokens or 0
    top = options.top_logprobs_num if options.return_logprob else None
    check_vocabulary(options.token_ids_logprob, server.tokenizer.vocab_size, "token_ids_logprob")
    if max_tokens == 0 and min_tokens:
        param = "sampling_params.min_new_tokens"
        raise InvalidRequest(f"{param} must be 0 where max_new_tokens is.", param)
    return sampling_params(
        fields,
        defaults=server.generation_defaults,
        vocab_size=server.tokenizer.vocab_size,
        names=_NAMES,
        prefix=PREFIX,
        max_tokens=DEFAULT_MAX_NEW_TOKENS if max_tokens is None else max(1, max_tokens),
        min_tokens=min_tokens,
        seed=as_seed(fields.sampling_seed),
        include_stop_in_output=bool(fields.no_stop_trim),
        logprobs=top,
        prompt_logprobs=top if options.logprob_start_len >= 0 else None,
        logprob_token_ids=options.token_ids_logprob,
        first_token_ids=tuple(server.config.grammar.first_token_ids or ()),
        hidden_states=bool(body.return_hidden_states),
        beams=beam_params(fields, n=fields.n or 1, prefix=PREFIX),
    )


async def _prompts(
    server: ServerState, body: GenerateBody
) -> Sequence[PromptInput | PromptEmbeddings]:
    (given, param) = body.given
    if not isinstance(given, SentEmbeddings):
        return given.prompts
    is_scored = any(one.return_logprob and one.logprob_start_len >= 0 for one in body.options)
    refuse_with_embeddings(
        param, {"logprob_start_len": is_scored, "task_id": body.task_id is not None}
    )
    return await given_embeddings(server, given, param)


async def prepare_generate(
    server: ServerState, body: GenerateBody, context: RequestContext
) -> GenerateJob:
    """Check everything that can be checked without the engine.

    Raises InvalidRequest, PromptTooLong, UnknownModel.
    """
    started = time.monotonic()
    context = replace(context, claims=body.names)
    own = await server.model(body.model)
    (given, param), options = body.given, body.options
    _check_n(options)
    samplings = [_sampling(server, body, one) for one in options]
    is_delta = server.config.api.stream_text == "delta"
    longest = max(sampling.max_tokens or 1 for sampling in samplings)
    generations = [
        GenerationRequest(
            prompt=prompt,
            sampling=sampling,
            model=own if one.adapter is None else await server.model(one.adapter, "lora_path"),
            name=one.rid or (f"{context.request_id}_{number}" if len(options) > 1 else None),
            constraint=output_constraint(server, one.sampling, prefix=PREFIX),
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
        )
        for number, (prompt, one, sampling) in enumerate(
            zip(await _prompts(server, body), options, samplings, strict=True)
        )
    ]
    requests = await prepare(
        server,
        context,
        generations,
        PromptSettings(
            cut=usual_cut(server, longest),
            task=server.tasks.ids(body.task_id),
            param=param,
            count_param=f"{PREFIX}n",
            scored_param="top_logprobs_num",
            is_repeated=bool(body.stream) and not is_delta,
        ),
    )
    check_hidden(server, requests)
    return GenerateJob(
        context=context,
        requests=requests,
        streams=bool(body.stream),
        body=body,
        prompts=[
            Prompt(
                name=request.request_id,
                ids=list(request.prompt_ids),
                options=one,
                is_dry=one.sampling.max_new_tokens == 0,
            )
            for request, one in zip(requests, options, strict=True)
        ],
        is_list=given.is_list or samplings[0].n > 1,
        is_delta=is_delta,
        answers=AnswerOptions(
            started=started,
            with_text=bool(body.return_text_in_logprobs),
            eos_ids=server.tokenizer.eos_token_ids,
            logprobs=LogprobWriter(server.tokenizer),
            weights=server.weights,
            must_repeat=context.answer is not None,
            shows_drafts=server.plan.speculation is not None,
        ),
    )
