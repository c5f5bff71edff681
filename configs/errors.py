"""Every error that remora raises deliberately.

    RemoraError
      ConfigError            the configuration is wrong; names the key and the allowed values
      RequestError           the client's fault: a 4xx
        InvalidRequest         a field is missing, malformed, or not supported
          InvalidSampling        a sampling parameter is out of range
        PromptTooLong          prompt and output do not fit the context or the KV memory
        UnknownModel           no such model or adapter
        InvalidAdapter         an adapter's files are broken, or made for another model
          AdapterNotFound        there is nothing at the path or URL of an adapter
      CapacityError          try again later: 429 or 503, with retry_after_s
        QueueFull              the waiting queue has reached its limit
        RateLimited            a tenant has reached a limit of its own
        Unavailable            loading, draining or stopped
        RequestTimedOut        ran for longer than api.request_timeout_s: 504
      EngineError            the server's fault: a 500; the replica reports itself unhealthy
        StepTimeout            a step has run for longer than engine.step_timeout_s
        InvariantViolated      a bug in remora, found by a check
        NotFinite              a request's logits are NaN or infinite
        RankLost               another rank than 0 has failed; rank 0 is unharmed
        RequestCrashed         several replicas failed on this request; it must not be retried

Messages say what was found, what is allowed, and what to do. Every class keeps its arguments in
`args`, so that it survives pickling between Ray processes. `deployments/http/core/errors.py` maps
errors to HTTP.
"""

from __future__ import annotations


class RemoraError(Exception):
    """Base class. `limit` names the limit that was exceeded, for the counter of refusals."""

    limit: str | None = None


class ConfigError(RemoraError):
    """The configuration is wrong."""


class RequestError(RemoraError):
    """The client's fault. `param` names the field, `code` is a machine-readable reason."""

    default_code: str = "invalid_value"

    def __init__(
        self,
        message: str,
        param: str | None = None,
        code: str | None = None,
        *,
        limit: str | None = None,
    ) -> None:
        super().__init__(message, param, code)
        self.message = message
        self.param = param
        self.code = code or self.default_code
        self.limit = limit or type(self).limit

    def __str__(self) -> str:
        return self.message


class InvalidRequest(RequestError):
    """A field is missing, malformed, out of range or not supported."""


class InvalidSampling(InvalidRequest):
    """A sampling parameter is out of range."""


class PromptTooLong(RequestError):
    """Prompt and requested output do not fit the context or the KV memory.

    num_tokens, max_tokens:  of the prompt, and of a whole sequence; None = not known
    """

    default_code = "context_length_exceeded"
    limit = "context_length"

    def __init__(
        self,
        message: str,
        param: str | None = None,
        code: str | None = None,
        *,
        limit: str | None = None,
        num_tokens: int | None = None,
        max_tokens: int | None = None,
    ) -> None:
        super().__init__(message, param, code, limit=limit)
        self.num_tokens = num_tokens
        self.max_tokens = max_tokens


class UnknownModel(RequestError):
    """No model or adapter of this name is served."""

    default_code = "model_not_found"


class InvalidAdapter(RequestError):
    """An adapter's files are broken, not supported, or made for another model."""

    default_code = "invalid_adapter"


class AdapterNotFound(InvalidAdapter):
    """There is nothing at the path or URL of an adapter, or a file is missing there."""

    default_code = "adapter_not_found"


class CapacityError(RemoraError):
    """Try again in `retry_after_s` seconds."""

    def __init__(
        self, message: str, retry_after_s: float = 1.0, *, limit: str | None = None
    ) -> None:
        super().__init__(message, retry_after_s)
        self.message = message
        self.retry_after_s = retry_after_s
        self.limit = limit or type(self).limit

    def __str__(self) -> str:
        return self.message


class QueueFull(CapacityError):
    """The waiting queue has reached its limit."""

    limit = "max_queued_requests"


class RateLimited(CapacityError):
    """A tenant has reached a limit of its own."""


class Unavailable(CapacityError):
    """The engine is loading, draining or stopped."""


class RequestTimedOut(CapacityError):
    """The request ran for longer than `api.request_timeout_s` and was aborted."""

    limit = "request_timeout_s"


class EngineError(RemoraError):
    """The server's fault. The replica that raises it reports itself unhealthy."""


class StepTimeout(EngineError):
    """A step has run for longer than `engine.step_timeout_s`."""


class RankLost(EngineError):
    """Another rank than 0 has failed or hangs; rank 0 is unharmed.

    rank:  None = any of them may be the cause
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class InvariantViolated(EngineError):
    """A bug in remora, found by a check."""


class NotFinite(EngineError):
    """A request's logits are NaN or infinite. Other requests of its batch are not affected."""


class RequestCrashed(EngineError):
    """`routing.max_crashes` replicas failed on this request, and it is not retried."""
