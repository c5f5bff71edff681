"""Jobs of text-embeddings-inference's bodies, made by the endpoints of OpenAI's and vLLM's routes.

Errors name the fields of the body that was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from remora.deployments.http.core.errors import unsupported
from remora.deployments.http.core.field_names import in_callers_words, renames
from remora.deployments.http.generation.endpoint import Endpoint, Job
from remora.deployments.http.generation.request_context import RequestContext
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.http.tei.bodies import (
    TeiEmbedBody,
    TeiPredictBody,
    TeiRerankBody,
    TeiSimilarityBody,
)

_NAMES = renames(
    (r"^input$", "inputs"),
    (r"^input\[", "inputs["),
    (r"^documents", "texts"),
    (r"^text_1", "inputs.source_sentence"),
    (r"^text_2", "inputs.sentences"),
    (r"^truncate_prompt_tokens$", "truncate"),
    (r"^use_activation$", "raw_scores"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tei:
    """Prepares the jobs.

    embeddings, rerank, pairs, classify, pooling:  endpoints of /v1/embeddings, /v1/rerank, /score,
        /classify and /pooling
    """

    embeddings: Endpoint[Any]
    rerank: Endpoint[Any]
    pairs: Endpoint[Any]
    classify: Endpoint[Any]
    pooling: Endpoint[Any]

    async def embed(self, server: ServerState, body: TeiEmbedBody, context: RequestContext) -> Job:
        """Return the job of /embed, whose response is a list of vectors. Raises RequestError."""
        fields = {
            "input": body.inputs,
            "dimensions": body.dimensions,
            "prompt_name": body.prompt_name,
            "normalize": body.normalize is not False,
            **body.cut,
        }
        return await _converted(self.embeddings, server, fields, context, _vectors)

    async def embed_all(
        self, server: ServerState, body: TeiEmbedBody, context: RequestContext
    ) -> Job:
        """Return the job of /embed_all: a vector for each token. Raises RequestError."""
        for name in ("normalize", "dimensions", "prompt_name"):
            if getattr(body, name) is not None:
                raise unsupported(name, f"{name}: /embed_all returns states of tokens as they are.")
        fields = {"input": body.inputs, "task": "token_embed", **body.cut}
        return await _converted(
            self.pooling, server, fields, context, lambda a: [one["data"] for one in a["data"]]
        )

    async def rank(self, server: ServerState, body: TeiRerankBody, context: RequestContext) -> Job:
        """Return the job of /rerank: scored texts, the best first. Raises RequestError."""
        fields = {
            "query": body.query,
            "documents": body.texts,
            "use_activation": not body.raw_scores,
            **body.cut,
        }

        def ranked(answer: Any) -> list[dict[str, Any]]:
            return [
                {
                    "index": one["index"],
                    **({"text": body.texts[one["index"]]} if body.return_text else {}),
                    "score": one["relevance_score"],
                }
                for one in answer["results"]
            ]

        return await _converted(self.rerank, server, fields, context, ranked)

    async def predict(
        self, server: ServerState, body: TeiPredictBody, context: RequestContext
    ) -> Job:
        """Return the job of /predict: scored labels, the best first. Raises RequestError."""
        fields = {"input": body.inputs, "use_activation": not body.raw_scores, **body.cut}
        labels = () if server.pooling is None else server.pooling.facts.labels

        def predicted(answer: Any) -> list[Any]:
            found = [
                sorted(
                    (
                        {"score": score, "label": label}
                        for label, score in zip(labels, one["probs"], strict=True)
                    ),
                    key=lambda entry: -float(entry["score"]),
                )
                for one in answer["data"]
            ]
            return found[0] if isinstance(body.inputs, str) else found

        return await _converted(self.classify, server, fields, context, predicted)

    async def similarity(
        self, server: ServerState, body: TeiSimilarityBody, context: RequestContext
    ) -> Job:
        """Return the job of /similarity: the score of each sentence. Raises RequestError."""
        fields = {
            "text_1": body.inputs.source_sentence,
            "text_2": body.inputs.sentences,
            **(body.parameters.cut if body.parameters else {}),
        }
        return await _converted(
            self.pairs, server, fields, context, lambda a: [one["score"] for one in a["data"]]
        )


async def refuse_sparse(server: ServerState, body: Any, context: RequestContext) -> Job:
    """Refuse /embed_sparse. Raises InvalidRequest."""
    raise unsupported("inputs", "No model here gives sparse vectors; ask /embed for dense ones.")


def _vectors(answer: Any) -> list[Any]:
    return [one["embedding"] for one in answer["data"]]


async def _converted(
    endpoint: Endpoint[Any],
    server: ServerState,
    fields: Mapping[str, Any],
    context: RequestContext,
    convert: Callable[[Any], Any],
) -> Job:
    with in_callers_words(_NAMES):
        return await endpoint.convert(server, fields, context, convert)
