"""Ends a replica whose engine has failed, with or without a core file."""

from __future__ import annotations

import faulthandler
import logging
import os
import resource
from typing import NoReturn

log = logging.getLogger(__name__)


def allow_core_dumps() -> None:
    """Raise this process's core file limit to the system's, and print stacks on fatal signals."""
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    if hard == 0:
        log.warning("debug.core_dump: the system allows no core files (ulimit -Hc is 0)")
    faulthandler.enable(all_threads=True)


def end_process(*, dumps_core: bool) -> NoReturn:
    """End this process at once."""
    if dumps_core:
        os.abort()
    os._exit(1)
