"""Errors of Serve's handles: which mean that a replica died, and which error the client gets."""

from __future__ import annotations

import asyncio
import logging

from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    RayServeException,
    ReplicaUnavailableError,
)

from remora.configs.errors import (
    EngineError,
    QueueFull,
    RemoraError,
    RequestTimedOut,
    Unavailable,
)
from remora.deployments.gateway.relayed_request import AnswerTruncated, CannotContinue

log = logging.getLogger(__name__)

DIED = "The replica that worked on this request has died. Please try again."


def cause_of(error: BaseException) -> BaseException:
    """Return the error that a replica's method raised, without Ray's wrapper."""
    return error.cause if isinstance(error, RayTaskError) else error


def is_death(error: BaseException) -> bool:
    """Return whether a replica died, or its engine failed, while it worked on the request."""
    cause = cause_of(error)
    is_gone = isinstance(cause, RayActorError) and not isinstance(cause, ActorUnavailableError)
    return is_gone or isinstance(cause, EngineError)


def is_refusal(error: BaseException) -> bool:
    """Return whether a replica refused the request and another may take it."""
    refusals = (Unavailable, ReplicaUnavailableError, ActorUnavailableError)
    return isinstance(cause_of(error), refusals)


def client_error(error: BaseException) -> BaseException:
    """Return the error that the client gets for one that a handle raised."""
    cause = cause_of(error)
    if isinstance(cause, CannotContinue):
        return Unavailable(str(cause))
    if isinstance(cause, AnswerTruncated):
        return Unavailable("A replica's answer did not arrive completely. Please try again.")
    if isinstance(cause, RemoraError) and not isinstance(cause, EngineError):
        return cause
    if is_death(cause):
        return Unavailable(DIED)
    match cause:
        case BackPressureError():
            kind = QueueFull if cause.status_code == 429 else Unavailable
            message = "Too many requests wait for a replica. Please try again."
            return kind(message, cause.retry_after_s or 1.0)
        case DeploymentUnavailableError():
            return Unavailable("The model failed to start; the server's log says why.", 30.0)
        case TimeoutError():
            return RequestTimedOut("The request took too long.")
        case asyncio.CancelledError():
            return Unavailable("The request was cancelled. Please try again.")
        case RayServeException() | ActorUnavailableError():
            return Unavailable("No replica could answer. Please try again.")
        case RayError():
            log.error("gateway: Ray reports: %s", cause)
            return Unavailable("No replica could be reached. Please try again.")
    return cause
