"""The section `api`: HTTP timeouts, strictness, parsers. Limits of a request: `limits.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from remora.configs.fields import Bytes, Name, Seconds, Secret, Section
from remora.configs.sections.cors import CorsSection


class ApiSection(Section):
    """HTTP: timeouts, strictness, parsers."""

    unknown_fields: Literal["warn", "reject"] = "warn"
    """Handling of request fields that no API defines: warn = ignore them, list them in the
    response header x-remora-ignored-fields, and log misspelt ones once; reject = HTTP 400."""

    max_body_bytes: Bytes = 16 * 2**20
    """Largest request body, in bytes or as 16MiB; larger ones get HTTP 413."""

    drain_timeout_s: Seconds | None = None
    """Seconds that a stopping replica gives its running requests to finish; those still running
    then end with an error. Default: request_timeout_s, else 120."""

    request_timeout_s: Seconds | None = None
    """Seconds after which a request is aborted. Default: no limit."""

    max_concurrent_requests: Annotated[int, Field(ge=1, le=2**20)] | None = None
    """Most generation requests that a replica processes at once, each counted once however many
    outputs it asks for. Default: limited by the engine's queue only."""

    wait_when_busy: bool = False
    """Whether a request above max_concurrent_requests waits for up to engine.queue_timeout_s. false
    = HTTP 429 at once."""

    api_key: Secret | None = None
    """API key that every route except health and metrics requires: env:NAME or file:/path, with one
    key per line. Default: no key is required."""

    admin_api_key: Secret | None = None
    """API key of the administrative routes (flush_cache, abort_request, ...): env:NAME or
    file:/path. Default: these routes answer local clients only."""

    playground: bool = True
    """Whether GET / answers browsers with a page to try the server. The page itself needs no API
    key; what it asks the server for does. Other clients get the plain answer at / in any case."""

    docs: bool = True
    """Whether /docs and /openapi.json describe the API. false = HTTP 404."""

    cors: CorsSection | None = None
    """Web pages of other origins that may use this server: {origins: [https://chat.example.com]}.
    Default: none; browsers keep the answers from pages of other origins."""

    share_prefix_cache: bool = False
    """Whether requests of different API keys share the prefix cache, and the texts of
    speculation.shared_index_memory. Sharing saves work where keys send the same prompts; then
    `cached_tokens` and response times tell one key what others have sent."""

    tool_parser: str = "auto"
    """Parser of the model's tool calls: auto = detected from the chat template; none; or a name
    that `remora config parsers` lists."""

    reasoning_parser: str = "auto"
    """Parser of the model's reasoning: auto = detected from the chat template; none; or a name that
    `remora config parsers` lists."""

    reasoning_field: Literal["both", "reasoning", "reasoning_content"] = "both"
    """Field of chat responses that holds the reasoning; both = it is sent in both fields."""

    template_variables: dict[Name, Any] = Field(default_factory=dict)
    """Variables of the chat template for requests that do not set them (`chat_template_kwargs`,
    `reasoning_effort`), such as {enable_thinking: false}."""

    reasoning_efforts: Annotated[dict[str, Name], Field(max_length=16)] = Field(
        default_factory=dict
    )
    """Values of the template's variable `reasoning_effort` for efforts of requests whose names
    differ there, such as {minimal: low}."""

    generate_dialect: Literal["auto", "sglang", "tgi", "lightllm"] = "auto"
    """API that /generate speaks. auto = detected from each body (text or input_ids: SGLang; inputs:
    TGI)."""

    stream_text: Literal["cumulative", "delta"] = "cumulative"
    """Content of each event of a /generate stream in SGLang's API: cumulative = all text so far;
    delta = new text only."""

    stream_interval_tokens: Annotated[int, Field(ge=1, le=4096)] = 1
    """Tokens per stream event; the first token and the end are always sent at once. Higher = fewer
    events, less CPU time. A request's own stream_interval may be larger."""

    tokenizer_info: bool = False
    """Whether /tokenizer_info shows the tokenizer's configuration and the chat template."""

    generation: Literal["all", "chat", "completion"] = "all"
    """Which generation APIs are served: chat = conversations only; completion = raw prompts only
    (/v1/completions, /generate and similar, /api/generate). The others answer HTTP 400."""

    chunk_per_token: bool = False
    """Whether streams of /v1/chat/completions and /v1/completions have one chunk for each output
    token, also where a token adds no text and where a step gives several; for clients that count
    chunks. Costs CPU time. Needs stream_interval_tokens 1."""

    stream_usage: Literal["on_request", "final", "continuous"] = "on_request"
    """Usage in streams of /v1/chat/completions and /v1/completions: on_request = as
    stream_options say; final = always in a last chunk; continuous = in each chunk, too."""

    request_metrics: bool = False
    """Whether answers of /v1/chat/completions, /v1/completions and /v1/responses with one output
    have `metrics`: times of the request and acceptance of drafts. Streams have them in their last
    chunk with the usage."""

    system_fingerprint: Annotated[str, Field(min_length=1, max_length=256)] = "auto"
    """`system_fingerprint` of OpenAI's answers: auto = changes with whatever may change answers to
    one seed; none = answers have none; or a text."""

    tokens_as_ids: bool = False
    """Whether log-probabilities of /v1/chat/completions and /v1/completions name tokens as
    `token_id:N` unless a request says otherwise (`return_tokens_as_token_ids`)."""

    null_fields: bool = False
    """Whether optional fields of /v1/chat/completions and /v1/completions are null instead of
    absent, and the last delta of a streamed chat has an empty `content`; for clients that read
    these without a check."""

    any_model_name: bool = False
    """Whether requests may name a model that is not served; the base model answers. Behind a
    gateway of several models, a name must still select one of them."""

    prompt_truncation: Literal["none", "head", "center", "tail"] = "none"
    """Which tokens are dropped from a prompt that leaves no room for the output: head = the first,
    center = those in the middle, tail = the last; none = the request is refused."""

    prompt_logprobs: bool = False
    """Whether non-streaming responses of /v1/completions, /v1/chat/completions and LightLLM's
    /generate always include the log-probability of each prompt token. Such prompts do not use the
    prefix cache."""

    hidden_states: bool = False
    """Whether /generate may return the final hidden states of prompt and output
    (`return_hidden_states`). Such prompts do not use the prefix cache. Needs parallel.pp_size 1."""

    prompt_embeddings: bool = False
    """Whether prompts may be given as embeddings instead of text: `input_embeds` of SGLang's
    /generate and `prompt_embeds` of /v1/completions. They reach the model unchecked but for their
    shape and finite numbers."""

    tokenizer_threads: Annotated[int, Field(ge=1, le=256)] | None = None
    """Threads that tokenise and render prompts over 16 KiB; shorter ones are processed on the event
    loop. Default: cores + 4, at most 32."""

    tokenizer_batch_size: Annotated[int, Field(ge=1, le=1024)] = 1
    """Most texts per tokenizer call. 1 = each request is tokenised separately, with all of its
    prompts together; more = concurrent requests share calls."""

    tokenizer_batch_wait_s: Annotated[float, Field(ge=0, le=1)] = 0.002
    """Seconds that a text waits for others if tokenizer_batch_size is above 1."""

    response_store: Name = "memory"
    """Where /v1/responses stores responses for `previous_response_id`: memory (of one replica);
    none; or file:/path of a database that the replicas of a machine share."""

    response_ttl_s: Seconds = 3600.0
    """Seconds that a stored response is kept."""

    batch_dir: Name | None = None
    """Directory for the files of /v1/files and /v1/batches. Default: these routes are off."""

    task_prompts: Annotated[dict[Name, Name], Field(max_length=1024)] = Field(default_factory=dict)
    """Named prompt prefixes. A request with `task_id` has that text prepended to its prompt, a
    conversation to what its template renders. All are computed before the replica is ready (with
    api_key and without share_prefix_cache: by the first request of each key), and are evicted from
    the prefix cache last."""

    task_prompts_file: Name | None = None
    """JSON file with the task prompts, instead of task_prompts: an object, or a list of {"task_id",
    "prompt"}."""

    @property
    def drain_s(self) -> float:
        """Seconds for which a stopping replica lets requests finish."""
        return self.drain_timeout_s or self.request_timeout_s or 120.0

    def _conflicts(self) -> Iterator[tuple[str, str]]:
        if self.wait_when_busy and self.max_concurrent_requests is None:
            yield "wait_when_busy", "needs max_concurrent_requests"
        if self.chunk_per_token and self.stream_interval_tokens > 1:
            yield "chunk_per_token", "needs stream_interval_tokens 1"
        if self.task_prompts and self.task_prompts_file is not None:
            yield "task_prompts_file", "task_prompts is set too; remove one of the two"
