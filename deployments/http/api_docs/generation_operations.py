"""The operations that generate, embed and score, by API."""

from __future__ import annotations

from collections.abc import Mapping

from remora.deployments.http.api_docs import answers as a
from remora.deployments.http.api_docs.operation import BYTES, EVENTS, LINES, Operation, op
from remora.deployments.http.api_docs.shapes import Answer

_STREAMED = "`stream` asks for server-sent events, which end with `data: [DONE]`."
_POOLING = "For a server whose model embeds, classifies or ranks (`model.task`)."
_STORED = "Needs `store: true` when it was created."
_BATCHES = "Batches are run at low priority, while the server has room."

OPENAI: tuple[Operation, ...] = (
    op(
        "POST /v1/chat/completions",
        "Create a chat completion",
        f"Generates the next message of a conversation. {_STREAMED}",
        a.CHAT_COMPLETION,
        EVENTS,
    ),
    op(
        "POST /v1/chat/completions/batch",
        "Complete several conversations",
        "Generates the next message of each conversation in `messages`, a list of lists.",
        a.CHAT_BATCH,
    ),
    op(
        "GET /v1/chat/completions",
        "List stored chats",
        f"Lists the chat completions that this key has stored. {_STORED}",
        a.PAGE,
    ),
    op(
        "GET /v1/chat/completions/{chat_id}",
        "Get a stored chat",
        f"Returns a stored chat completion. {_STORED}",
        a.CHAT_COMPLETION,
    ),
    op(
        "POST /v1/chat/completions/{chat_id}",
        "Change a stored chat",
        "Replaces the metadata of a stored chat completion.",
        a.CHAT_COMPLETION,
    ),
    op(
        "DELETE /v1/chat/completions/{chat_id}",
        "Delete a stored chat",
        "Deletes a stored chat completion and its messages.",
        a.DELETED,
    ),
    op(
        "GET /v1/chat/completions/{chat_id}/messages",
        "List the messages of a stored chat",
        "Lists the messages that a stored chat completion was generated from.",
        a.PAGE,
    ),
    op(
        "POST /v1/completions",
        "Create a text completion",
        f"Continues one or many prompts, given as texts or token ids. {_STREAMED}",
        a.COMPLETION,
        EVENTS,
    ),
    op(
        "POST /v1/responses",
        "Create a response",
        "Answers in OpenAI's Responses API: whole, as server-sent events, or in the background.",
        a.RESPONSE,
        EVENTS,
    ),
    op(
        "POST /v1/responses/compact",
        "Compact a conversation",
        "Replaces a conversation by its last messages and a summary, to be sent instead of it.",
        a.COMPACTION,
    ),
    op(
        "POST /v1/responses/input_tokens",
        "Count the tokens of a response's input",
        "Returns how many tokens the prompt of a response would have; generates nothing.",
        a.RESPONSE_TOKENS,
    ),
    op(
        "GET /v1/responses/{response_id}",
        "Get a response",
        "Returns a stored or running response; `stream=true` sends its events again.",
        a.RESPONSE,
        EVENTS,
    ),
    op(
        "DELETE /v1/responses/{response_id}",
        "Delete a response",
        "Deletes a stored response and its input items.",
        a.DELETED,
    ),
    op(
        "POST /v1/responses/{response_id}/cancel",
        "Cancel a response",
        "Ends a response that runs in the background.",
        a.RESPONSE,
    ),
    op(
        "GET /v1/responses/{response_id}/input_items",
        "List the input items of a response",
        "Lists the items that a response was generated from, in pages.",
        a.PAGE,
    ),
    op(
        "POST /v1/embeddings, POST /v1/embeddings/dense",
        "Embed texts",
        f"Returns a vector for each text or list of token ids. {_POOLING} "
        "`encoding_format: bytes` sends the vectors as one binary body.",
        a.EMBEDDINGS,
        BYTES,
    ),
    op(
        "POST /v1/files",
        "Upload a file",
        "Stores a file of requests for a batch: a multipart form with `file` and `purpose`.",
        a.FILE,
    ),
    op("GET /v1/files", "List files", "Lists the files of this key, in pages.", a.PAGE),
    op("GET /v1/files/{file_id}", "Get a file's facts", "Returns name, size and purpose.", a.FILE),
    op("DELETE /v1/files/{file_id}", "Delete a file", "Deletes a file of this key.", a.DELETED),
    op(
        "GET /v1/files/{file_id}/content",
        "Download a file",
        "Returns the contents of a file: requests of a batch, or its results.",
        None,
        BYTES,
    ),
    op(
        "POST /v1/batches",
        "Create a batch",
        f"Runs the requests of an uploaded file. {_BATCHES}",
        a.BATCH,
    ),
    op("GET /v1/batches", "List batches", "Lists the batches of this key, in pages.", a.PAGE),
    op("GET /v1/batches/{batch_id}", "Get a batch", "Returns a batch's state and files.", a.BATCH),
    op(
        "POST /v1/batches/{batch_id}/cancel",
        "Cancel a batch",
        "Ends a batch; results of requests that were done are kept.",
        a.BATCH,
    ),
)

ANTHROPIC: tuple[Operation, ...] = (
    op(
        "POST /v1/messages",
        "Create a message",
        "Answers in Anthropic's Messages API. `stream` asks for its server-sent events.",
        a.MESSAGE,
        EVENTS,
    ),
    op(
        "POST /v1/messages/count_tokens",
        "Count the tokens of a message",
        "Returns how many tokens the prompt of a message would have; generates nothing.",
        a.MESSAGE_TOKENS,
    ),
    op(
        "POST /v1/messages/batches",
        "Create a message batch",
        f"Runs many messages of one body. {_BATCHES}",
        a.MESSAGE_BATCH,
    ),
    op(
        "GET /v1/messages/batches",
        "List message batches",
        "Lists the message batches of this key, newest first, in pages.",
        a.PAGE,
    ),
    op(
        "GET /v1/messages/batches/{batch_id}",
        "Get a message batch",
        "Returns a message batch's state and counts.",
        a.MESSAGE_BATCH,
    ),
    op(
        "DELETE /v1/messages/batches/{batch_id}",
        "Delete a message batch",
        "Deletes a message batch that has ended, and its results.",
        a.MESSAGE_BATCH_DELETED,
    ),
    op(
        "GET /v1/messages/batches/{batch_id}/results",
        "Read the results of a message batch",
        "Returns a line of JSON for each request of a message batch that has ended.",
        None,
        "application/x-jsonl",
    ),
    op(
        "POST /v1/messages/batches/{batch_id}/cancel",
        "Cancel a message batch",
        "Ends a message batch; results of requests that were done are kept.",
        a.MESSAGE_BATCH,
    ),
)

COHERE: tuple[Operation, ...] = (
    op(
        "POST /v2/chat",
        "Chat in Cohere's shape",
        "Generates the next message of a conversation. `stream` asks for Cohere's events.",
        a.COHERE_CHAT,
        EVENTS,
    ),
    op(
        "POST /v2/embed",
        "Embed texts in Cohere's shape",
        f"Returns vectors of texts, by type of number. {_POOLING}",
        a.COHERE_EMBEDDINGS,
    ),
    op(
        "POST /v2/rerank",
        "Rank documents in Cohere's shape",
        f"Orders documents by relevance to a query. {_POOLING}",
        a.RANKING,
    ),
)

OLLAMA: tuple[Operation, ...] = (
    op(
        "POST /api/chat",
        "Chat in Ollama's shape",
        "Generates the next message of a conversation: a line of JSON for each piece, or one "
        "object with `stream: false`.",
        a.OLLAMA_CHAT,
        LINES,
    ),
    op(
        "POST /api/generate",
        "Generate in Ollama's shape",
        "Answers a prompt: a line of JSON for each piece, or one object with `stream: false`.",
        a.OLLAMA_COMPLETION,
        LINES,
    ),
    op(
        "POST /api/embed",
        "Embed texts in Ollama's shape",
        f"Returns a vector for each text. {_POOLING}",
        a.OLLAMA_EMBEDDINGS,
    ),
    op(
        "POST /api/embeddings",
        "Embed a text in Ollama's former shape",
        f"Returns the vector of one text. {_POOLING}",
        Answer("OllamaEmbedding", {"embedding": [float]}),
    ),
    op("GET /api/tags", "List models for Ollama", "Lists models and adapters.", a.OLLAMA_MODELS),
    op("GET /api/ps", "List loaded models for Ollama", "Lists the served model.", a.OLLAMA_MODELS),
    op("GET /api/version", "Get the version for Ollama", "Returns remora's version.", a.VERSION),
    op("POST /api/show", "Show a model for Ollama", "Returns facts of a model.", a.OLLAMA_MODEL),
    op(
        "POST /api/pull",
        "Pull a model for Ollama",
        "Succeeds at once for a model that is served; others are refused.",
        a.STATUS,
        LINES,
    ),
)

NATIVE: tuple[Operation, ...] = (
    op(
        "POST /generate, PUT /generate, GET /generate",
        "Generate text",
        "Generates in SGLang's, TGI's or LightLLM's shape, as `api.generate_dialect` says or the "
        "body shows. `stream` asks for server-sent events.",
        a.GENERATED,
        EVENTS,
    ),
    op(
        "POST /generate_stream",
        "Generate a stream of tokens",
        "Generates in TGI's or LightLLM's shape, always as server-sent events.",
        None,
        EVENTS,
    ),
    op(
        "POST /",
        "Generate text at the root",
        "Generates in TGI's shape, and in RTP-LLM's for a body with a `prompt`.",
        Answer("GeneratedAtRoot", (dict, [dict])),
        EVENTS,
    ),
    op(
        "POST /invocations",
        "Answer a request of Amazon SageMaker",
        "Chats, completes, embeds or ranks, as the fields of the body show.",
        Answer("Invocation", dict),
        EVENTS,
    ),
    op(
        "POST /inference/v1/generate",
        "Generate token ids",
        f"Takes and returns token ids in vLLM's shape, without any text. {_STREAMED}",
        a.TOKENS_OUT,
        EVENTS,
    ),
    op(
        "POST /completion",
        "Complete a prompt in llama.cpp's shape",
        "Continues a prompt. `stream` asks for server-sent events.",
        a.LLAMA_COMPLETION,
        EVENTS,
    ),
    op(
        "POST /infill",
        "Fill in code in llama.cpp's shape",
        "Generates what stands between a prefix and a suffix, for models with tokens for it.",
        a.LLAMA_COMPLETION,
        EVENTS,
    ),
    op(
        "POST /apply-template",
        "Render a chat for llama.cpp",
        "Returns the prompt that the chat template makes of a conversation.",
        a.PROMPT,
    ),
    op("GET /props", "Get server properties for llama.cpp", "Returns defaults.", a.LLAMA_PROPS),
    op("GET /slots", "List slots for llama.cpp", "Returns a slot for each row.", a.LLAMA_SLOTS),
    op(
        "POST /batch_infer",
        "Complete several prompts in RTP-LLM's shape",
        "Continues each prompt of `prompt_batch`.",
        a.RTP_BATCH,
        EVENTS,
    ),
    op(
        "POST /chat/render, POST /v1/chat/render",
        "Render a chat for RTP-LLM",
        "Returns the prompt of a conversation, as text and token ids.",
        a.RTP_RENDERED,
    ),
    op(
        "POST /tokenizer/encode",
        "Tokenize a text for RTP-LLM",
        "Returns the token ids of a prompt and their texts.",
        a.RTP_TOKENS,
    ),
)

POOLING: tuple[Operation, ...] = (
    op(
        "POST /rerank, POST /v1/rerank",
        "Rank documents",
        f"Orders documents by relevance to a query. {_POOLING} `/rerank` also takes "
        "text-embeddings-inference's shape.",
        Answer("Rerank", (dict, [dict])),
    ),
    op(
        "POST /score",
        "Score pairs of texts",
        f"Returns the similarity or relevance of `text_1` and `text_2`. {_POOLING}",
        a.SCORES,
    ),
    op(
        "POST /v1/score",
        "Score labels or pairs of texts",
        "Returns the probability of each of `label_token_ids` after a query and each item; of "
        "rerankers and embedders, the similarity of `text_1` and `text_2`.",
        a.SCORES,
    ),
    op(
        "POST /generative_scoring",
        "Score items by a label's probability",
        "Returns the probability of the first of `label_token_ids` among them, for each item.",
        a.SCORED_ITEMS,
    ),
    op(
        "POST /classify, POST /v1/classify",
        "Classify texts",
        f"Returns the probabilities of the model's labels for each text. {_POOLING}",
        a.CLASSES,
    ),
    op(
        "POST /pooling",
        "Get the output of the pooling head",
        f"Returns numbers in the shape that the model's task has. {_POOLING}",
        a.POOLED,
        BYTES,
    ),
    op(
        "POST /encode",
        "Encode texts in SGLang's shape",
        f"Returns a vector, or scores, for each text. {_POOLING}",
        a.ENCODED,
    ),
    op(
        "POST /embed",
        "Embed texts for text-embeddings-inference",
        f"Returns a list of vectors. {_POOLING}",
        a.TEI_VECTORS,
    ),
    op(
        "POST /embed_all",
        "Embed every token",
        f"Returns a vector for each token of each text. {_POOLING}",
        a.TEI_TOKEN_VECTORS,
    ),
    op(
        "POST /embed_sparse",
        "Embed texts sparsely",
        "Not offered: no model here has sparse vectors.",
        is_refused=True,
    ),
    op(
        "POST /predict",
        "Classify texts for text-embeddings-inference",
        f"Returns the labels and scores of each text. {_POOLING}",
        a.TEI_LABELS,
    ),
    op(
        "POST /similarity",
        "Compare texts with one text",
        f"Returns the similarity of a source sentence and each other one. {_POOLING}",
        a.TEI_SCORES,
    ),
    op(
        "POST /v1/embeddings/similarity",
        "Compare texts in RTP-LLM's shape",
        f"Returns the similarities of the texts of two lists. {_POOLING}",
        Answer("RtpSimilarity", dict),
    ),
    op(
        "POST /v1/embeddings/sparse",
        "Embed texts sparsely in RTP-LLM's shape",
        "Not offered: no model here has sparse vectors.",
        is_refused=True,
    ),
    op(
        "POST /v1/embeddings/colbert",
        "Embed tokens in RTP-LLM's shape",
        "Not offered: no model here has ColBERT's vectors.",
        is_refused=True,
    ),
    op(
        "POST /v1/classifier",
        "Classify texts in RTP-LLM's shape",
        f"Returns the logits of the model's labels. {_POOLING}",
        Answer("RtpClasses", dict),
    ),
    op(
        "POST /v1/reranker",
        "Rank documents in RTP-LLM's shape",
        f"Returns the scores of documents. {_POOLING}",
        Answer("RtpRanking", dict),
    ),
)

GENERATION: Mapping[str, tuple[Operation, ...]] = {
    "OpenAI": OPENAI,
    "Anthropic": ANTHROPIC,
    "Cohere": COHERE,
    "Ollama": OLLAMA,
    "Other generation APIs": NATIVE,
    "Embeddings and scores": POOLING,
}
