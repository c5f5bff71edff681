"""The operations that describe and control the server, by subject."""

from __future__ import annotations

from collections.abc import Mapping

from remora.deployments.http.api_docs import answers as a
from remora.deployments.http.api_docs.operation import BYTES, TEXT, Operation, op

_OPERATOR = "For the operator: needs the admin key, or a server that listens locally."
_NO_TRANSFER = (
    "Always refused: it needs NCCL or CUDA IPC with the trainer. Use "
    "/update_weights_from_tensor or /update_weights_from_disk."
)
_SLEEP = f"Needs `engine.sleep_mode`. {_OPERATOR}"
_DYNAMIC = f"Needs `lora.dynamic`. {_OPERATOR}"

TOKENS: tuple[Operation, ...] = (
    op(
        "POST /tokenize, POST /v1/tokenize",
        "Tokenize",
        "Returns the token ids of a prompt, of several, or of a conversation; for a body with "
        "`content`, in llama.cpp's shape.",
        a.TOKENS,
    ),
    op(
        "POST /detokenize, POST /v1/detokenize",
        "Detokenize",
        "Returns the text of token ids, under vLLM's, SGLang's and llama.cpp's names.",
        a.TEXT,
    ),
    op(
        "POST /tokens, GET /tokens",
        "Count tokens",
        "Returns how many tokens a text has, in LightLLM's shape; GET has a body too.",
        a.NUM_TOKENS,
    ),
    op(
        "GET /tokenizer_info",
        "Get the tokenizer's configuration",
        "Returns tokenizer_config.json and the chat template. Needs `api.tokenizer_info`.",
        a.TOKENIZER,
    ),
    op(
        "POST /parse_function_call",
        "Parse tool calls",
        "Returns the tool calls in a text that a model has written, and the rest of it.",
        a.CALLS,
    ),
    op(
        "POST /separate_reasoning",
        "Separate reasoning",
        "Returns the reasoning in a text that a model has written, and the rest of it.",
        a.REASONING,
    ),
)

INFORMATION: tuple[Operation, ...] = (
    op(
        "GET /v1/models",
        "List models",
        "Lists models and adapters; in Anthropic's shape with the header `anthropic-version`.",
        a.MODELS,
    ),
    op("GET /v1/models/{name}", "Get a model", "Returns a model or an adapter.", a.MODEL),
    op(
        "GET /get_model_info, GET /model_info",
        "Get facts of the model",
        "Returns path, task, context length, vocabulary and number format of the model.",
        a.MODEL_INFO,
    ),
    op(
        "GET /get_server_info, GET /server_info",
        "Get facts of the server",
        "Returns version, limits, start-up times and configuration, without secrets.",
        a.SERVER_INFO,
    ),
    op(
        "GET /info",
        "Get facts in TGI's shape",
        "Returns model, limits and version; of pooling models in text-embeddings-inference's.",
        a.TGI_INFO,
    ),
    op("GET /get_model_name", "Get the model's name", "In LightLLM's shape.", a.MODEL_NAME),
    op("GET /version", "Get the version", "Returns remora's version.", a.VERSION),
    op("GET /load", "Get the load", "Returns the number of running requests.", a.LOAD),
    op("GET /token_load", "Get the load of the KV cache", "Parts in use, 0 to 1.", a.TOKEN_LOAD),
    op(
        "GET /worker_status, POST /worker_status, GET /rtp_llm/worker_status, "
        "POST /rtp_llm/worker_status",
        "Get a replica's load for RTP-LLM",
        "Returns queries, concurrency and KV memory of one replica.",
        a.RTP_WORKER,
    ),
    op(
        "GET /cache_status, POST /cache_status, GET /rtp_llm/cache_status, "
        "POST /rtp_llm/cache_status",
        "Get KV memory for RTP-LLM",
        "Returns tokens of KV memory of one replica, free and in total.",
        a.RTP_CACHE,
    ),
    op("GET /metrics", "Read metrics", "Returns Prometheus' text format.", None, TEXT),
)

HEALTH: tuple[Operation, ...] = (
    op(
        "GET /health, GET /healthz, GET /ping, POST /ping",
        "Check health",
        "Answers while the engine works; 503 after it has failed.",
    ),
    op("GET /ready", "Check readiness", "Answers 200 while requests are taken, else 503."),
    op(
        "GET /health_generate",
        "Check health by generating",
        "Generates one token; 503 if that fails or takes too long.",
    ),
    op("GET /liveness", "Check liveness for Kubernetes", "As /health, in JSON.", a.STATUS),
    op("GET /readiness", "Check readiness for Kubernetes", "As /ready, in JSON.", a.STATUS),
    op(
        "GET /status, POST /status, GET /health_check, POST /health_check, "
        "GET /frontend_health, POST /frontend_health, GET /GraphService/cm2_status, "
        "POST /GraphService/cm2_status, GET /SearchService/cm2_status, "
        "POST /SearchService/cm2_status",
        "Check readiness for RTP-LLM",
        'Answers `"ok"` while requests are taken, else 503.',
        a.PROBE,
    ),
)

CONTROL: tuple[Operation, ...] = (
    op(
        "POST /abort_request",
        "Abort requests",
        "Ends a request by its id, or all of them with `abort_all` (the operator).",
        a.ABORTED,
    ),
    op(
        "POST /flush_cache, GET /flush_cache",
        "Flush the prefix cache",
        f"Drops cached prefixes; refused while requests run. {_OPERATOR}",
        a.DONE,
    ),
    op(
        "POST /pause_generation",
        "Pause generation",
        f"Stops taking steps; `mode` says what happens to running requests. {_OPERATOR}",
        a.MESSAGE_STATUS,
    ),
    op(
        "POST /continue_generation",
        "Continue generation",
        f"Goes on after a pause. {_OPERATOR}",
        a.MESSAGE_STATUS,
    ),
    op("POST /pause", "Pause by vLLM's name", f"`?mode=abort` or `keep`. {_OPERATOR}", a.STATUS),
    op("POST /resume", "Resume by vLLM's name", f"Goes on after a pause. {_OPERATOR}", a.STATUS),
    op("GET /is_paused", "Ask whether it is paused", f"{_OPERATOR}", a.PAUSED),
    op(
        "POST /start_profile, GET /start_profile",
        "Start a profile",
        f"Records the engine's steps in `debug.profile_dir`. {_OPERATOR}",
        a.DONE,
    ),
    op(
        "POST /stop_profile, GET /stop_profile",
        "Stop a profile",
        f"Ends a recording and returns the place of its trace. {_OPERATOR}",
        a.PROFILED,
    ),
    op(
        "GET /step_records",
        "Read the latest steps",
        f"Returns recent engine steps. Needs `metrics.max_step_records`. {_OPERATOR}",
        a.STEPS,
    ),
    op(
        "GET /autoscaling/explain",
        "Explain autoscaling",
        f"Returns the last decisions about the number of replicas, with reasons. {_OPERATOR}",
        a.SCALING,
    ),
)

ADAPTERS: tuple[Operation, ...] = (
    op("GET /v1/lora_adapters", "List adapters", "Lists adapters and their state.", a.ADAPTERS),
    op(
        "POST /v1/load_lora_adapter",
        "Load an adapter",
        f"Loads an adapter on all replicas. {_DYNAMIC}",
        None,
        TEXT,
    ),
    op(
        "POST /v1/unload_lora_adapter",
        "Unload an adapter",
        f"Unloads an adapter after its requests; `force` ends them. {_DYNAMIC}",
        None,
        TEXT,
    ),
    op(
        "POST /load_lora_adapter",
        "Load an adapter in SGLang's shape",
        f"Loads an adapter on all replicas. {_DYNAMIC}",
        a.LOADED_ADAPTERS,
    ),
    op(
        "POST /unload_lora_adapter",
        "Unload an adapter in SGLang's shape",
        f"Unloads an adapter after its requests. {_DYNAMIC}",
        a.LOADED_ADAPTERS,
    ),
    op(
        "POST /v1/lora_adapters/{name}/pin",
        "Pin an adapter",
        f"Keeps an adapter in memory. {_DYNAMIC}",
        a.ADAPTER,
    ),
    op(
        "POST /v1/lora_adapters/{name}/unpin",
        "Unpin an adapter",
        f"Lets an adapter leave memory again. {_DYNAMIC}",
        a.ADAPTER,
    ),
)

WEIGHTS: tuple[Operation, ...] = (
    op(
        "POST /update_weights_from_disk",
        "Load other weights from disk",
        f"Serves other weights of the same model. Needs `model.weight_roots`. {_OPERATOR}",
        a.DONE,
    ),
    op(
        "POST /update_weights_from_tensor",
        "Replace tensors",
        f"Takes a safetensors file in the body. Needs `model.weight_upload_limit`. {_OPERATOR}",
        a.DONE,
    ),
    op(
        "POST /update_weights_from_instance",
        "Take weights of another server",
        f"Copies the weights of a remora server. Needs `model.weight_instances`. {_OPERATOR}",
        a.DONE,
    ),
    op(
        "GET /weights",
        "Read the weights",
        "Returns parts of a safetensors file by `range` and `if-match`. Needs "
        f"`model.share_weights`. {_OPERATOR}",
        None,
        BYTES,
    ),
    op(
        "POST /save_weights",
        "Save the weights",
        f"Writes the served weights to a new folder. Needs `model.weight_roots`. {_OPERATOR}",
        a.DONE,
    ),
    op(
        "GET /get_weight_version, GET /weight_version",
        "Get the weights' label",
        "Returns the label of the served weights.",
        a.WEIGHT_VERSION,
    ),
    op(
        "POST /update_weight_version",
        "Change the weights' label",
        f"Changes the label only. {_OPERATOR}",
        a.DONE,
    ),
    op("POST /sleep", "Sleep", f"Releases the memory of weights and KV cache. {_SLEEP}"),
    op("POST /wake_up", "Wake up", f"Takes the memory again. {_SLEEP}"),
    op("GET /is_sleeping", "Ask whether it sleeps", "Also while a part sleeps.", a.SLEEPING),
    op(
        "POST /release_memory_occupation",
        "Release memory in SGLang's shape",
        f"Releases the memory of `tags`, or all. {_SLEEP}",
        a.DONE,
    ),
    op(
        "POST /resume_memory_occupation",
        "Take memory again in SGLang's shape",
        f"Takes the memory of `tags`, or all, again. {_SLEEP}",
        a.DONE,
    ),
    op(
        "POST /update_weights_from_distributed, POST /init_weights_update_group, "
        "POST /destroy_weights_update_group, POST /update_weights_from_ipc, "
        "POST /init_weight_transfer_engine, POST /start_weight_update, POST /update_weights, "
        "POST /finish_weight_update",
        "Transfer weights between GPUs",
        _NO_TRANSFER,
        is_refused=True,
    ),
)

SERVER: Mapping[str, tuple[Operation, ...]] = {
    "Tokens and parsers": TOKENS,
    "Information": INFORMATION,
    "Health": HEALTH,
    "Control": CONTROL,
    "Adapters": ADAPTERS,
    "Weights": WEIGHTS,
}
