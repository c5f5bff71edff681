"""HTTP: the section `api` of a configuration. How much one request may ask for: `limits.py`."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from remora.configs.fields import Bytes, Name, Seconds, Secret, Section, conflict


class ApiSection(Section):
    """HTTP: limits, timeouts, strictness."""

    unknown_fields: Literal["warn", "reject"] = "warn"
    """Request fields that no API defines: warn = left out and named in a response header
    (x-remora-ignored-fields), reject = HTTP 400."""

    max_body_bytes: Bytes = 16 * 2**20
    """Largest request body, in bytes or as 16MiB; beyond it HTTP 413."""

    drain_timeout_s: Seconds | None = None
    """Seconds that a stopping replica gives its running requests to finish; beyond it they end with
    an error. Default: the longest a request may take (request_timeout_s), else 120."""

    request_timeout_s: Seconds | None = None
    """Seconds after which a request is aborted. Default: no limit."""

    max_concurrent_requests: Annotated[int, Field(ge=1, le=2**20)] | None = None
    """Requests for text that a replica answers at once, each counted as one however many outputs it
    asks for. Default: as many as the engine's queue takes."""

    wait_when_busy: bool = False
    """Whether a request beyond max_concurrent_requests waits for its turn, for up to
    engine.queue_timeout_s, instead of HTTP 429."""

    api_key: Secret | None = None
    """Key that every route but health and metrics asks for: env:NAME or file:/path (one key a
    line). Default: none is asked for."""

    admin_api_key: Secret | None = None
    """Key of the administrative routes (flush_cache, abort_request, ...), likewise. Default: they
    answer callers on this machine only."""

    tool_parser: str = "auto"
    """Format in which the model writes tool calls: auto = told from the chat template, none, or a
    name; `remora config parsers` lists them."""

    reasoning_parser: str = "auto"
    """Format in which the model writes its thought: auto, none, or a name, likewise."""

    reasoning_field: Literal["both", "reasoning", "reasoning_content"] = "both"
    """Name of the field of a chat's answer that holds the model's thought."""

    generate_dialect: Literal["auto", "sglang", "tgi", "lightllm"] = "auto"
    """Whose bodies /generate takes; auto = told from each body (text or input_ids: SGLang, inputs:
    TGI)."""

    stream_text: Literal["cumulative", "delta"] = "cumulative"
    """What an event of a /generate stream in SGLang's dialect holds: all text so far, or what is
    new."""

    stream_interval_tokens: Annotated[int, Field(ge=1, le=4096)] = 1
    """Tokens gathered before a stream says something more; its first and its end come at once.
    Higher = fewer events, less work. A request's own stream_interval may be larger."""

    generation: Literal["all", "chat", "completion"] = "all"
    """Which ways to ask for text are open: chat = conversations, completion = bare prompts
    (/v1/completions, /generate and its like, /api/generate); the others answer HTTP 400."""

    prompt_truncation: Literal["none", "head", "center", "tail"] = "none"
    """What is dropped of a prompt that leaves no room for the output: none = it is refused; head =
    its first tokens, center = those in the middle, tail = its last."""

    prompt_logprobs: bool = False
    """Whether whole answers of /v1/completions, /v1/chat/completions and LightLLM's /generate hold
    the log-probability of each prompt token, unasked. Their prompts are computed anew then."""

    hidden_states: bool = False
    """Whether /generate tells the final hidden states of prompt and output to requests that ask
    (`return_hidden_states`). Their prompts are computed anew then. Needs pp_size 1."""

    tokenizer_threads: Annotated[int, Field(ge=1, le=256)] | None = None
    """Threads that tokenise and render long prompts (over 16 KiB), beside the event loop, which
    does short ones. Default: 4 more than there are cores, 32 at most."""

    tokenizer_batch_size: Annotated[int, Field(ge=1, le=1024)] = 1
    """Most texts that are tokenised in one call. 1 = the prompts of one request together, and each
    request by itself; more = those of requests that come at the same time, too."""

    tokenizer_batch_wait_s: Annotated[float, Field(ge=0, le=1)] = 0.002
    """Seconds that a text waits for others, with tokenizer_batch_size above 1."""

    response_store: Name = "memory"
    """Where /v1/responses keeps answers for `previous_response_id`: memory (of one replica), none,
    or file:/path of a database that the replicas of one machine share."""

    response_ttl_s: Seconds = 3600.0
    """Seconds that a stored response is kept."""

    batch_dir: Name | None = None
    """Folder for the files of /v1/files and /v1/batches. Default: these routes are off."""

    task_prompts: Annotated[dict[Name, Name], Field(max_length=1024)] = Field(default_factory=dict)
    """Texts by name. A request that gives a name as `task_id` has the text before its prompt; all
    are computed before the replica is ready, and stay in the prefix cache while others can go."""

    task_prompts_file: Name | None = None
    """JSON file of such texts instead: an object, or a list of {"task_id", "prompt"}."""

    @property
    def drain_s(self) -> float:
        """Seconds that a stopping replica gives its running requests."""
        return self.drain_timeout_s or self.request_timeout_s or 120.0

    @model_validator(mode="after")
    def _check_waiting(self) -> Self:
        if self.wait_when_busy and self.max_concurrent_requests is None:
            raise conflict("wait_when_busy", "needs max_concurrent_requests")
        if self.task_prompts and self.task_prompts_file is not None:
            raise conflict("task_prompts_file", "task_prompts is set too; keep one of the two")
        return self
