"""`remora serve --local`: the server in this process, without Ray."""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping
from typing import Any

from remora.configs.errors import EngineError, RemoraError
from remora.deployments.cli.haproxy.choice import Proxy
from remora.deployments.cli.startup.address import bound, ready_line
from remora.deployments.cli.startup.progress import Progress
from remora.deployments.cli.terminal import Failure, answer, complain, detail
from remora.deployments.fast_import import fast_import
from remora.deployments.local.settings import LocalSettings

EXIT_DEAD = 1  # as a server on Ray that ended by itself


def serve_locally(raw: Mapping[str, Any], proxy: Proxy | None, *, is_verbose: bool) -> int:
    """Serve until a signal; return the exit code. Raises ConfigError, Failure before that."""
    started = time.monotonic()
    if proxy is not None:
        raise Failure(f"--local: --proxy {proxy} is a proxy of Ray Serve; remove it")
    settings = LocalSettings.of(raw)
    with bound(settings.host, settings.port) as listener:
        progress = Progress()
        has_begun = False

        def ready() -> None:
            nonlocal has_begun
            has_begun = True
            progress.close()
            port = listener.getsockname()[1]
            seconds, is_https = time.monotonic() - started, settings.tls is not None
            answer(ready_line(seconds, settings.host, port, is_https=is_https))

        try:
            with progress:
                progress.phase("importing the engine")
                with fast_import():
                    from remora.deployments.local.server import run_local
                progress.phase("loading the model")
                run_local(settings, listener, show=answer, ready=ready)
        except EngineError as error:
            if not has_begun:
                raise
            complain(f"the engine has failed: {error}")
            return EXIT_DEAD
        except (RemoraError, Failure):
            raise
        except Exception as error:  # a boundary: files of a model can break any library
            if is_verbose:
                detail(traceback.format_exc())
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise Failure(f"the server did not start: {reason}") from None
    return 0
