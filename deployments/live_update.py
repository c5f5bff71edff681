"""Changes of a running replica: what `user_config` says takes effect without a restart.

Serve calls with the `user_config` when a replica starts, and whenever it changes. If a replica that
runs raised then, Serve would stop it, and start others that fail in the same way; so there, what is
refused is logged and told by `/server_info`, and everything stays as it was. At the start it is
raised: nothing holds yet that could stay.
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


class InPlace:
    """What may change of a replica.

    args:    of the application; what `user_config` does not name is as it says there
    access:  who may do what
    """

    def __init__(self, args: Mapping[str, Any], server: ServerState, access: Access) -> None:
        self.access = access
        self._args = args
        self._served = server
        self._level = logging.getLogger("remora").level
        self._has_begun = False
        self._adopt(server.config)

    def take(self, user_config: Mapping[str, Any] | None) -> None:
        """Let `user_config` hold. Raises ConfigError at the start only."""
        before = self._served.config
        try:
            config = parse_args(self._args, user_config)
            access = Access.of(config.api, is_local=self.access.is_local)
        except ConfigError as error:
            if not self._has_begun:
                raise
            self._served.settings.refused = str(error)
            log.error("user_config was refused, all stays as it was:\n%s", error)
            return
        self._has_begun = True
        self.access = access
        self._adopt(config)
        if config != before:
            log.info("user_config holds now: %s", _difference(before, config))

    def _adopt(self, config: ServeConfig) -> None:
        self._served.adopt(config)
        self._served.tokenizer.limit_rendering(
            max_seconds=config.limits.template_timeout_s,
            max_chars=config.limits.max_template_chars,
        )
        logging.getLogger("remora").setLevel(config.metrics.log_level or self._level)
        limit_access_log(config.metrics.access_log_level)


def _difference(before: ServeConfig, after: ServeConfig) -> str:
    """Name the keys that differ, with their new values."""
    old, new = before.model_dump(), after.model_dump()
    return ", ".join(
        f"{section}.{key} = {value!r}"
        for section, keys in new.items()
        for key, value in keys.items()
        if value != old[section][key]
    )
