"""The endpoints that use the engine, one for each kind of body. Joins the APIs' folders."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from remora.configs.errors import InvalidRequest
from remora.deployments.http.anthropic.bodies import MessagesBody
from remora.deployments.http.anthropic.messages import prepare_message
from remora.deployments.http.batches.input import BATCH_PATHS, MESSAGES_PATH
from remora.deployments.http.core.fields import parse
from remora.deployments.http.generation.bodies import (
    ChatBatchBody,
    ChatBody,
    CompletionBody,
)
from remora.deployments.http.generation.endpoint import Endpoint, Job
from remora.deployments.http.generation.request_context import RequestContext
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.http.ollama.routes import ollama_generation
from remora.deployments.http.openai.chat import prepare_chat_job
from remora.deployments.http.openai.chat_batch import prepare_chat_batch
from remora.deployments.http.openai.completions import prepare_completion_job
from remora.deployments.http.pooling.classify import (
    EncodeBody,
    PoolingBody,
    parse_classify,
    prepare_classify,
    prepare_encode,
    prepare_pooling,
)
from remora.deployments.http.pooling.embeddings import EmbeddingsBody, prepare_embeddings
from remora.deployments.http.pooling.rerank import (
    PairScoreBody,
    RerankBody,
    prepare_pair_score,
    prepare_rerank,
)
from remora.deployments.http.responses.bodies import ResponsesBody
from remora.deployments.http.responses.compact import CompactBody, prepare_compact
from remora.deployments.http.responses.response import prepare_response
from remora.deployments.http.sglang.bodies import parse_generate
from remora.deployments.http.sglang.generate import prepare_generate
from remora.deployments.http.sglang.score import ScoreBody, prepare_score


def parse_score(body: Any) -> ScoreBody | PairScoreBody:
    """Validate a body of /v1/score: pairs of texts, or a query, items and labels."""
    is_pairs = isinstance(body, dict) and not body.keys().isdisjoint(
        ("text_1", "text_2", "queries", "documents")
    )
    return parse(PairScoreBody, body) if is_pairs else parse(ScoreBody, body)


async def prepare_any_score(
    server: ServerState, body: ScoreBody | PairScoreBody, context: RequestContext
) -> Job:
    """Prepare the job for the kind of model that the body needs. Raises RequestError."""
    if isinstance(body, PairScoreBody):
        return await prepare_pair_score(server, body, context)
    if server.pooling is not None:
        raise InvalidRequest(
            "This server's model scores pairs of texts: send text_1 and text_2.", code="not_offered"
        )
    if server.config.api.generation == "chat":
        raise InvalidRequest("This server answers chats only (api.generation).", code="not_offered")
    return await prepare_score(server, body, context)


CHAT = Endpoint(partial(parse, ChatBody), prepare_chat_job)
CHAT_BATCH = Endpoint(partial(parse, ChatBatchBody), prepare_chat_batch)
COMPLETIONS = Endpoint(partial(parse, CompletionBody), prepare_completion_job, kind="completion")
GENERATE = Endpoint(parse_generate, prepare_generate, kind="completion")
RESPONSES = Endpoint(partial(parse, ResponsesBody), prepare_response)
COMPACT = Endpoint(partial(parse, CompactBody), prepare_compact)
MESSAGES = Endpoint(partial(parse, MessagesBody), prepare_message)
SCORE = Endpoint(parse_score, prepare_any_score, kind="any")
EMBEDDINGS = Endpoint(partial(parse, EmbeddingsBody), prepare_embeddings, kind="pooling")
RERANK = Endpoint(partial(parse, RerankBody), prepare_rerank, kind="pooling")
CLASSIFY = Endpoint(parse_classify, prepare_classify, kind="pooling")
POOLING = Endpoint(partial(parse, PoolingBody), prepare_pooling, kind="pooling")
ENCODE = Endpoint(partial(parse, EncodeBody), prepare_encode, kind="pooling")

OLLAMA_ROUTES = ollama_generation(EMBEDDINGS)
BATCH_ENDPOINTS: Mapping[str, Endpoint[Any]] = MappingProxyType(
    dict[str, Endpoint[Any]](
        zip((*BATCH_PATHS, MESSAGES_PATH), (CHAT, COMPLETIONS, RESPONSES, MESSAGES), strict=True)
    )
)
