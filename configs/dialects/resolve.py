"""Translate the `args` of an application from another server's parameters to remora's keys.

    args:
      dialect: sglang
      args: {model-path: /models/llama, tp: 2}
      engine: {kv_memory: 20GiB}     # remora's own sections override the parameters

Entries of `models` may have this form too. A profile's values have the lowest precedence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from remora.configs.dialects.all import DIALECTS
from remora.configs.dialects.catalogue import SYSTEMS, System
from remora.configs.dialects.common_keys import shared
from remora.configs.dialects.dialect import Dialect, Flat
from remora.configs.dialects.faults import Faults
from remora.configs.dialects.translate import ParameterReport, translate
from remora.configs.errors import ConfigError
from remora.configs.profiles import PROFILES
from remora.configs.validation_messages import KeyPath, Locate, nearest, shown
from remora.configs.value_sources import over_sections

DIALECT, ARGS, MODELS, PROFILE = "dialect", "args", "models", "profile"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """Args in remora's keys.

    http:     host and port for Serve's http_options
    lines:    one report for each parameter
    origins:  path of a key -> path of the parameter or profile that set it
    """

    args: dict[str, Any]
    http: dict[str, Any] = field(default_factory=dict)
    lines: tuple[ParameterReport, ...] = ()
    origins: Mapping[KeyPath, KeyPath] = field(default_factory=dict)


def nowhere(_path: KeyPath, _at_key: bool) -> str:
    """Locate for args that are not from a file."""
    return ""


def resolve(
    args: Mapping[str, Any],
    locate: Locate = nowhere,
    prefix: KeyPath = (),
    faults: Faults | None = None,
) -> Resolved:
    """Return `args` in remora's keys. Raises ConfigError with one line per fault.

    prefix:  path of `args`, for `locate` and `origins`
    faults:  gathers the faults instead of raising them
    """
    gathered = faults if faults is not None else Faults()
    entries = args.get(MODELS)
    found = [
        _gathered(entry, locate, (*prefix, MODELS, index), gathered)
        if isinstance(entry, Mapping)
        else Resolved(args=entry)
        for index, entry in enumerate(entries if isinstance(entries, list) else ())
    ]
    common = _gathered(args, locate, prefix, gathered)
    if faults is None:
        gathered.check()
    if not isinstance(entries, list):
        return common
    return Resolved(
        args={**common.args, MODELS: [one.args for one in found]},
        http={key: value for one in (*found, common) for key, value in one.http.items()},
        lines=tuple(line for one in (common, *found) for line in one.lines),
        origins={key: path for one in (common, *found) for key, path in one.origins.items()},
    )


def _gathered(args: Mapping[str, Any], locate: Locate, prefix: KeyPath, faults: Faults) -> Resolved:
    found = [Resolved(args={})]
    with faults.gathering():
        found.append(_resolve_one(args, locate, prefix, faults))
    return found[-1]


def _resolve_one(
    args: Mapping[str, Any], locate: Locate, prefix: KeyPath, faults: Faults
) -> Resolved:
    if PROFILE in args:
        return _on_profile(args, locate, prefix, faults)
    if DIALECT not in args:
        return Resolved(args=dict(args))
    name = args[DIALECT]
    if name not in SYSTEMS:
        near = nearest(str(name), list(SYSTEMS))
        hint = f"; did you mean {near}?" if near is not None else ""
        raise ConfigError(
            f"{locate((*prefix, DIALECT), False)}dialect = {shown(name)}: must be one of "
            f"{', '.join(SYSTEMS)}{hint}"
        )
    data = args.get(ARGS)
    if not isinstance(data, Mapping):
        raise ConfigError(
            f"{locate((*prefix, ARGS), False)}args = {shown(data)}: expected a mapping of "
            f"{name}'s parameters to values"
        )
    dialect = DIALECTS[cast("System", name)]
    own = {key: value for key, value in args.items() if key not in (DIALECT, ARGS)}
    models = dialect.models(data)
    found = [
        _translated(
            dialect, written, own, locate, prefix, index if len(models) > 1 else None, faults
        )
        for index, written in enumerate(models)
    ]
    if len(found) == 1:
        return found[0]
    common, several = shared([one.args for one in found])
    return Resolved(
        args={**over_sections(common, own), MODELS: several},
        lines=tuple(line for one in found for line in one.lines),
        origins={key: path for one in found for key, path in one.origins.items()},
    )


def _translated(
    dialect: Dialect,
    written: Flat,
    own: Mapping[str, Any],
    locate: Locate,
    prefix: KeyPath,
    index: int | None,
    faults: Faults,
) -> Resolved:
    """Translate the parameters of a model; `own` sections override them.

    index:  of the model, if there are several
    """
    paths: dict[str, KeyPath] = {
        each: (*prefix, ARGS, *path) for each, (path, _) in written.items()
    }
    meant = translate(
        dialect,
        {each: value for each, (_, value) in written.items()},
        lambda each: locate(paths[each], True),
        faults,
    )
    place = prefix if index is None else (*prefix, MODELS, index)
    origins = {
        (*place, *key.split(".", 1)): paths[each]
        for key, each in meant.origins.items()
        if not _holds(own, *key.split(".", 1))
    }
    settings = over_sections(meant.args, own) if index is None else meant.args
    return Resolved(args=settings, http=meant.http, lines=meant.lines, origins=origins)


def _on_profile(
    args: Mapping[str, Any], locate: Locate, prefix: KeyPath, faults: Faults
) -> Resolved:
    """Return args with a profile: the profile's values, overridden by the rest."""
    name = args[PROFILE]
    text = name if isinstance(name, str) else ""
    if text not in PROFILES:
        raise ConfigError(
            f"{locate((*prefix, PROFILE), False)}profile = {shown(name)}: must be one of "
            f"{', '.join(PROFILES)}"
        )
    above = _resolve_one({k: v for k, v in args.items() if k != PROFILE}, locate, prefix, faults)
    below = {
        (*prefix, section, key): (*prefix, PROFILE)
        for section, values in PROFILES[name].items()
        for key in values
        if not _holds(above.args, section, key)
    }
    return replace(
        above, args=over_sections(PROFILES[name], above.args), origins={**below, **above.origins}
    )


def _holds(args: Mapping[str, Any], section: str, key: str) -> bool:
    below = args.get(section)
    return isinstance(below, Mapping) and key in below
