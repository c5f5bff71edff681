"""TGI's /generate, /generate_stream and /: from a body to a job, and from outputs to responses.

As in TGI, the model's generation_config is ignored, decoding is greedy unless sampling is
requested, and stop sequences remain in the text.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from remora.configs.errors import InvalidRequest
from remora.deployments.http.core.errors import unsupported
from remora.deployments.http.core.fields import PREFIX
from remora.deployments.http.core.sse import Chunk, ChunkWriter
from remora.deployments.http.generation.constraints import OutputConstraint
from remora.deployments.http.generation.endpoint import Job
from remora.deployments.http.generation.logprobs import finite
from remora.deployments.http.generation.prompts import Cut, usual_cut
from remora.deployments.http.generation.replies import Replies, Reply
from remora.deployments.http.generation.request import (
    GenerationRequest,
    PromptSettings,
    prepare,
)
from remora.deployments.http.generation.request_context import RequestContext
from remora.deployments.http.generation.request_tracker import OutputStream
from remora.deployments.http.generation.sampling import (
    as_seed,
    beam_params,
    sampling_params,
)
from remora.deployments.http.generation.server_state import ServedModel, ServerState
from remora.deployments.http.generation.token_stream import TextToken, tokens_of, tokens_of_output
from remora.deployments.http.tgi.bodies import TgiBody, TgiGrammar, TgiParameters
from remora.engine.grammar.constraint import Constraint, ConstraintKind
from remora.engine.sampling.params import sequence_seed
from remora.engine.types import (
    FinishReason,
    Output,
    SamplingParams,
    TokenLogprob,
)

if TYPE_CHECKING:
    from remora.engine.tokens.tokenizer import Tokenizer

DEFAULT_MAX_NEW_TOKENS = 100
_NAMES = {
    "max_tokens": "parameters.max_new_tokens",
    "logprobs": "parameters.top_n_tokens",
    "n": "parameters.best_of",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TgiJob(Job):
    """A checked request.

    seed:   of the sampling; None = it is greedy
    wraps:  whether the whole response is a list of one
    """

    body: TgiBody
    seed: int | None
    tokenizer: Tokenizer
    wraps: bool = False

    @property
    def prompt_ids(self) -> Sequence[int]:
        """The prompt's tokens."""
        return self.requests[0].prompt_ids

    async def result(self, outputs: OutputStream) -> Any:
        """Return the whole response; of several sequences, it holds the most likely."""
        replies = Replies(1, self.requests[0].sampling.n)
        await replies.gather(outputs)
        (best,) = replies.best(1)
        others = [reply for reply in replies if reply is not best]
        answer: dict[str, Any] = {"generated_text": self._text(best)}
        if self._shows_details:
            answer["details"] = self._details(best, replies.prompt_logprobs(best) or ())
            if others:
                answer["details"]["best_of_sequences"] = [
                    {"generated_text": self._text(reply), **self._details(reply)}
                    for reply in others
                ]
        return [answer] if self.wraps else answer

    def writer(self) -> TgiWriter:
        """Return the writer of a streamed response."""
        return TgiWriter(self)

    def chunk(self, number: int, token: TextToken, entry: TokenLogprob | None) -> Chunk:
        """Return the chunk of one token."""
        chunk: Chunk = {
            "index": number,
            "token": _token(token, entry),
            "generated_text": None,
            "details": None,
        }
        if self.body.parameters.top_n_tokens:
            chunk["top_tokens"] = self._top(entry)
        return chunk

    def last_fields(self, reply: Reply) -> dict[str, Any]:
        """Return the fields of the last chunk that describe the whole reply."""
        details = self._ending(reply) | {"input_length": len(self.prompt_ids)}
        return {"generated_text": self._text(reply), "details": details}

    @property
    def _shows_details(self) -> bool:
        parameters = self.body.parameters
        return bool(parameters.details or parameters.decoder_input_details)

    def _text(self, reply: Reply) -> str:
        return (self.body.inputs if self.body.parameters.return_full_text else "") + reply.text

    def _details(
        self, reply: Reply, prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    ) -> dict[str, Any]:
        tokens = tokens_of(self.tokenizer, reply.token_ids, reply.text)
        details = self._ending(reply) | {
            "prefill": [
                {
                    "id": token_id,
                    "text": self.tokenizer.token_text(token_id),
                    "logprob": finite(entry.logprob) if entry else None,
                }
                for token_id, entry in zip(self.prompt_ids, prompt_logprobs, strict=False)
            ],
            "tokens": [
                _token(token, entry) for token, entry in zip(tokens, reply.logprobs, strict=True)
            ],
        }
        if self.body.parameters.top_n_tokens:
            details["top_tokens"] = [self._top(entry) for entry in reply.logprobs]
        return details

    def _ending(self, reply: Reply) -> dict[str, Any]:
        return {
            "finish_reason": _finish_reason(reply),
            "generated_tokens": reply.num_output_tokens,
            "seed": None if self.seed is None else sequence_seed(self.seed, reply.index),
        }

    def _top(self, entry: TokenLogprob | None) -> list[dict[str, Any]]:
        return [
            {
                "id": token_id,
                "text": self.tokenizer.token_text(token_id),
                "logprob": finite(logprob),
                "special": token_id in self.tokenizer.special_ids,
            }
            for token_id, logprob in (entry.top if entry else ())
        ]


class TgiWriter(ChunkWriter):
    """Writes a chunk per token; the last one holds the whole text."""

    def __init__(self, job: TgiJob) -> None:
        self._job = job
        self._reply = Reply(0, 0)
        self._num_tokens = 0

    def chunks(self, prompt: int, output: Output) -> Sequence[Chunk]:
        """Return the chunks of one output."""
        self._reply.add(output)
        chunks = []
        for place, token in enumerate(tokens_of_output(self._job.tokenizer, output)):
            self._num_tokens += 1
            entry = output.logprobs[place] if output.logprobs and output.token_ids else None
            chunks.append(self._job.chunk(self._num_tokens, token, entry))
        if output.finish_reason is not None:
            chunks[-1] |= self._job.last_fields(self._reply)
        return chunks


def _token(token: TextToken, entry: TokenLogprob | None) -> dict[str, Any]:
    return {
        "id": token.id,
        "text": token.text,
        "logprob": finite(entry.logprob) if entry else 0.0,
        "special": token.is_special,
    }


def _finish_reason(reply: Reply) -> str:
    if reply.finish_reason is FinishReason.STOP:
        return "eos_token" if reply.stop_reason is None else "stop_sequence"
    return str(reply.finish_reason)


def _check(body: TgiBody) -> None:
    parameters = body.parameters
    if body.stream and (parameters.best_of or 1) > 1:
        name = f"{PREFIX}best_of"
        raise unsupported(name, f"{name} is not available with stream.")
    if body.stream and parameters.decoder_input_details:
        name = f"{PREFIX}decoder_input_details"
        raise unsupported(name, f"{name} is not available with stream.")


def _constraint(grammar: TgiGrammar) -> OutputConstraint:
    """Return the constraint as the engine expects it. Raises InvalidRequest."""
    value, name, param = grammar.value, f"{PREFIX}grammar", f"{PREFIX}grammar.value"
    if grammar.type == "regex":
        if not isinstance(value, str) or not value:
            raise InvalidRequest(f"{param} must be a pattern.", param)
        return OutputConstraint(Constraint(kind=ConstraintKind.REGEX, source=value), name)
    if grammar.type == "json_schema":
        value = value.get("schema") if isinstance(value, dict) else None
    if isinstance(value, dict):
        value = json.dumps(value)
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{param} must be a JSON schema: an object or its text.", param)
    return OutputConstraint(Constraint(kind=ConstraintKind.JSON_SCHEMA, source=value), name)


def _sampling(server: ServerState, body: TgiBody, seed: int | None) -> SamplingParams:
    parameters = body.parameters
    is_scored = parameters.details or parameters.decoder_input_details or parameters.top_n_tokens
    is_scored = is_scored or body.stream or (parameters.best_of or 1) > 1
    fields = parameters if parameters.samples else parameters.model_copy(update={"temperature": 0})
    return sampling_params(
        fields.model_copy(update={"n": parameters.best_of}),
        defaults={},
        vocab_size=server.tokenizer.vocab_size,
        names=_NAMES,
        prefix=PREFIX,
        max_tokens=parameters.max_new_tokens,
        seed=seed,
        include_stop_in_output=True,
        logprobs=(parameters.top_n_tokens or 0) if is_scored else None,
        prompt_logprobs=0 if parameters.decoder_input_details else None,
        first_token_ids=tuple(server.config.grammar.first_token_ids or ()),
        beams=beam_params(parameters, n=parameters.best_of or 1, prefix=PREFIX),
    )


def _seed(parameters: TgiParameters) -> int | None:
    """Return the seed of the first sequence; the response reports each, for reproduction."""
    if parameters.seed is not None:
        return as_seed(parameters.seed)
    return secrets.randbits(63) if parameters.samples else None


async def prepare_tgi(
    server: ServerState, body: TgiBody, context: RequestContext, *, wraps: bool = False
) -> TgiJob:
    """Check everything that can be checked without the engine.

    wraps:  whether the whole response is a list of one

    Raises InvalidRequest, PromptTooLong, UnknownModel.
    """
    parameters = body.parameters
    model = await _model(server, body)
    _check(body)
    seed = _seed(parameters)
    grammar = parameters.grammar
    generation = GenerationRequest(
        prompt=body.inputs,
        sampling=_sampling(server, body, seed),
        model=model,
        default_max_tokens=DEFAULT_MAX_NEW_TOKENS,
        constraint=None if grammar is None else _constraint(grammar),
    )
    options = PromptSettings(
        cut=_cut(server, parameters),
        param="inputs",
        count_param=_NAMES["n"],
        scored_param=f"{PREFIX}top_n_tokens",
        is_scored_whole=not body.stream,
    )
    return TgiJob(
        context=context,
        requests=await prepare(server, context, [generation], options),
        streams=bool(body.stream),
        body=body,
        seed=seed,
        tokenizer=server.tokenizer,
        wraps=wraps,
    )


async def _model(server: ServerState, body: TgiBody) -> ServedModel:
    """Return the model, or the adapter that `adapter_id` names. Raises RequestError."""
    model = await server.model(body.model)
    name = body.parameters.adapter_id
    if name is None:
        return model
    adapter = await server.model(name, f"{PREFIX}adapter_id")
    if model.lora_id not in (0, adapter.lora_id):
        message = f"{PREFIX}adapter_id and model name different adapters; send one of them."
        raise InvalidRequest(message, f"{PREFIX}adapter_id")
    return adapter


def _cut(server: ServerState, parameters: TgiParameters) -> Cut | None:
    """Return the caller's truncation of the prompt, or the operator's, whichever keeps less."""
    usual = usual_cut(server, parameters.max_new_tokens)
    wanted = parameters.truncate
    if wanted is None or (usual is not None and usual.num_tokens <= wanted):
        return usual
    return Cut(wanted)
