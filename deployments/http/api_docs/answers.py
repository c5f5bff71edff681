"""The responses of the operations, by name. `shapes.py` explains the notation."""

from __future__ import annotations

from remora.deployments.http.api_docs.shapes import Answer

USAGE = Answer(
    "Usage",
    {
        "prompt_tokens": int,
        "completion_tokens?": int,
        "total_tokens": int,
        "prompt_tokens_details?": ({"cached_tokens": int}, None),
        "completion_tokens_details?": (dict, None),
    },
)
_FINISH = (str, None)

# -- OpenAI --------------------------------------------------------------------------------------

CHAT_COMPLETION = Answer(
    "ChatCompletion",
    {
        "id": str,
        "object": "chat.completion",
        "created": int,
        "model": str,
        "system_fingerprint?": str,
        "choices": [
            {
                "index": int,
                "message": {
                    "role": "assistant",
                    "content": (str, None),
                    "refusal?": (str, None),
                    "reasoning_content?": (str, None),
                    "tool_calls?": [dict],
                },
                "logprobs?": (dict, None),
                "finish_reason": _FINISH,
            }
        ],
        "usage": USAGE,
    },
)
CHAT_BATCH = Answer(
    "ChatCompletionBatch",
    {"id": str, "object": str, "created": int, "model": str, "choices": [dict], "usage": USAGE},
)
COMPLETION = Answer(
    "Completion",
    {
        "id": str,
        "object": "text_completion",
        "created": int,
        "model": str,
        "choices": [
            {"index": int, "text": str, "logprobs?": (dict, None), "finish_reason": _FINISH}
        ],
        "usage": USAGE,
    },
)
RESPONSE = Answer(
    "Response",
    {
        "id": str,
        "object": "response",
        "created_at": int,
        "status": str,
        "model": str,
        "output": [{"id": str, "type": str}],
        "error": (dict, None),
        "usage": (dict, None),
    },
)
COMPACTION = Answer(
    "ResponseCompaction",
    {
        "id": str,
        "object": "response.compaction",
        "created_at": int,
        "output": [dict],
        "usage": dict,
    },
)
RESPONSE_TOKENS = Answer(
    "ResponseInputTokens", {"object": "response.input_tokens", "input_tokens": int}
)
EMBEDDINGS = Answer(
    "Embeddings",
    {
        "object": "list",
        "model": str,
        "data": [{"object": "embedding", "index": int, "embedding": ([float], str)}],
        "usage": USAGE,
    },
)
MODEL = Answer(
    "Model",
    {
        "id": str,
        "object?": "model",
        "created?": int,
        "owned_by?": str,
        "root?": (str, None),
        "parent?": (str, None),
        "max_model_len?": int,
    },
)
MODELS = Answer("ModelList", {"data": [MODEL]})
DELETED = Answer("Deleted", {"id": str, "object": str, "deleted": bool})
PAGE = Answer(
    "Page",
    {
        "object?": "list",
        "data": [dict],
        "first_id": (str, None),
        "last_id": (str, None),
        "has_more": bool,
    },
)
FILE = Answer("File", {"id": str, "object": "file", "bytes": int, "filename": str, "purpose": str})
BATCH = Answer(
    "Batch",
    {"id": str, "object": "batch", "endpoint": str, "input_file_id": str, "status": str},
)

# -- Anthropic, Cohere, Ollama -------------------------------------------------------------------

MESSAGE = Answer(
    "Message",
    {
        "id": str,
        "type": "message",
        "role": "assistant",
        "model": str,
        "content": [{"type": str}],
        "stop_reason": (str, None),
        "stop_sequence": (str, None),
        "usage": {"input_tokens": int, "output_tokens": int},
    },
)
MESSAGE_TOKENS = Answer("MessageTokens", {"input_tokens": int})
MESSAGE_BATCH = Answer(
    "MessageBatch", {"id": str, "type": "message_batch", "processing_status": str}
)
MESSAGE_BATCH_DELETED = Answer("MessageBatchDeleted", {"id": str, "type": "message_batch_deleted"})
COHERE_CHAT = Answer(
    "CohereChat",
    {
        "id": str,
        "message": {"role": "assistant", "content?": [dict], "tool_calls?": [dict]},
        "finish_reason": str,
        "usage": {"tokens": {"input_tokens": int, "output_tokens": int}, "billed_units": dict},
    },
)
COHERE_EMBEDDINGS = Answer("CohereEmbeddings", {"id": str, "embeddings": dict, "meta": dict})
RANKING = Answer("Ranking", {"results": [{"index": int, "relevance_score": float}]})
OLLAMA_CHAT = Answer(
    "OllamaChat",
    {
        "model": str,
        "created_at": str,
        "message": {"role": "assistant", "content": str},
        "done": bool,
        "done_reason?": str,
    },
)
OLLAMA_COMPLETION = Answer(
    "OllamaCompletion", {"model": str, "created_at": str, "response": str, "done": bool}
)
OLLAMA_EMBEDDINGS = Answer("OllamaEmbeddings", {"model": str, "embeddings": [[float]]})
OLLAMA_MODELS = Answer("OllamaModels", {"models": [{"name": str, "model": str, "details": dict}]})
OLLAMA_MODEL = Answer(
    "OllamaModel", {"details": dict, "model_info": dict, "capabilities": [str], "template": str}
)

# -- SGLang, TGI, LightLLM, llama.cpp, RTP-LLM, text-embeddings-inference ------------------------

GENERATED = Answer(
    "Generated",
    {
        "text?": (str, [str]),
        "output_ids?": [int],
        "meta_info?": {"id": str, "finish_reason": (dict, None), "prompt_tokens": int},
        "generated_text?": (str, [str]),
    },
)
GENERATED_EVENT = Answer(
    "GeneratedEvent",
    {"index?": int, "token": {"id": int}, "generated_text?": (str, None), "details?": (dict, None)},
)
LLAMA_COMPLETION = Answer(
    "LlamaCompletion",
    {"index": int, "content": str, "tokens": [int], "stop": bool, "model?": str, "timings?": dict},
)
LLAMA_PROPS = Answer(
    "LlamaProps", {"default_generation_settings": dict, "total_slots": int, "model_path": str}
)
LLAMA_SLOTS = Answer("LlamaSlots", [{"id": int, "n_ctx": int, "is_processing": bool}])
PROMPT = Answer("RenderedPrompt", {"prompt": str})
RTP_BATCH = Answer("RtpBatch", {"response_batch": [{"response": (str, [str]), "finished": bool}]})
RTP_RENDERED = Answer("RtpRendered", dict)
RTP_CACHE = Answer(
    "RtpCacheStatus", {"available_kv_cache": int, "total_kv_cache": int, "block_size": int}
)
RTP_WORKER = Answer(
    "RtpWorkerStatus",
    {
        "role": str,
        "alive": bool,
        "available_concurrency": int,
        "running_query_len": int,
        "waiting_query_len": int,
        "cache_status": RTP_CACHE,
    },
)
RTP_TOKENS = Answer("RtpTokens", {"token_ids": [int], "tokens": [str], "error": str})
TEI_VECTORS = Answer("Vectors", [[float]])
TEI_TOKEN_VECTORS = Answer("TokenVectors", [[[float]]])
TEI_LABELS = Answer("Labels", [object])
TEI_SCORES = Answer("Similarities", [float])
TOKEN_LOAD = Answer("TokenLoad", {"current_load": float, "logical_max_load": float})

# -- pooling and scores --------------------------------------------------------------------------

CLASSES = Answer(
    "Classes",
    (
        {"id": str, "object": "list", "model": str, "data": [dict], "usage": USAGE},
        {"embedding": [float], "meta_info": dict},  # of SGLang's bodies
        [dict],
    ),
)
POOLED = Answer(
    "Pooled", {"id": str, "object": "list", "model": str, "data": [dict], "usage": USAGE}
)
ENCODED = Answer("Encoded", (dict, [dict]))
SCORES = Answer("Scores", {"object?": str, "model?": str, "usage?": dict})
SCORED_ITEMS = Answer(
    "ScoredItems",
    {
        "id": str,
        "object": "list",
        "model": str,
        "data": [{"index": int, "object": "score", "score": float}],
        "usage": USAGE,
    },
)
TOKENS_OUT = Answer(
    "GeneratedTokens",
    {
        "request_id": str,
        "choices": [{"index": int, "token_ids": [int], "finish_reason": _FINISH}],
        "usage": USAGE,
    },
)

# -- the server ----------------------------------------------------------------------------------

TOKENS = Answer("Tokens", {"tokens": [object], "count?": int, "max_model_len?": int})
TEXT = Answer("Text", {"prompt": (str, [str]), "text": (str, [str]), "content": (str, [str])})
NUM_TOKENS = Answer("TokenCount", {"ntokens": int})
TOKENIZER = Answer("TokenizerInfo", dict)
MODEL_INFO = Answer(
    "ModelInfo",
    {
        "model_path": str,
        "served_model_name": str,
        "task": str,
        "is_generation": bool,
        "max_model_len": int,
        "vocab_size": int,
        "dtype": str,
        "weight_version": str,
    },
)
SERVER_INFO = Answer(
    "ServerInfo",
    {
        "version": str,
        "served_model_name": str,
        "status": str,
        "device": str,
        "dtype": str,
        "context_length": int,
        "config": dict,
    },
)
TGI_INFO = Answer("TextGenerationInfo", {"model_id": str, "version": str})
MODEL_NAME = Answer("ModelName", {"model_name": str})
VERSION = Answer("Version", {"version": str})
LOAD = Answer("Load", {"server_load": int})
STATUS = Answer("Status", {"status": str})
PROBE = Answer("Probe", "ok")
DONE = Answer("Done", {"success": bool, "message?": str})
PROFILED = Answer("Profiled", {"success": bool, "trace": object})
STEPS = Answer("StepRecords", (dict, [object]))
ABORTED = Answer("Aborted", {"num_aborted": int})
PAUSED = Answer("Paused", {"is_paused": bool})
MESSAGE_STATUS = Answer("StatusMessage", {"message": str, "status": str})
SCALING = Answer("ScalingDecisions", dict)
CALLS = Answer(
    "ParsedCalls",
    {"normal_text": str, "calls": [{"tool_index": int, "name": (str, None), "parameters": str}]},
)
REASONING = Answer("SeparatedReasoning", {"reasoning_text": str, "text": str})
ADAPTERS = Answer("Adapters", {"object": "list", "data": [dict]})
ADAPTER = Answer("Adapter", {"name": str})
LOADED_ADAPTERS = Answer("LoadedAdapters", {"success": bool, "loaded_adapters": dict})
WEIGHT_VERSION = Answer("WeightVersion", {"weight_version": str})
SLEEPING = Answer("Sleeping", {"is_sleeping": bool})
