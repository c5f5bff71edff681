"""Move keys that apply to all models of an application from the models to the application.

Other servers write them for each model. Knows which keys these are from `multiple_models.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from remora.configs.errors import ConfigError
from remora.configs.multiple_models import SHARED_KEYS
from remora.configs.validation_messages import shown


def shared(models: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the common args, and the args of each model without them.

    Raises ConfigError if models differ in a key that applies to all.
    """
    common: dict[str, Any] = {}
    own = [{section: dict(keys) for section, keys in model.items()} for model in models]
    for section, names in SHARED_KEYS.items():
        for model in own:
            keys = model.get(section, {})
            for name in [key for key in keys if not names or key in names]:
                value = keys.pop(name)
                first = common.setdefault(section, {}).setdefault(name, value)
                if first != value:
                    raise ConfigError(
                        f"{section}.{name}: models have {shown(first)} and {shown(value)}; it "
                        "applies to all models, so make them agree"
                    )
    return common, [{name: keys for name, keys in model.items() if keys} for model in own]
