"""Rules for the revision of a model of the hub, which is part of the model's name here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from remora.configs.dialects.rules import Means, Refusal, Settings, never
from remora.configs.model_names import HubModel, parse_model_name


def at(name: str, revision: str | None) -> str:
    """Return the name of a model of the hub at a revision. Raises Refusal."""
    if revision is None:
        return name
    model = parse_model_name(name)
    if not isinstance(model, HubModel) or Path(name).expanduser().exists():
        raise Refusal(f"{name} is no model of the hub: only OWNER/NAME has revisions")
    return model.at(revision).text


def named(key: str, revision: str) -> Means:
    """Return the rule of an argument with the name of what `key` is; `revision`: its revision's."""

    def read(value: str, given: Mapping[str, Any]) -> Settings:
        try:
            return {key: at(value, given.get(revision))}
        except Refusal:  # reported once, at the revision
            return {key: value}

    return Means(keys=(key,), reads=read)


def revision_of(key: str, *names: str) -> Means:
    """Return the rule of a revision; the first of the arguments `names` that is given is meant."""

    def read(value: str, given: Mapping[str, Any]) -> Settings:
        name = next((given[name] for name in names if given.get(name)), "the model")
        return {key: at(name, value)}

    return Means(keys=(key,), reads=read, writes=never)
