"""The target of a benchmark: a model or a configuration, with settings from the command line.

Starts nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remora.configs.errors import ConfigError
from remora.configs.load import load_serve_file, parse_args
from remora.configs.multiple_models import split_models
from remora.configs.schema import ServeConfig
from remora.configs.serve_file import config_of_model, our_application
from remora.configs.value_sources import of_options, over


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One configuration.

    spec:    the text of the user, including settings
    raw:     a whole Serve config file as data, ready for `remora serve`
    config:  the validated args of remora's application
    """

    spec: str
    raw: dict[str, Any]
    config: ServeConfig

    @property
    def raw_args(self) -> dict[str, Any]:
        """The unvalidated `args` of remora's application."""
        args: dict[str, Any] = our_application(self.raw)["args"]
        return args


def read_target(name: str, settings: Sequence[str] = ()) -> Target:
    """Read a .yaml file or a model, and apply `section.key=value` settings. Raises ConfigError."""
    if name.endswith((".yaml", ".yml")):
        file = load_serve_file(Path(name))
        if len(file.models) > 1:
            raise ConfigError(
                f"{name}: serves several models ({', '.join(file.models)}), not one: "
                "use a file of one model, or start the server and use --url and --model"
            )
        raw = copy.deepcopy(file.raw)
    else:
        raw = config_of_model(name)
    application = our_application(raw)
    (args,) = split_models(application.get("args") or {})
    application["args"] = over(args, of_options(settings))
    config = parse_args(application["args"])
    return Target(spec=",".join([name, *settings]), raw=raw, config=config)


def split_spec(spec: str) -> tuple[str, list[str]]:
    """Split `configs/smollm2.yaml,engine.num_threads=2` into the name and its settings."""
    name, *settings = spec.split(",")
    return name, settings
