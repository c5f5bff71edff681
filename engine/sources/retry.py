"""Retries work that depends on a network and translates its errors.

File-system libraries raise any exception. Their messages are shown without secrets: values of
environment variables with names such as *_TOKEN, and passwords and queries in URLs.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from remora.configs.errors import RemoraError
from remora.engine.sources.faults import SourceFault, SourceOffline, SourceUnreachable

logger = logging.getLogger(__name__)

PAUSES_S = (0.5, 2.0)
_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
_MIN_SECRET_LEN = 6  # shorter values occur in ordinary text
_MAX_SHOWN = 300

T = TypeVar("T")


def retry(
    work: Callable[[], T], what: str, *, deadline: float, pauses_s: Sequence[float] = PAUSES_S
) -> T:
    """Return what `work` returns; call it again after each pause if it fails.

    what:      name of the work, for messages
    deadline:  no retry after this time of the monotonic clock
    Raises RemoraErrors and SourceFaults of `work`, SourceFault if permission is missing, and
    SourceUnreachable.
    """
    for pause_s in (*pauses_s, None):
        try:
            return work()
        except (RemoraError, SourceFault, SourceOffline):
            raise
        except PermissionError as error:
            raise SourceFault(
                f"{what}: permission denied ({scrubbed(error)}); the file system's own library "
                "reads its credentials where the server is started"
            ) from error
        except Exception as error:
            text = str(error) if isinstance(error, SourceUnreachable) else scrubbed(error)
            if pause_s is None or time.monotonic() + pause_s > deadline:
                raise SourceUnreachable(f"{what}: {text}") from error
            logger.info("%s: %s; retry in %.1f s", what, text, pause_s)
            time.sleep(pause_s)
    raise AssertionError("the last attempt returns or raises")


def scrubbed(error: BaseException) -> str:
    """Return an error's class and text on one line, without secrets, cut to _MAX_SHOWN."""
    text = " ".join(str(error).split())
    for name, value in os.environ.items():
        if _SECRET_NAME.search(name) and len(value) >= _MIN_SECRET_LEN:
            text = text.replace(value, "***")
    text = re.sub(r"(?<=://)[^/\s@]*:[^/\s@]*@", "***@", text)
    text = re.sub(r"\?[^\s'\")]*=[^\s'\")]*", "?***", text)
    return f"{type(error).__name__}: {text[:_MAX_SHOWN]}" if text else type(error).__name__
