"""Settings that may change while requests run; handlers read them again for each request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from remora.configs.planning.plan import EnginePlan
from remora.configs.planning.pooling_plan import with_queue
from remora.configs.schema import ServeConfig


class Settings:
    """The current configuration and the values derived from it.

    recommended:          the model's generation_config
    generation_defaults:  values of parameters that a request omits; the operator's values take
                          precedence over the model's
    refused:              reason why the latest change was refused; None = it was applied
    """

    def __init__(
        self, config: ServeConfig, plan: EnginePlan, recommended: Mapping[str, Any]
    ) -> None:
        self._recommended = recommended
        self.plan = plan
        self.refused: str | None = None
        self._hold(config)

    def _hold(self, config: ServeConfig) -> None:
        self.config = config
        given = config.sampling.model_dump(exclude_none=True)
        self.generation_defaults: Mapping[str, Any] = {**self._recommended, **given}

    def adopt(self, config: ServeConfig) -> None:
        """Replace the configuration. Only settings that may change in place may differ."""
        self.plan = with_queue(self.plan, config)
        self.refused = None
        self._hold(config)
