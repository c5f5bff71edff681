"""TGI's /generate, /generate_stream and /: from a body to a job, and from outputs to its objects.

As in TGI, the model's generation_config is not looked at, tokens are the most likely ones unless
sampling is asked for, and a stop sequence stays in the text.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from remora.configs.errors import InvalidRequest
from remora.deployments.http.core.errors import unsupported
from remora.deployments.http.core.fields import PREFIX
from remora.deployments.http.generation.choices import Choice, Choices
from remora.deployments.http.generation.logprobs import check_scored, finite
from remora.deployments.http.generation.prompts import check_room, prompt_ids, usual_cut
from remora.deployments.http.generation.request_tracker import OutputStream
from remora.deployments.http.generation.sampling import as_seed, sampling_params
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.http.generation.token_stream import TextToken, tokens_of
from remora.deployments.http.sglang.generate import heals
from remora.deployments.http.tgi.bodies import TgiBody, TgiGrammar, TgiParameters
from remora.engine.grammar.constraint import Constraint, ConstraintKind
from remora.engine.types import (
    FinishReason,
    Grammar,
    Request,
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
class TgiJob:
    """One validated request.

    seed:        of the draw, where there is one and one only
    heals:       whether the prompt's last token is taken back and written anew
    wraps:       whether the whole answer is a list of one
    """

    body: TgiBody
    rid: str
    lora_id: int
    prompt_ids: list[int]
    sampling: SamplingParams
    seed: int | None
    grammar: Grammar | None
    heals: bool
    tokenizer: Tokenizer
    wraps: bool = False

    @property
    def streams(self) -> bool:
        """Whether the client wants chunks."""
        return bool(self.body.stream)

    @property
    def requests(self) -> tuple[Request, ...]:
        """What the engine gets."""
        request = Request(
            request_id=self.rid,
            prompt_ids=self.prompt_ids,
            sampling=self.sampling,
            grammar=self.grammar,
            heal=self.heals,
            lora_id=self.lora_id,
        )
        return (request,)

    async def result(self, outputs: OutputStream) -> Any:
        """Return the whole answer: of several sequences, the likeliest."""
        choices = Choices(1, self.sampling.n)
        await choices.gather(outputs)
        (best,) = choices.best(1)
        others = [choice for choice in choices if choice is not best]
        answer: dict[str, Any] = {"generated_text": self._text(best)}
        if self._shows_details:
            answer["details"] = self._details(best, choices.prompt_logprobs(best) or ())
            if others:
                answer["details"]["best_of_sequences"] = [
                    {"generated_text": self._text(choice), **self._details(choice)}
                    for choice in others
                ]
        return [answer] if self.wraps else answer

    async def chunks(self, outputs: OutputStream) -> AsyncGenerator[dict[str, Any], None]:
        """Yield a chunk for each token; the last one holds the whole text."""
        choices = Choices(1, 1)
        number = 0
        async for event in outputs:
            _, output = event
            choice = choices.add(event)
            tokens = tokens_of(self.tokenizer, output.token_ids, output.text)
            if not tokens and output.finish_reason is not None:
                tokens = [TextToken(0, output.text, is_special=not output.text)]
            chunks = []
            for place, token in enumerate(tokens):
                number += 1
                line = output.logprobs[place] if output.logprobs and output.token_ids else None
                chunks.append(self._chunk(number, token, line))
            if output.finish_reason is not None:
                chunks[-1] |= {
                    "generated_text": self._text(choice),
                    "details": self._ending(choice) | {"input_length": len(self.prompt_ids)},
                }
            for chunk in chunks:
                yield chunk

    @property
    def _shows_details(self) -> bool:
        parameters = self.body.parameters
        return bool(parameters.details or parameters.decoder_input_details)

    def _text(self, choice: Choice) -> str:
        return (self.body.inputs if self.body.parameters.return_full_text else "") + choice.text

    def _chunk(self, number: int, token: TextToken, line: TokenLogprob | None) -> dict[str, Any]:
        chunk: dict[str, Any] = {
            "index": number,
            "token": _token(token, line),
            "generated_text": None,
            "details": None,
        }
        if self.body.parameters.top_n_tokens:
            chunk["top_tokens"] = self._top(line)
        return chunk

    def _details(
        self, choice: Choice, prompt_lines: tuple[TokenLogprob | None, ...] = ()
    ) -> dict[str, Any]:
        tokens = tokens_of(self.tokenizer, choice.token_ids, choice.text)
        details = self._ending(choice) | {
            "prefill": [
                {
                    "id": token_id,
                    "text": self.tokenizer.token_text(token_id),
                    "logprob": finite(line.logprob) if line else None,
                }
                for token_id, line in zip(self.prompt_ids, prompt_lines, strict=False)
            ],
            "tokens": [
                _token(token, line) for token, line in zip(tokens, choice.logprobs, strict=True)
            ],
        }
        if self.body.parameters.top_n_tokens:
            details["top_tokens"] = [self._top(line) for line in choice.logprobs]
        return details

    def _ending(self, choice: Choice) -> dict[str, Any]:
        return {
            "finish_reason": _finish_reason(choice),
            "generated_tokens": choice.num_output_tokens,
            "seed": self.seed,
        }

    def _top(self, line: TokenLogprob | None) -> list[dict[str, Any]]:
        return [
            {
                "id": token_id,
                "text": self.tokenizer.token_text(token_id),
                "logprob": finite(logprob),
                "special": token_id in self.tokenizer.special_ids,
            }
            for token_id, logprob in (line.top if line else ())
        ]


def _token(token: TextToken, line: TokenLogprob | None) -> dict[str, Any]:
    return {
        "id": token.id,
        "text": token.text,
        "logprob": finite(line.logprob) if line else 0.0,
        "special": token.is_special,
    }


def _finish_reason(choice: Choice) -> str:
    if choice.finish_reason is FinishReason.STOP:
        return "eos_token" if choice.stop_reason is None else "stop_sequence"
    return str(choice.finish_reason)


def _check(body: TgiBody) -> None:
    parameters = body.parameters
    if body.stream and (parameters.best_of or 1) > 1:
        name = f"{PREFIX}best_of"
        raise unsupported(name, f"{name} is not available with stream.")
    if body.stream and parameters.decoder_input_details:
        name = f"{PREFIX}decoder_input_details"
        raise unsupported(name, f"{name} is not available with stream.")


def _constraint(grammar: TgiGrammar) -> Constraint:
    """Return the constraint in engine's terms. Raises InvalidRequest."""
    value, param = grammar.value, f"{PREFIX}grammar.value"
    if grammar.type == "regex":
        if not isinstance(value, str) or not value:
            raise InvalidRequest(f"{param} must be a pattern.", param)
        return Constraint(kind=ConstraintKind.REGEX, source=value)
    if grammar.type == "json_schema":
        value = value.get("schema") if isinstance(value, dict) else None
    if isinstance(value, dict):
        value = json.dumps(value)
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{param} must be a JSON schema: an object or its text.", param)
    return Constraint(kind=ConstraintKind.JSON_SCHEMA, source=value)


def _sampling(server: ServerState, body: TgiBody, seed: int | None, room: int) -> SamplingParams:
    parameters = body.parameters
    max_tokens = parameters.max_new_tokens
    is_scored = parameters.details or parameters.decoder_input_details or parameters.top_n_tokens
    is_scored = is_scored or body.stream or (parameters.best_of or 1) > 1
    fields = parameters if parameters.samples else parameters.model_copy(update={"temperature": 0})
    return sampling_params(
        fields.model_copy(update={"n": parameters.best_of}),
        defaults={},
        vocab_size=server.tokenizer.vocab_size,
        names=_NAMES,
        prefix=PREFIX,
        max_tokens=max(1, min(DEFAULT_MAX_NEW_TOKENS, room)) if max_tokens is None else max_tokens,
        seed=seed,
        include_stop_in_output=True,
        logprobs=(parameters.top_n_tokens or 0) if is_scored else None,
        prompt_logprobs=0 if parameters.decoder_input_details else None,
        first_token_ids=tuple(server.config.grammar.first_token_ids or ()),
    )


def _seed(parameters: TgiParameters) -> int | None:
    """Return the seed of one draw: it is told, so that it can be asked for again."""
    if parameters.seed is not None:
        return as_seed(parameters.seed)
    is_one_draw = parameters.samples and (parameters.best_of or 1) == 1
    return secrets.randbits(63) if is_one_draw else None


async def prepare_tgi(
    server: ServerState, body: TgiBody, rid: str, *, wraps: bool = False
) -> TgiJob:
    """Check everything that can be checked before the engine is asked.

    wraps:  whether the whole answer is to be a list of one

    Raises InvalidRequest, PromptTooLong, UnknownModel.
    """
    lora_id = (await server.model(body.model)).lora_id
    _check(body)
    parameters = body.parameters
    (ids,) = await prompt_ids(
        server,
        [body.inputs],
        add_special_tokens=True,
        param="inputs",
        cut=usual_cut(server, parameters.max_new_tokens),
    )
    ids = ids[-parameters.truncate :] if parameters.truncate else ids
    seed = _seed(parameters)
    sampling = _sampling(server, body, seed, server.plan.max_sequence_tokens - len(ids))
    server.calls.check_size(sampling.n, _NAMES["n"])
    check_room(len(ids), sampling.max_tokens, server.plan, "inputs")
    if not body.stream:
        check_scored(sampling, len(ids), sampling.max_tokens or 0, f"{PREFIX}top_n_tokens")
    grammar = None
    if parameters.grammar is not None:
        constraint = _constraint(parameters.grammar)
        grammar = await server.grammars.compile(constraint, param=f"{PREFIX}grammar")
    return TgiJob(
        body=body,
        rid=rid,
        lora_id=lora_id,
        prompt_ids=ids,
        sampling=sampling,
        seed=seed,
        grammar=grammar,
        heals=heals(server, sampling, grammar),
        tokenizer=server.tokenizer,
        wraps=wraps,
    )
