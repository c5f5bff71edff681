"""The table of text-embeddings-inference's own paths. /rerank and /info are shared."""

from __future__ import annotations

from functools import partial

from remora.deployments.http.core.fields import parse
from remora.deployments.http.generation.endpoint import Endpoint
from remora.deployments.http.generation.routes import Route
from remora.deployments.http.tei.bodies import TeiEmbedBody, TeiPredictBody, TeiSimilarityBody
from remora.deployments.http.tei.jobs import Tei, refuse_sparse


def tei_generation(tei: Tei) -> tuple[Route, ...]:
    """Return the paths, each with the endpoint that prepares its jobs."""
    embed = partial(parse, TeiEmbedBody)
    similarity = Endpoint(partial(parse, TeiSimilarityBody), tei.similarity, kind="pooling")
    predict = Endpoint(partial(parse, TeiPredictBody), tei.predict, kind="pooling")
    return (
        Route("/embed", Endpoint(embed, tei.embed, kind="pooling"), TeiEmbedBody),
        Route("/embed_all", Endpoint(embed, tei.embed_all, kind="pooling"), TeiEmbedBody),
        Route("/embed_sparse", Endpoint(embed, refuse_sparse, kind="pooling"), TeiEmbedBody),
        Route("/predict", predict, TeiPredictBody),
        Route("/similarity", similarity, TeiSimilarityBody),
    )
