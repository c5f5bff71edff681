"""/v1/rerank and /v1/score of pooling models: relevance scores of pairs of texts.

A cross-encoder or a generative reranker reads both texts together; an embedder reads them
separately, and the score is the cosine similarity of their vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self

import numpy as np
from pydantic import BeforeValidator, Field, model_validator

from remora.configs.errors import InvalidRequest
from remora.deployments.http.core.errors import unsupported
from remora.deployments.http.core.fields import as_list, fault
from remora.deployments.http.generation.encoding import OFF_LOOP_CHARS
from remora.deployments.http.generation.request_context import RequestContext
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.http.pooling.embeddings import prompt_text
from remora.deployments.http.pooling.fields import PairBody, Texts
from remora.deployments.http.pooling.requests import (
    PoolingJob,
    activation_of,
    check_chars,
    check_filled,
    check_rows,
    cut_of,
    facts_of,
    framer_of,
    job_of,
    rows_of,
    usage_of,
)
from remora.engine.pooling.facts import PoolingFacts
from remora.engine.pooling.row import Row
from remora.engine.pooling.texts import PairTemplate
from remora.engine.pooling.vectors import scores_of, vector_of
from remora.engine.types import FloatArray


def _as_text(value: Any) -> Any:
    """Return the text of a document, which may be an object with a text."""
    if isinstance(value, dict) and isinstance(value.get("text"), str):
        return value["text"]
    return value


def _as_texts(value: Any) -> Any:
    return [_as_text(item) for item in value] if isinstance(value, list) else value


class RerankBody(PairBody):
    """Body of /v1/rerank."""

    query: Annotated[str, Field(min_length=1)]
    documents: Annotated[Texts, BeforeValidator(_as_texts)]
    top_n: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    return_documents: bool | None = None


class PairScoreBody(PairBody):
    """Body of /v1/score with pairs of texts: one text and many, or equal numbers of both."""

    text_1: Annotated[Texts | None, BeforeValidator(as_list)] = None
    text_2: Annotated[Texts | None, BeforeValidator(as_list)] = None
    queries: Annotated[Texts | None, BeforeValidator(as_list)] = None
    documents: Annotated[Texts | None, BeforeValidator(as_list)] = None

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        for ours, theirs in (("text_1", "queries"), ("text_2", "documents")):
            if (getattr(self, ours) is None) == (getattr(self, theirs) is None):
                raise fault(f"is required, or {theirs} in its place; not both", param=ours)
        if len(self.first) not in (1, len(self.second)):
            raise fault(f"must be one text, or {len(self.second)} as in text_2", param="text_1")
        return self

    @property
    def first(self) -> list[str]:
        """Return the first texts."""
        return self.text_1 or self.queries or []

    @property
    def second(self) -> list[str]:
        """Return the second texts."""
        return self.text_2 or self.documents or []


@dataclass(frozen=True, slots=True)
class Ranking:
    """Scored documents of a request."""

    body: RerankBody
    context: RequestContext
    model: str
    rows: list[Row]
    scores: list[float]

    @property
    def order(self) -> list[int]:
        """Indexes of the documents in the answer, the best first."""
        order = sorted(range(len(self.scores)), key=lambda index: -self.scores[index])
        return order[: self.body.top_n]

    def results(self, *, shows: bool) -> list[dict[str, Any]]:
        """Return the scored documents; `shows`: with their texts."""
        texts = self.body.documents
        return [
            {
                "index": index,
                **({"document": {"text": texts[index]}} if shows else {}),
                "relevance_score": self.scores[index],
            }
            for index in self.order
        ]


async def _ranked(
    server: ServerState,
    body: RerankBody,
    context: RequestContext,
    write: Callable[[Ranking], Any],
) -> PoolingJob:
    model = (await server.model(body.model)).name
    pairs = Pairs(server, body)
    rows = await pairs.rows([body.query], body.documents, "query", "documents")

    def tell(results: list[FloatArray]) -> Any:
        return write(Ranking(body, context, model, rows, pairs.scores(results)))

    return job_of(context, body, rows, tell)


async def prepare_rerank(
    server: ServerState, body: RerankBody, context: RequestContext
) -> PoolingJob:
    """Return the job of a body after all checks that need no engine. Raises RequestError."""
    return await _ranked(server, body, context, _as_jina)


async def prepare_v1_rerank(
    server: ServerState, body: RerankBody, context: RequestContext
) -> PoolingJob:
    """Return the job of /v1/rerank, whose answer is SGLang's list where that API is configured."""
    is_native = server.config.api.generate_dialect == "sglang"
    return await _ranked(server, body, context, _as_list if is_native else _as_jina)


async def prepare_v2_rerank(
    server: ServerState, body: RerankBody, context: RequestContext
) -> PoolingJob:
    """Return the job of Cohere's /v2/rerank. Raises RequestError."""
    return await _ranked(server, body, context, _as_cohere)


def _as_jina(ranking: Ranking) -> dict[str, Any]:
    return {
        "id": f"rerank-{ranking.context.request_id}",
        "model": ranking.model,
        "usage": usage_of(ranking.rows),
        "results": ranking.results(shows=ranking.body.return_documents is not False),
    }


def _as_cohere(ranking: Ranking) -> dict[str, Any]:
    return {
        "id": f"rerank-{ranking.context.request_id}",
        "model": ranking.model,
        "results": ranking.results(shows=bool(ranking.body.return_documents)),
        "usage": usage_of(ranking.rows),
        "meta": {
            "api_version": {"version": "2"},
            "billed_units": {"search_units": 1},
            "tokens": {"input_tokens": usage_of(ranking.rows)["prompt_tokens"]},
        },
    }


def _as_list(ranking: Ranking) -> list[dict[str, Any]]:
    shows = ranking.body.return_documents is not False
    return [
        {
            "score": ranking.scores[index],
            "document": ranking.body.documents[index] if shows else None,
            "index": index,
            "meta_info": {"id": ranking.context.request_id},
        }
        for index in ranking.order
    ]


async def prepare_pair_score(
    server: ServerState, body: PairScoreBody, context: RequestContext
) -> PoolingJob:
    """Return the job of a body after all checks that need no engine. Raises RequestError."""
    model = (await server.model(body.model)).name
    pairs = Pairs(server, body)
    rows = await pairs.rows(body.first, body.second, "text_1", "text_2")

    def tell(results: list[FloatArray]) -> dict[str, Any]:
        return {
            "id": f"score-{context.request_id}",
            "object": "list",
            "created": context.created,
            "model": model,
            "data": [
                {"index": index, "object": "score", "score": score}
                for index, score in enumerate(pairs.scores(results))
            ],
            "usage": usage_of(rows),
        }

    return job_of(context, body, rows, tell)


class Pairs:
    """Converts pairs of texts to rows, and the model's results for these rows to scores."""

    def __init__(self, server: ServerState, body: PairBody) -> None:
        """Raise InvalidRequest for a model, or a field, that scores of pairs do not go with."""
        self._served = server
        self._body = body
        self._facts = facts_of(server, "embed", "rerank", "reward", "classify")
        instruction = body.instruction
        self._num_first = 0
        if self._facts.task != "embed" and len(self._facts.labels) != 1:
            raise InvalidRequest(
                f"This model has {len(self._facts.labels)} labels, so it gives no score of a pair; "
                f"ask {'/classify' if self._facts.step_token is None else '/pooling'}.",
                code="not_offered",
            )
        if instruction is not None and (self._facts.task == "embed" or _template(server) is None):
            raise InvalidRequest(
                "This model's pairs have no place for an instruction.", "instruction", "unsupported"
            )
        self._check_special_tokens()

    def _check_special_tokens(self) -> None:
        wanted = self._body.add_special_tokens
        if self._facts.task == "embed" or wanted is None:
            return
        has_template = _template(self._served) is not None
        if wanted is has_template:
            why = "has all of them" if has_template else "needs them"
            raise unsupported(
                "add_special_tokens", f"add_special_tokens: a pair of this model {why}."
            )

    async def rows(
        self, first: Sequence[str], second: Sequence[str], name: str, other: str
    ) -> list[Row]:
        """Return the rows to compute: one per pair, or one per text for an embedder."""
        server, body, facts = self._served, self._body, self._facts
        check_filled(first, name)
        check_filled(second, other)
        first = await self._clipped(first, body.max_tokens_per_query, name)
        second = await self._clipped(second, body.max_tokens_per_doc, other)
        if facts.task == "embed":
            self._num_first = len(first)
            before = _query_prompt(facts), _document_prompt(facts)
            queries = await rows_of(server, body, first, param=name, before=before[0])
            documents = await rows_of(server, body, second, param=other, before=before[1])
            return queries + documents
        pairs = [(first[0 if len(first) == 1 else at], text) for at, text in enumerate(second)]
        max_tokens, drops = cut_of(server, body)
        check_chars(server, [*first, *second], other, is_cut=max_tokens is not None)
        framer = framer_of(server, other)
        template = _template(server)

        def work() -> list[Row]:
            if template is None:
                return framer.pairs(pairs, max_tokens=max_tokens, drops=drops)
            return framer.written(
                pairs, template, body.instruction, max_tokens=max_tokens, drops=drops
            )

        is_long = sum(map(len, second)) + sum(map(len, first)) > OFF_LOOP_CHARS
        rows: list[Row] = await server.encoder.off_loop_if(is_long, work)
        return check_rows(server, rows, other, max_tokens)

    async def _clipped(self, texts: Sequence[str], limit: int | None, name: str) -> Sequence[str]:
        if limit is None:
            return texts
        framer, is_long = framer_of(self._served, name), sum(map(len, texts)) > OFF_LOOP_CHARS
        clipped: list[str] = await self._served.encoder.off_loop_if(
            is_long, lambda: framer.clipped(texts, limit)
        )
        return clipped

    def scores(self, results: list[FloatArray]) -> list[float]:
        """Return the score of each pair."""
        if self._facts.task != "embed":
            activation = activation_of(self._facts, self._body)
            return [float(scores_of(r, activation)[0]) for r in results]
        vectors = np.stack([vector_of(numbers, normalize=True) for numbers in results])
        first, second = vectors[: self._num_first], vectors[self._num_first :]
        return [float(score) for score in (first * second).sum(axis=1)]


def _template(server: ServerState) -> PairTemplate | None:
    return None if server.pooling is None else server.pooling.template


def _query_prompt(facts: PoolingFacts) -> str:
    return facts.prompts["query"] if "query" in facts.prompts else prompt_text(facts, None)


def _document_prompt(facts: PoolingFacts) -> str:
    for name in ("document", "passage"):
        if name in facts.prompts:
            return facts.prompts[name]
    return prompt_text(facts, None) if "query" not in facts.prompts else ""
