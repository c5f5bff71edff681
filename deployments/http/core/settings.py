"""Settings that may change while requests run; read them again for each request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from remora.configs.planning.plan import EnginePlan
from remora.configs.planning.pooling_plan import with_queue
from remora.configs.schema import ServeConfig


class Settings:
    """The configuration that holds now, and what follows from it.

    recommended:          the model's generation_config
    generation_defaults:  what holds for parameters that a request leaves out: the operator's word
                          before the model's
    refused:              why the latest change was not made; None: it was
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
        """Let another configuration hold. Only what may change in place may differ."""
        self.plan = with_queue(self.plan, config)
        self.refused = None
        self._hold(config)
