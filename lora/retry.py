"""Work that a network may fail: tried again after growing pauses, its errors in our words.

Libraries of file systems raise what they like. What they say is shown without what looks like a
secret: values of environment variables that are named so, and passwords and queries in addresses.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from remora.configs.errors import InvalidAdapter, RemoraError, Unavailable

logger = logging.getLogger(__name__)

PAUSES_S = (0.5, 2.0)
RETRY_AFTER_S = 5.0
_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
_MIN_SECRET_LEN = 6  # shorter values would be found in any text
_MAX_SHOWN = 300

T = TypeVar("T")


def tried(
    work: Callable[[], T], what: str, *, deadline: float, pauses_s: Sequence[float] = PAUSES_S
) -> T:
    """Return what `work` returns; called again after each pause if it fails.

    what:      is done, for messages
    deadline:  on the monotonic clock, after which nothing is tried again
    Raises what of ours `work` raises, InvalidAdapter where permission is missing, and Unavailable.
    """
    for pause_s in (*pauses_s, None):
        try:
            return work()
        except RemoraError:
            raise
        except PermissionError as error:
            raise InvalidAdapter(
                f"{what}: there is no permission ({scrubbed(error)}); the credentials are those of "
                "the file system's own library, where the server was started"
            ) from error
        except Exception as error:
            if pause_s is None or time.monotonic() + pause_s > deadline:
                raise Unavailable(f"{what}: {scrubbed(error)}", RETRY_AFTER_S) from error
            logger.info("%s: %s; trying again in %.1f s", what, scrubbed(error), pause_s)
            time.sleep(pause_s)
    raise AssertionError("the last try returns or raises")


def scrubbed(error: BaseException) -> str:
    """Return an error's kind and text without secrets, on one line, cut to a readable length."""
    text = " ".join(str(error).split())
    for name, value in os.environ.items():
        if _SECRET_NAME.search(name) and len(value) >= _MIN_SECRET_LEN:
            text = text.replace(value, "***")
    text = re.sub(r"(?<=://)[^/\s@]*:[^/\s@]*@", "***@", text)
    text = re.sub(r"\?[^\s'\")]*=[^\s'\")]*", "?***", text)
    return f"{type(error).__name__}: {text[:_MAX_SHOWN]}" if text else type(error).__name__
