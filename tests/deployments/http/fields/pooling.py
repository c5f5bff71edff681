"""Fields of the bodies of pooling models: embedders, classifiers and rerankers."""

from __future__ import annotations

from typing import Any

from remora.deployments.http.cohere.embed import CohereEmbedBody
from remora.deployments.http.ollama.bodies import EmbedBody, EmbedPromptBody
from remora.deployments.http.pooling.classify import ClassifyBody, EncodeBody, PoolingBody
from remora.deployments.http.pooling.embeddings import EmbeddingsBody
from remora.deployments.http.pooling.rerank import PairScoreBody, RerankBody
from remora.deployments.http.tei.bodies import (
    TeiEmbedBody,
    TeiPredictBody,
    TeiRerankBody,
    TeiSimilarityBody,
)
from tests.deployments.http.fields.observing import Api, Rows, effect, hint, refused, within
from tests.deployments.http.fields.ollama import OPTIONS

TEXT = "The quick brown fox"
LONG = "fox " * 2000
BASE: Rows = {
    "model": refused("other"),
    "truncate_prompt_tokens": effect(6),
    "truncation_side": effect("left", {"truncate_prompt_tokens": 6}),
    "add_special_tokens": effect(False),
    "use_activation": effect(False),
    "cache_salt": hint("a"),
    "priority": effect(3),
    "rid": effect("mine"),
    "request_id": effect("mine"),
    "user": hint("me"),
    "encoding_format": refused("base64"),
    "embed_dtype": refused("float16"),
    "endianness": refused("big"),
    "dimensions": refused(8),
    "normalize": refused(True),
    "max_tokens_per_doc": refused(3),
    "max_tokens_per_query": refused(3),
    "add_generation_prompt": refused(True),
    "continue_final_message": refused(True),
    "chat_template_kwargs": refused({"a": 1}),
}
_TURN = {"input": None, "messages": [{"role": "user", "content": "fox"}]}
CONVERSATION: Rows = {
    **BASE,
    "input": effect("fox"),
    "messages[0].role": effect("system", _TURN),
    "messages[0].content": effect("dog", _TURN),
    "add_generation_prompt": effect(True, _TURN),
    "continue_final_message": effect(True, _TURN),
}
_CODED = {"encoding_format": "base64"}
VECTOR: Rows = {
    **CONVERSATION,
    "encoding_format": effect("base64"),
    "embed_dtype": effect("float16", _CODED),
    "endianness": effect("big", _CODED),
    "dimensions": effect(8),
    "normalize": effect(False),
}
EMBEDDINGS: Rows = {**VECTOR, "prompt_name": effect("query")}
POOLING: Rows = {**VECTOR, "task": effect("token_embed")}
ENCODE: Rows = {
    **BASE,
    "text": effect("fox"),
    "input_ids": effect([5, 6], {"text": None, "input_ids": [5]}),
}
_OLLAMA: Rows = {
    "model": refused("other"),
    **within(
        "options",
        {
            **{name: hint(row.value) for name, row in OPTIONS.items()},
            "tfs_z": OPTIONS["tfs_z"],
            "mirostat": OPTIONS["mirostat"],
            "num_ctx": effect(6),
        },
    ),
    "keep_alive": hint("5m"),
}
OLLAMA: Rows = {
    **_OLLAMA,
    "input": effect("fox"),
    "truncate": refused(False, {"input": LONG}, named="input"),
    "dimensions": effect(8),
}
TEI_EMBED: Rows = {
    "inputs": effect("fox"),
    "normalize": effect(False),
    "prompt_name": effect("query"),
    "dimensions": effect(8),
    "truncate": refused(False, {"inputs": LONG}, named="inputs"),
    "truncation_direction": effect("Left", {"truncate": True, "inputs": f"dog {LONG}"}),
}
_COMPARED = f"dog {LONG}"
SIMILARITY: Rows = {
    "inputs.source_sentence": effect("dog"),
    "inputs.sentences": effect(["dog"]),
    "parameters.truncate": refused(False, {"inputs.source_sentence": LONG}, named="inputs"),
    "parameters.truncation_direction": effect(
        "Left", {"inputs.source_sentence": _COMPARED, "parameters.truncate": True}
    ),
    "parameters.prompt_name": refused("query"),
}
COHERE: Rows = {
    "model": refused("other"),
    "input_type": effect("search_query"),
    "texts": effect(["dog"]),
    "inputs[0].content[0].type": refused(
        "image_url",
        {"texts": None, "inputs": [{"content": [{"type": "text", "text": "fox"}]}]},
        named="inputs[0].content[0]",
    ),
    "inputs[0].content[0].text": effect(
        "dog", {"texts": None, "inputs": [{"content": [{"type": "text", "text": "fox"}]}]}
    ),
    "images": refused(["data:image/png;base64,"]),
    "max_tokens": effect(6),
    "output_dimension": effect(8),
    "embedding_types": effect(["binary"]),
    "truncate": refused("NONE", {"texts": [LONG]}, named="texts"),
    "priority": effect(3),
}
EMBEDDER = {
    "embeddings": Api(EmbeddingsBody, "/v1/embeddings", {"input": TEXT}, EMBEDDINGS),
    "pooling": Api(PoolingBody, "/pooling", {"input": TEXT}, POOLING),
    "encode": Api(EncodeBody, "/encode", {"text": TEXT}, ENCODE),
    "ollama embed": Api(EmbedBody, "/api/embed", {"input": TEXT}, OLLAMA),
    "ollama embeddings": Api(
        EmbedPromptBody, "/api/embeddings", {"prompt": TEXT}, {**_OLLAMA, "prompt": effect("fox")}
    ),
    "tei embed": Api(TeiEmbedBody, "/embed", {"inputs": TEXT}, TEI_EMBED),
    "tei similarity": Api(
        TeiSimilarityBody,
        "/similarity",
        {"inputs": {"source_sentence": TEXT, "sentences": ["fox"]}},
        SIMILARITY,
    ),
    "cohere embed": Api(CohereEmbedBody, "/v2/embed", {"texts": [TEXT]}, COHERE),
}

_PAIR: Rows = {
    **BASE,
    "truncate_prompt_tokens": effect(8),
    "truncation_side": effect("left", {"truncate_prompt_tokens": 8}),
    "add_special_tokens": refused(False),
    "max_tokens_per_query": effect(1),
    "max_tokens_per_doc": effect(1),
    "instruction": refused("Rank."),
}
RERANK: Rows = {
    **_PAIR,
    "query": effect("dog"),
    "documents": effect(["dog", TEXT]),
    "top_n": effect(1, {"documents": [TEXT, "dog"]}),
    "return_documents": effect(False),
}
_PEERS: dict[str, Any] = {"text_1": None, "text_2": None, "queries": ["fox"], "documents": [TEXT]}
PAIRS: Rows = {
    **_PAIR,
    "text_1": effect("dog"),
    "text_2": effect([TEXT, "dog"]),
    "queries": effect(["dog"], _PEERS),
    "documents": effect(["dog"], _PEERS),
}
TEI_RERANK: Rows = {
    "query": effect("dog"),
    "texts": effect(["dog", TEXT]),
    "raw_scores": effect(True),
    "return_text": effect(True),
    "truncate": refused(False, {"texts": [LONG]}, named="texts"),
    "truncation_direction": effect("Left", {"truncate": True, "texts": [_COMPARED]}),
}
CLASSIFY: Rows = CONVERSATION
PREDICT: Rows = {
    "inputs": effect("fox"),
    "raw_scores": effect(True),
    "truncate": refused(False, {"inputs": LONG}, named="inputs"),
    "truncation_direction": effect("Left", {"truncate": True, "inputs": _COMPARED}),
}
RERANKER = {
    "rerank": Api(RerankBody, "/v1/rerank", {"query": "brown fox", "documents": [TEXT]}, RERANK),
    "pairs": Api(
        PairScoreBody,
        "/v1/score",
        {"text_1": "brown fox", "text_2": [TEXT]},
        PAIRS,
        title="/v1/score of pairs",
    ),
    "tei rerank": Api(
        TeiRerankBody,
        "/rerank",
        {"query": "fox", "texts": [TEXT]},
        TEI_RERANK,
        title="/rerank (TEI)",
    ),
}
CLASSIFIER = {
    "classify": Api(ClassifyBody, "/classify", {"input": TEXT}, CLASSIFY),
    "tei predict": Api(TeiPredictBody, "/predict", {"inputs": TEXT}, PREDICT),
}
APIS = {**EMBEDDER, **RERANKER, **CLASSIFIER}
