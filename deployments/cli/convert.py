"""Conversion of configurations between servers, for `remora config convert`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import yaml

from remora.configs.dialects.all import DIALECTS
from remora.configs.dialects.catalogue import SYSTEMS, System
from remora.configs.dialects.convert import convert, settings_of, written
from remora.configs.multiple_models import MODELS
from remora.configs.serve_file import our_application
from remora.configs.validation_messages import shown
from remora.deployments.cli.target import read_target
from remora.deployments.cli.terminal import Failure

OURS = "remora"


def converted(
    target: Sequence[str], source: str, to: str, *, skips: bool = False
) -> tuple[str, list[str]]:
    """Return a configuration as text for server `to`, and notes on what has no equivalent.

    skips:  whether parameters of the source that are refused are left out, with a note
    Raises ConfigError, Failure.
    """
    for option, name in (("--from", source), ("--to", to)):
        if name not in (OURS, *SYSTEMS):
            raise Failure(f"{option} {name}: must be one of {', '.join((OURS, *SYSTEMS))}")
    read = read_target(target, None if source == OURS else source, (), skips=skips)
    raw, notes = read.raw, [str(line) for line in read.lines]
    if to == OURS:
        return yaml.safe_dump(raw, sort_keys=False).rstrip(), notes
    args: dict[str, Any] = our_application(raw)["args"]
    if MODELS in args:
        raise Failure(
            f"the configuration serves several models at one address; {to} serves one: "
            "convert one model at a time"
        )
    http = {f"http.{key}": value for key, value in raw.get("http_options", {}).items()}
    dialect = DIALECTS[cast("System", to)]
    result = convert(dialect, settings_of(args) | http)
    notes += [
        f"{key} = {shown(ours)}: {dialect.title} "
        + ("has no equivalent" if theirs is None else f"uses {shown(theirs)} instead")
        for key, (ours, theirs) in result.lost.items()
    ]
    return written(dialect, result.values), notes
