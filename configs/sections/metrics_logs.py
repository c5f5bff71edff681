"""What is logged: keys of the section `metrics`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from remora.configs.fields import Name, Seconds, Section

Level = Literal["DEBUG", "INFO", "WARNING", "ERROR"]


class LogKeys(Section):
    """Logs."""

    log_level: Level | None = None
    """Least important of our lines in a replica's log. Default: that of Serve's logging_config."""

    log_config: Name | None = None
    """Python logging configuration that a replica reads at its start: a dictConfig as JSON or YAML,
    or an .ini file. Loggers are called remora.*. Default: our lines go where Serve's go."""

    access_log_level: Level | None = None
    """Level of the access log, whatever log_level is: its lines, one for each HTTP request, are
    INFO. WARNING and ERROR leave them out. Default: as Serve's logging_config says."""

    log_requests: Literal["none", "metadata", "sampling", "clipped", "full"] = "none"
    """What of each request is logged at its end: metadata = names, numbers of tokens, seconds;
    sampling = its parameters too; clipped = also the first 256 characters of prompt and answer;
    full = all of them."""

    log_responses: Literal["none", "clipped", "full"] = "none"
    """How much of each answer is logged, whatever log_requests says."""

    log_request_times: bool = False
    """Whether the seconds that each request spent in queue, prefill and decoding are logged."""

    log_stats_period_s: Seconds | None = 10.0
    """Seconds between two lines about throughput; none while nothing happens. null = no lines."""

    log_step_interval: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    """Decode steps between two lines about what runs. Default: no lines."""

    log_gc_s: Seconds | None = None
    """Seconds from which a garbage collection of Python's is warned about. Default: never."""
