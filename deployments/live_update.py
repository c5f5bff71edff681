"""Live updates of a running replica through `user_config`, without a restart.

Serve passes the `user_config` when a replica starts and whenever it changes. An exception of a
running replica would make Serve replace it by replicas that fail too. So an invalid update of a
running replica is logged, reported by `/server_info`, and otherwise ignored; at the start, it
raises.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from remora.configs.errors import ConfigError
from remora.configs.load import parse_args
from remora.configs.schema import ServeConfig
from remora.deployments.http.core.auth import Access
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.serve_context import limit_access_log

log = logging.getLogger(__name__)


class LiveSettings:
    """The settings of a replica that may change while it runs.

    args:    of the application: defaults for keys that `user_config` does not set
    access:  the current API keys and permissions
    """

    def __init__(self, args: Mapping[str, Any], server: ServerState, access: Access) -> None:
        self.access = access
        self._args = args
        self._server = server
        self._level = logging.getLogger("remora").level
        self._has_started = False
        self._adopt(server.config)

    def apply(self, user_config: Mapping[str, Any] | None) -> None:
        """Apply `user_config`. Raises ConfigError only at the start."""
        before = self._server.config
        try:
            config = parse_args(self._args, user_config)
            access = Access.of(config, is_local=self.access.is_local)
        except ConfigError as error:
            if not self._has_started:
                raise
            self._server.settings.refused = str(error)
            log.error("live update: user_config is invalid and was ignored:\n%s", error)
            return
        self._has_started = True
        self.access = access
        self._adopt(config)
        if config != before:
            log.info("live update: applied %s", _difference(before, config))

    def _adopt(self, config: ServeConfig) -> None:
        self._server.adopt(config)
        self._server.tokenizer.limit_rendering(
            max_seconds=config.limits.template_timeout_s,
            max_chars=config.limits.max_template_chars,
        )
        logging.getLogger("remora").setLevel(config.metrics.log_level or self._level)
        limit_access_log(config.metrics.access_log_level, config.metrics.access_log_skip)


def _difference(before: ServeConfig, after: ServeConfig) -> str:
    """Return the keys that differ, with their new values."""
    old, new = before.model_dump(), after.model_dump()
    return ", ".join(
        f"{section}.{key} = {value!r}"
        for section, keys in new.items()
        for key, value in keys.items()
        if value != old[section][key]
    )
