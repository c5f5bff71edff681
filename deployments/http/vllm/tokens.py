"""vLLM's /inference/v1/generate: token ids in, token ids out.

Sampling parameters are those of /v1/completions, in an object of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, PlainValidator, WithJsonSchema

from remora.deployments.http.core.errors import unsupported
from remora.deployments.http.core.field_names import in_callers_words, renames
from remora.deployments.http.core.fields import (
    Body,
    Label,
    StreamOptions,
    fault,
    is_token_list,
    parse,
    unsupported_part,
)
from remora.deployments.http.core.sse import Chunk, ChunkWriter
from remora.deployments.http.generation.bodies import CompletionBody
from remora.deployments.http.generation.completions import PreparedCompletion, prepare_completion
from remora.deployments.http.generation.endpoint import Job
from remora.deployments.http.generation.logprobs import LogprobEntry
from remora.deployments.http.generation.replies import Replies
from remora.deployments.http.generation.request_context import RequestContext
from remora.deployments.http.generation.request_tracker import OutputStream
from remora.deployments.http.generation.server_state import ServerState
from remora.engine.types import Output

_PREFIX = "sampling_params."
# How vLLM's engine hands over its output: nothing that this API shows.
_INTERNAL = ("detokenize", "output_kind")
# Fields of completions that concern texts, or the request as a whole, which has its own.
_OTHERS = (
    *("prompt", "suffix", "echo", "model", "stream", "stream_options", "best_of", "task_id"),
    *("rid", "request_id", "priority", "cache_salt", "add_special_tokens", "return_prompt_text"),
)
_NAMES = renames(
    (r"^(prompt)$", "token_ids"),
    (r"^(?=(n|seed|stop|logprobs|prompt_logprobs|min_tokens|max_tokens|top_[kp]|min_p)$)", _PREFIX),
    (r"^(?=(temperature|typical_p|\w+_penalty|logit_bias|bad_words|stop_\w+)$)", _PREFIX),
    (r"^(?=(allowed_token_ids|structured_outputs|response_format|guided_\w+)\b)", _PREFIX),
    (r"^(?=(json_schema|regex|ebnf|grammar|structural_tag)\b)", _PREFIX),
)


def _check_ids(value: Any) -> list[int]:
    if not is_token_list(value) or not value:
        raise fault("must be a list of token ids")
    ids: list[int] = value
    return ids


def _check_features(value: Any) -> None:
    if value is not None:
        raise unsupported_part("only tokens of texts can be sent")


class GenerateTokensBody(Body):
    """Body of /inference/v1/generate."""

    token_ids: Annotated[list[int], PlainValidator(_check_ids), WithJsonSchema({"type": "array"})]
    sampling_params: CompletionBody
    model: Annotated[str, Field(max_length=1024)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Label | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    request_id: Label | None = None
    features: Annotated[Any, PlainValidator(_check_features)] = None


def parse_generate_tokens(body: Any) -> GenerateTokensBody:
    """Validate a body. Raises InvalidRequest."""
    if not isinstance(body, dict):
        return parse(GenerateTokensBody, body)
    given = body.get("sampling_params", {})
    if isinstance(given, dict):
        for name in _OTHERS:
            if given.get(name) is not None:
                raise unsupported(
                    _PREFIX + name, f"{_PREFIX}{name} is no sampling parameter of this route."
                )
        given = {name: value for name, value in given.items() if name not in _INTERNAL}
        given["prompt"] = [0]  # the tokens are validated below
    sampling = parse(CompletionBody, given, prefix=_PREFIX)
    return parse(GenerateTokensBody, {**body, "sampling_params": sampling})


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensJob(Job):
    """A checked request."""

    completion: PreparedCompletion
    shows_usage: bool
    shows_running_usage: bool

    async def result(self, outputs: OutputStream) -> dict[str, Any]:
        """Return the whole response."""
        completion = self.completion
        replies = Replies(1, completion.sampling.n)
        await replies.gather(outputs)
        answer: dict[str, Any] = {
            "request_id": self.context.request_id,
            "choices": [
                {
                    "index": index,
                    "logprobs": _logprobs(completion, reply.logprobs),
                    "finish_reason": reply.finish_reason,
                    "stop_reason": reply.stop_reason,
                    "token_ids": reply.token_ids,
                }
                for index, reply in enumerate(replies.all)
            ],
            "usage": replies.usage([len(completion.prompts[0])]),
            "prompt_logprobs": None,
            "kv_transfer_params": None,
        }
        if completion.body.prompt_logprobs is not None:
            lines = replies.all[0].prompt_logprobs or ()
            answer["prompt_logprobs"] = completion.logprobs.prompt(lines)
        return answer

    def writer(self) -> TokensWriter:
        """Return the writer of a streamed response."""
        return TokensWriter(self)


class TokensWriter(ChunkWriter):
    """Writes the new tokens of each choice; then the usage, if the request asks for it."""

    def __init__(self, job: TokensJob) -> None:
        self._job = job
        self._replies = Replies(1, job.completion.sampling.n)

    def chunks(self, prompt: int, output: Output) -> Sequence[Chunk]:
        """Return the chunk of one output."""
        self._replies.add(prompt, output)
        choice = {
            "index": output.index,
            "logprobs": _logprobs(self._job.completion, output.logprobs or ()),
            "finish_reason": output.finish_reason,
            "token_ids": list(output.token_ids),
        }
        chunk: dict[str, Any] = {
            "request_id": self._job.context.request_id,
            "choices": [choice],
        }
        if self._job.shows_running_usage:
            chunk["usage"] = self._usage()
        return (chunk,)

    async def end(self) -> Sequence[Chunk]:
        """Return the usage chunk, if requested."""
        if not self._job.shows_usage:
            return ()
        last = {"request_id": self._job.context.request_id, "choices": [], "usage": self._usage()}
        return (last,)

    def _usage(self) -> dict[str, Any]:
        return self._replies.usage([len(self._job.completion.prompts[0])])


def _logprobs(
    completion: PreparedCompletion, lines: Sequence[LogprobEntry]
) -> dict[str, Any] | None:
    if completion.body.logprobs is None:
        return None
    return completion.logprobs.chat(line for line in lines if line is not None)


async def prepare_generate_tokens(
    server: ServerState, body: GenerateTokensBody, context: RequestContext
) -> TokensJob:
    """Return the job of a body after all checks that need no engine. Raises RequestError."""
    whole = body.sampling_params.model_copy(
        update={
            "prompt": [body.token_ids],
            "model": body.model,
            "stream": body.stream,
            "stream_options": body.stream_options,
            "cache_salt": body.cache_salt,
            "priority": body.priority,
            "return_tokens_as_token_ids": True,
        }
    )
    with in_callers_words(_NAMES):
        completion = await prepare_completion(server, whole, context)
    options = body.stream_options
    shows_usage = options is not None and bool(options.include_usage)
    return TokensJob(
        context=context,
        requests=completion.requests,
        streams=bool(body.stream),
        completion=completion,
        shows_usage=shows_usage,
        shows_running_usage=shows_usage and bool(options and options.continuous_usage_stats),
    )
