"""LightLLM's /generate and /generate_stream: from a body to a job, and from outputs to responses.

As in LightLLM, decoding is greedy unless `do_sample`, or in its absence the model's
generation_config, enables sampling; stop sequences remain in the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from remora.deployments.http.core.errors import unsupported
from remora.deployments.http.core.field_names import in_callers_words, renames
from remora.deployments.http.core.fields import PREFIX, Body
from remora.deployments.http.core.sse import Chunk, ChunkWriter
from remora.deployments.http.generation.constraints import OutputConstraint, output_constraint
from remora.deployments.http.generation.endpoint import Job
from remora.deployments.http.generation.logprobs import finite
from remora.deployments.http.generation.prompts import encode, usual_cut
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
    check_vocabulary,
    sampling_params,
)
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.http.generation.token_stream import TextToken, tokens_of, tokens_of_output
from remora.deployments.http.lightllm.bodies import (
    LightBody,
    LightParameters,
    TokensBody,
)
from remora.engine.types import (
    FinishReason,
    Output,
    SamplingParams,
    TokenLogprob,
)

if TYPE_CHECKING:
    from remora.engine.tokens.tokenizer import Tokenizer

DEFAULT_MAX_NEW_TOKENS = 16
_NAMES = {
    "max_tokens": "parameters.max_new_tokens",
    "min_tokens": "parameters.min_new_tokens",
}
_RENAMES = renames((r"^parameters\.guided_regex", "parameters.regular_constraint"))


@dataclass(frozen=True, slots=True, kw_only=True)
class LightJob(Job):
    """A checked request."""

    body: LightBody
    tokenizer: Tokenizer

    @property
    def prompt_ids(self) -> Sequence[int]:
        """The prompt's tokens."""
        return self.requests[0].prompt_ids

    async def result(self, outputs: OutputStream) -> dict[str, Any]:
        """Return the whole response; lists of one entry become that entry, except for the texts."""
        replies = Replies(1, self.requests[0].sampling.n)
        await replies.gather(outputs)
        parameters = self.body.parameters
        shown = replies.best(parameters.num_shown)
        answer = {
            "generated_text": [reply.text for reply in shown],
            "count_output_tokens": _bare([reply.num_output_tokens for reply in shown]),
            "finish_reason": _bare([_finish_reason(reply.finish_reason) for reply in shown]),
            "prompt_tokens": len(self.prompt_ids),
        }
        if shown[0].score is not None:
            answer["beam_score"] = _bare([reply.score for reply in shown])
        if parameters.return_details:
            answer["tokens"] = _bare([self._tokens(reply) for reply in shown])
        entries = replies.prompt_logprobs(shown[0])
        if entries is not None:
            answer["prompt_token_ids"] = self.prompt_ids
            answer["prompt_logprobs"] = [
                None if entry is None else {str(entry.token_id): finite(entry.logprob)}
                for entry in entries
            ]
        return answer

    def writer(self) -> LightWriter:
        """Return the writer of a streamed response."""
        return LightWriter(self)

    def _tokens(self, reply: Reply) -> list[dict[str, Any]]:
        tokens = tokens_of(self.tokenizer, reply.token_ids, reply.text)
        return [
            self.token(token, entry, count)
            for count, (token, entry) in enumerate(zip(tokens, reply.logprobs, strict=True), 1)
        ]

    def token(self, token: TextToken, entry: TokenLogprob | None, count: int) -> dict[str, Any]:
        """Return the object of one token, the `count`th of its reply."""
        return {
            "id": token.id,
            # An end-of-sequence token has no text here, not even its name.
            "text": "" if token.is_special else token.text,
            "logprob": finite(entry.logprob) if entry else None,
            "special": token.is_special,
            "count_output_tokens": count,
            "prompt_tokens": len(self.prompt_ids),
        }


class LightWriter(ChunkWriter):
    """Writes a chunk per token; the last one marks the reply as finished."""

    def __init__(self, job: LightJob) -> None:
        self._job = job
        self._num_tokens = 0

    def chunks(self, prompt: int, output: Output) -> Sequence[Chunk]:
        """Return the chunks of one output."""
        chunks: list[Chunk] = []
        entries = output.logprobs or ()
        for place, token in enumerate(tokens_of_output(self._job.tokenizer, output)):
            self._num_tokens += bool(output.token_ids)
            entry = entries[place] if place < len(entries) else None
            chunks.append(
                {
                    "token": self._job.token(token, entry, self._num_tokens),
                    "generated_text": None,
                    "finished": False,
                    "finish_reason": None,
                    "details": None,
                }
            )
        if output.finish_reason is not None:
            chunks[-1] |= {
                "finished": True,
                "finish_reason": _finish_reason(output.finish_reason),
            }
        return chunks


def _bare(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values


def _finish_reason(reason: FinishReason | None) -> str | None:
    return None if reason is None else reason.value


def _samples(server: ServerState, parameters: LightParameters) -> bool:
    if parameters.do_sample is not None:
        return parameters.do_sample
    return bool(server.generation_defaults.get("temperature"))


def _names(parameters: LightParameters) -> dict[str, str]:
    """Return the caller's names of fields that the engine may reject."""
    names = _NAMES | {"n": f"{PREFIX}{'n' if parameters.best_of is None else 'best_of'}"}
    if parameters.stop_sequences:
        kind = "stop" if isinstance(parameters.stop_sequences[0], str) else "stop_token_ids"
        names[kind] = f"{PREFIX}stop_sequences"
    return names


def _sampling(server: ServerState, body: LightBody) -> SamplingParams:
    parameters = body.parameters
    defaults = dict(server.generation_defaults)
    changes: dict[str, Any] = {"n": parameters.num_drawn}
    if not _samples(server, parameters):
        changes["temperature"] = 0.0
    elif not defaults.get("temperature"):
        defaults["temperature"] = 1.0  # requested explicitly, whatever generation_config recommends
    stops = parameters.stop_sequences or []
    changes |= _stops(stops, parameters)
    allowed = parameters.allowed_token_ids or ()
    check_vocabulary(allowed, server.tokenizer.vocab_size, f"{PREFIX}allowed_token_ids")
    is_scored = body.stream or parameters.return_details or parameters.num_drawn > 1
    max_tokens = parameters.max_new_tokens
    return sampling_params(
        parameters.model_copy(update=changes),
        defaults=defaults,
        vocab_size=server.tokenizer.vocab_size,
        names=_names(parameters),
        prefix=PREFIX,
        max_tokens=DEFAULT_MAX_NEW_TOKENS if max_tokens is None else max_tokens,
        # LightLLM's default of 1 has no effect: its outputs are never empty.
        min_tokens=parameters.min_new_tokens or 0,
        seed=as_seed(parameters.seed),
        include_stop_in_output=True,
        logprobs=0 if is_scored else None,
        prompt_logprobs=0 if server.config.api.prompt_logprobs and not body.stream else None,
        allowed_token_ids=tuple(allowed),
        first_token_ids=tuple(server.config.grammar.first_token_ids or ()),
        beams=beam_params(
            parameters, n=parameters.num_shown, best_of=parameters.best_of, prefix=PREFIX
        ),
    )


def _stops(stops: list[str] | list[int], parameters: LightParameters) -> dict[str, Any]:
    texts = [stop for stop in stops if isinstance(stop, str)]
    ids = [stop for stop in stops if isinstance(stop, int)]
    return {
        "stop": texts or parameters.stop,
        "stop_token_ids": ids + (parameters.stop_token_ids or []),
    }


class _Constraints(Body):
    """Constraints under the field names of `constraints.py`."""

    guided_json: Any = None
    guided_grammar: str | None = None
    guided_regex: str | None = None


def _constraint(server: ServerState, parameters: LightParameters) -> OutputConstraint | None:
    found = {
        "guided_json": parameters.guided_json,
        "guided_grammar": parameters.guided_grammar,
        "guided_regex": parameters.regular_constraint,
    }
    given = [name for name, value in found.items() if value is not None]
    if given and parameters.allowed_token_ids:
        name = f"{PREFIX}allowed_token_ids"
        raise unsupported(name, f"{name} cannot be combined with a constraint on the output.")
    with in_callers_words(_RENAMES):
        constraint = output_constraint(server, _Constraints(**found), prefix=PREFIX)
    if constraint is not None and parameters.regular_constraint is not None:
        return constraint._replace(param=f"{PREFIX}regular_constraint")
    return constraint


async def prepare_light(server: ServerState, body: LightBody, context: RequestContext) -> LightJob:
    """Check everything that can be checked without the engine.

    Raises InvalidRequest, PromptTooLong, UnknownModel.
    """
    model = await server.model(body.model)
    parameters = body.parameters
    if body.stream and parameters.num_drawn > 1:
        name = f"{PREFIX}{'best_of' if parameters.best_of else 'n'}"
        raise unsupported(name, f"{name} must be 1 with a stream.")
    generation = GenerationRequest(
        prompt=body.inputs,
        sampling=_sampling(server, body),
        model=model,
        constraint=_constraint(server, parameters),
    )
    options = PromptSettings(
        add_special_tokens=parameters.add_special_tokens is not False,
        cut=usual_cut(server, generation.sampling.max_tokens),
        param="inputs",
        count_param=_names(parameters)["n"],
        scored_param=f"{PREFIX}max_new_tokens",
        is_scored_whole=not body.stream,
    )
    return LightJob(
        context=context,
        requests=await prepare(server, context, [generation], options),
        streams=body.stream,
        body=body,
        tokenizer=server.tokenizer,
    )


async def count_tokens(server: ServerState, body: TokensBody) -> dict[str, int]:
    """Return the number of tokens of a text."""
    special = (body.parameters or {}).get("add_special_tokens") is not False
    (ids,) = await encode(server, [body.text], add_special_tokens=special, param="text")
    return {"ntokens": len(ids)}


def token_load(server: ServerState) -> dict[str, float]:
    """Return the usage of KV memory, from 0 to 1, as LightLLM's three measures."""
    usage = server.client.stats().kv_usage
    return {"current_load": usage, "logical_max_load": usage, "dynamic_max_load": usage}
