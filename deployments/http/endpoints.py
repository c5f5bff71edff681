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
from remora.deployments.http.cohere.chat import prepare_cohere_chat
from remora.deployments.http.cohere.chat_bodies import CohereChatBody
from remora.deployments.http.cohere.embed import CohereEmbedBody, CohereEmbedder
from remora.deployments.http.core.fields import parse
from remora.deployments.http.core.wire_formats import SGLANG, TGI
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
    prepare_v1_rerank,
    prepare_v2_rerank,
)
from remora.deployments.http.responses.bodies import ResponsesBody
from remora.deployments.http.responses.compact import CompactBody, prepare_compact
from remora.deployments.http.responses.response import prepare_response
from remora.deployments.http.rtp_llm.pooling_jobs import RtpPooling
from remora.deployments.http.rtp_llm.routes import rtp_generation
from remora.deployments.http.sglang.bodies import parse_generate
from remora.deployments.http.sglang.generate import prepare_generate
from remora.deployments.http.sglang.score import ScoreBody, prepare_score
from remora.deployments.http.tei.bodies import TeiRerankBody
from remora.deployments.http.tei.jobs import Tei
from remora.deployments.http.tei.routes import tei_generation
from remora.deployments.http.vllm.scoring import GenerativeScorer, GenerativeScoringBody
from remora.deployments.http.vllm.tokens import parse_generate_tokens, prepare_generate_tokens


def parse_rerank(body: Any) -> RerankBody | TeiRerankBody:
    """Validate a body of /rerank: text-embeddings-inference's has `texts`."""
    return parse(TeiRerankBody, body) if _is_tei(body) else parse(RerankBody, body)


async def prepare_any_rerank(
    server: ServerState, body: RerankBody | TeiRerankBody, context: RequestContext
) -> Job:
    """Prepare the job of a body of /rerank. Raises RequestError."""
    if isinstance(body, TeiRerankBody):
        return await TEI.rank(server, body, context)
    return await prepare_rerank(server, body, context)


def _is_tei(body: Any) -> bool:
    return isinstance(body, dict) and "texts" in body and "documents" not in body


def parse_score(body: Any) -> ScoreBody | PairScoreBody:
    """Validate a body of /v1/score: pairs of texts, or a query, items and labels."""
    return parse(PairScoreBody, body) if _is_pairs(body) else parse(ScoreBody, body)


def _is_pairs(body: Any) -> bool:
    return isinstance(body, dict) and not body.keys().isdisjoint(
        ("text_1", "text_2", "queries", "documents")
    )


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
SCORE = Endpoint(
    parse_score,
    prepare_any_score,
    dialect=lambda body: None if _is_pairs(body) else SGLANG,
    kind="any",
)
PAIRS = Endpoint(partial(parse, PairScoreBody), prepare_pair_score, kind="pooling")
SCORE_ITEMS = Endpoint(partial(parse, ScoreBody), prepare_score, kind="completion")
GENERATE_TOKENS = Endpoint(parse_generate_tokens, prepare_generate_tokens, kind="completion")
GENERATIVE_SCORING = Endpoint(
    partial(parse, GenerativeScoringBody), GenerativeScorer(SCORE_ITEMS).prepare, kind="completion"
)
EMBEDDINGS = Endpoint(partial(parse, EmbeddingsBody), prepare_embeddings, kind="pooling")
RERANK = Endpoint(partial(parse, RerankBody), prepare_rerank, kind="pooling")
ANY_RERANK = Endpoint(
    parse_rerank,
    prepare_any_rerank,
    dialect=lambda body: TGI if _is_tei(body) else None,
    kind="pooling",
)
V1_RERANK = Endpoint(partial(parse, RerankBody), prepare_v1_rerank, kind="pooling")
V2_RERANK = Endpoint(partial(parse, RerankBody), prepare_v2_rerank, kind="pooling")
CLASSIFY = Endpoint(parse_classify, prepare_classify, kind="pooling")
POOLING = Endpoint(partial(parse, PoolingBody), prepare_pooling, kind="pooling")
ENCODE = Endpoint(partial(parse, EncodeBody), prepare_encode, kind="pooling")

TEI = Tei(embeddings=EMBEDDINGS, rerank=RERANK, pairs=PAIRS, classify=CLASSIFY, pooling=POOLING)
TEI_ROUTES = tei_generation(TEI)
RTP_ROUTES = rtp_generation(RtpPooling(embeddings=EMBEDDINGS, rerank=RERANK, classify=CLASSIFY))
COHERE_CHAT = Endpoint(partial(parse, CohereChatBody), prepare_cohere_chat)
COHERE_EMBED = Endpoint(
    partial(parse, CohereEmbedBody), CohereEmbedder(EMBEDDINGS).prepare, kind="pooling"
)
OLLAMA_ROUTES = ollama_generation(EMBEDDINGS)
BATCH_ENDPOINTS: Mapping[str, Endpoint[Any]] = MappingProxyType(
    dict[str, Endpoint[Any]](
        zip((*BATCH_PATHS, MESSAGES_PATH), (CHAT, COMPLETIONS, RESPONSES, MESSAGES), strict=True)
    )
)
