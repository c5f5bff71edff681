"""SGLang's /v1/score: probabilities of label tokens after a query and each item.

Each item is scored separately; the prefix cache shares the query's pages. The engine returns the
most likely tokens; a label that is not among them is scored by a second request that allows no
other token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Annotated, Any, Self

from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from remora.deployments.http.core.fields import Body, Label, fault, is_token_list
from remora.deployments.http.generation.bodies import PromptInput, check_prompt
from remora.deployments.http.generation.endpoint import Job
from remora.deployments.http.generation.replies import Replies
from remora.deployments.http.generation.request import (
    GenerationRequest,
    PromptSettings,
    prepare,
)
from remora.deployments.http.generation.request_context import RequestContext
from remora.deployments.http.generation.request_tracker import OutputStream
from remora.deployments.http.generation.sampling import check_vocabulary
from remora.deployments.http.generation.server_state import ServerState
from remora.engine.sampling.params import MAX_LOGPROBS
from remora.engine.types import SamplingParams, TokenLogprob

MAX_LABELS = 1024
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


def _check_query(value: Any) -> PromptInput:
    if isinstance(value, str) or is_token_list(value):
        query: PromptInput = value
        return query
    raise fault("must be a text or a list of token ids")


def _check_items(value: Any) -> list[PromptInput]:
    """Return the items; without any, there is nothing to score."""
    return [] if value == [] else check_prompt(value)


class ScoreBody(Body):
    """Body of /v1/score."""

    query: Annotated[
        PromptInput, PlainValidator(_check_query), WithJsonSchema({"type": ["string", "array"]})
    ]
    items: Annotated[
        list[PromptInput],
        PlainValidator(_check_items),
        WithJsonSchema({"type": ["string", "array"]}),
    ]
    label_token_ids: Annotated[list[int], Field(min_length=1, max_length=MAX_LABELS)]
    apply_softmax: bool | None = None
    item_first: bool | None = None
    model: Annotated[str, Field(max_length=1024)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Label | None = None
    rid: Label | None = None

    @model_validator(mode="after")
    def _check_kinds(self) -> Self:
        if any(type(item) is not type(self.query) for item in self.items):
            raise fault(
                "must be texts where query is one, and token ids where it is not", param="items"
            )
        return self

    @property
    def prompts(self) -> list[PromptInput]:
        """The concatenation of query and item, for each item."""
        given = [(self.query, item) for item in self.items]
        pairs = [(item, query) if self.item_first else (query, item) for query, item in given]
        return [first + second for first, second in pairs]  # type: ignore[operator]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreJob(Job):
    """A checked request."""

    body: ScoreBody
    server: ServerState
    model: str

    async def result(self, outputs: OutputStream) -> dict[str, Any]:
        """Return a list of scores per item, with one score per label."""
        found = [dict(_of_top(line)) for line in await _first_tokens(outputs, len(self.requests))]
        missing = [
            (item, label)
            for item, known in enumerate(found)
            for label in dict.fromkeys(self.body.label_token_ids)
            if label not in known
        ]
        for (item, label), logprob in zip(missing, await self._forced(missing), strict=True):
            found[item][label] = logprob
        rows = [[known[label] for label in self.body.label_token_ids] for known in found]
        num_tokens = sum(len(request.prompt_ids) for request in self.requests)
        return {
            "object": "scoring",
            "created": self.context.created,
            "model": self.model,
            "scores": [_scores(row, softmax=bool(self.body.apply_softmax)) for row in rows],
            "usage": {
                "prompt_tokens": num_tokens,
                "completion_tokens": 0,
                "total_tokens": num_tokens,
            },
        }

    async def _forced(self, missing: Sequence[tuple[int, int]]) -> list[float]:
        """Return the log-probabilities of labels that are not among the most likely tokens."""
        logprobs: list[float] = []
        size = self.server.calls.limits.max_sequences
        for start in range(0, len(missing), size):
            asked = [
                replace(
                    self.requests[item],
                    sampling=replace(ONE_TOKEN, allowed_token_ids=(label,), logprobs=0),
                )
                for item, label in missing[start : start + size]
            ]
            async with aclosing(await self.server.calls.open(self.context, asked)) as outputs:
                logprobs += [line.logprob for line in await _first_tokens(outputs, len(asked))]
        return logprobs


async def _first_tokens(outputs: OutputStream, num_prompts: int) -> list[TokenLogprob]:
    return [reply.logprobs[0] for reply in await Replies(num_prompts).gather(outputs)]


def _of_top(line: TokenLogprob) -> list[tuple[int, float]]:
    return [*line.top, (line.token_id, line.logprob)]


def _scores(logprobs: Sequence[float], *, softmax: bool) -> list[float]:
    """Return probabilities over all tokens, or with `softmax` over the labels alone."""
    likeliest = max(logprobs) if softmax else 0.0
    if likeliest == -math.inf:
        return [0.0 for _ in logprobs]
    scores = [math.exp(logprob - likeliest) for logprob in logprobs]
    return [score / sum(scores) for score in scores] if softmax else scores


async def prepare_score(server: ServerState, body: ScoreBody, context: RequestContext) -> ScoreJob:
    """Check everything that can be checked without the engine.

    Raises InvalidRequest, PromptTooLong, UnknownModel.
    """
    model = await server.model(body.model)
    check_vocabulary(body.label_token_ids, server.tokenizer.vocab_size, "label_token_ids")
    top = min(MAX_LOGPROBS, server.tokenizer.vocab_size)
    generations = [
        GenerationRequest(
            prompt=prompt,
            sampling=replace(ONE_TOKEN, logprobs=top),
            model=model,
            may_heal=False,
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
        )
        for prompt in body.prompts
    ]
    options = PromptSettings(param="items", count_param="items", is_scored_whole=False)
    return ScoreJob(
        body=body,
        context=context,
        server=server,
        model=model.name,
        requests=await prepare(server, context, generations, options),
    )
