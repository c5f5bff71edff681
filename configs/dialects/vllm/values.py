"""Rules for vLLM's arguments whose values are not simply the value of a key.

`_of_x` reads a value, given all arguments; `_to_x` writes the value for settings. Arguments in JSON
are in `json_options.py`, those of speculation in `drafts.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from remora.configs.dialects import lora_entries
from remora.configs.dialects.rules import (
    UNSAID,
    Effect,
    Harmless,
    Means,
    Refusal,
    Sets,
    Settings,
)

# HTTP


def _of_keys(value: Sequence[str], given: Mapping[str, Any]) -> Settings:
    if len(value) == 1 and str(value[0]).startswith(("env:", "file:")):
        return {"api.api_key": value[0]}
    raise Refusal(
        "secrets must not be in a configuration; put the keys into a file, one on each line, and "
        "write file:/path, or one into a variable and write env:NAME"
    )


def _to_keys(settings: Settings) -> Any:
    key = settings.get("api.api_key")
    return [key] if key else UNSAID


KEYS = Means(keys=("api.api_key",), reads=_of_keys, writes=_to_keys)

_AUTHORITIES, _CERT_REQS = "--ssl-ca-certs", "--ssl-cert-reqs"
_AUTHORITIES_KEY = "http.ssl_ca_certs"
_NO_CERTIFICATE, _A_CERTIFICATE = 0, 2  # ssl.CERT_NONE, ssl.CERT_REQUIRED


def _of_authorities(value: str, given: Mapping[str, Any]) -> Harmless | Settings:
    if given.get(_CERT_REQS, _NO_CERTIFICATE) == _NO_CERTIFICATE:
        return Harmless(f"clients need no certificate without {_CERT_REQS} {_A_CERTIFICATE}")
    return {_AUTHORITIES_KEY: value}


def _of_client_certificates(value: int, given: Mapping[str, Any]) -> Harmless | Settings:
    if value == _NO_CERTIFICATE:
        return Harmless("clients need no certificate")
    if value != _A_CERTIFICATE:
        raise Refusal(f"a certificate is needed ({_A_CERTIFICATE}) or not ({_NO_CERTIFICATE})")
    if not given.get(_AUTHORITIES):
        raise Refusal(f"needs {_AUTHORITIES}: the authorities of the clients' certificates")
    return {_AUTHORITIES_KEY: given[_AUTHORITIES]}


def _to_client_certificates(settings: Settings) -> Any:
    return _A_CERTIFICATE if settings.get(_AUTHORITIES_KEY) else UNSAID


AUTHORITIES = Means(keys=(_AUTHORITIES_KEY,), reads=_of_authorities)
CLIENT_CERTIFICATES = Means(
    keys=(_AUTHORITIES_KEY,), reads=_of_client_certificates, writes=_to_client_certificates
)

_ORIGINS, _HEADERS, _CREDENTIALS = "--allowed-origins", "--allowed-headers", "--allow-credentials"
_METHODS = "--allowed-methods"


def _of_cors(value: Any, given: Mapping[str, Any]) -> Harmless | Settings:
    """Read all of CORS from each of its arguments: remora has one key."""
    if not given.get(_ORIGINS):
        return Harmless(f"it has no effect without {_ORIGINS}")
    if not all(isinstance(given.get(name) or [], list) for name in (_ORIGINS, _HEADERS, _METHODS)):
        raise Refusal('expected a list as JSON, such as ["https://chat.example.com"]')
    cors = {"origins": given[_ORIGINS]}
    if given.get(_HEADERS):
        cors["headers"] = given[_HEADERS]
    if "*" not in (given.get(_METHODS) or ["*"]):
        cors["methods"] = given[_METHODS]
    if given.get(_CREDENTIALS):
        cors["credentials"] = True
    return {"api.cors": cors}


def cors(part: str) -> Means:
    """Return the rule of an argument that is `part` of the key `api.cors`."""

    def write(settings: Settings) -> Any:
        found = settings.get("api.cors") or {}
        return found.get(part) or UNSAID

    return Means(keys=("api.cors",), reads=_of_cors, writes=write)


MAX_HEADER_BYTES = Means(
    keys=("limits.max_header_bytes",),
    reads=lambda value, given: {"limits.max_header_bytes": min(max(value, 1024), 65_536)},
    how="at least 1 KiB and at most 64 KiB",
)
ACCESS_LEVEL = "metrics.access_log_level"


def _of_access_level(value: str, given: Mapping[str, Any]) -> Effect | Harmless:
    if given.get("--disable-uvicorn-access-log"):
        return Harmless("--disable-uvicorn-access-log turns the log off")
    levels = {"critical": "ERROR", "trace": "DEBUG"}
    return Effect(
        {ACCESS_LEVEL: levels.get(value, value.upper())},
        "levels end at DEBUG and ERROR" if value in levels else "",
    )


def _to_access_level(settings: Settings) -> Any:
    level = settings.get(ACCESS_LEVEL)
    return level.lower() if level else UNSAID


ACCESS = Means(
    keys=(ACCESS_LEVEL,),
    reads=_of_access_level,
    writes=_to_access_level,
    how="of the access log; --log-level is that of the other logs",
)

# logs


def _of_log_requests(value: bool, given: Mapping[str, Any]) -> Settings:
    return {"metrics.log_requests": "sampling" if value else "none"}


def _to_log_requests(settings: Settings) -> Any:
    detail = settings.get("metrics.log_requests")
    return UNSAID if detail is None else detail != "none"


LOG_REQUESTS = Means(
    keys=("metrics.log_requests",),
    reads=_of_log_requests,
    writes=_to_log_requests,
    how="at the end of each request: names, counts, seconds and parameters, without prompts",
)


def _of_log_outputs(value: bool, given: Mapping[str, Any]) -> Settings:
    if value and not given.get("--enable-log-requests"):
        raise Refusal("it needs --enable-log-requests, as in vLLM")
    detail = "clipped" if given.get("--max-log-len") else "full"
    return {"metrics.log_responses": detail if value else "none"}


def _to_log_outputs(settings: Settings) -> Any:
    is_logged = settings.get("metrics.log_requests", "none") != "none"
    return True if is_logged and settings.get("metrics.log_responses", "none") != "none" else UNSAID


LOG_OUTPUTS = Means(keys=("metrics.log_responses",), reads=_of_log_outputs, writes=_to_log_outputs)


def _of_log_length(value: int, given: Mapping[str, Any]) -> Harmless | Settings:
    if not given.get("--enable-log-outputs"):
        return Harmless("no text is logged without --enable-log-outputs")
    return {"metrics.log_clip_chars": max(1, value)}


LOG_LENGTH = Means(
    keys=("metrics.log_clip_chars",),
    reads=_of_log_length,
    how="of outputs: prompts are not logged",
)


def _of_skipped(value: str, given: Mapping[str, Any]) -> Settings:
    paths = [path.strip() for path in value.split(",")]
    return {"metrics.access_log_skip": [path for path in paths if path]}


def _to_skipped(settings: Settings) -> Any:
    return ",".join(settings.get("metrics.access_log_skip") or ()) or UNSAID


SKIPPED_PATHS = Means(keys=("metrics.access_log_skip",), reads=_of_skipped, writes=_to_skipped)

_MODE, _TEXT = "--fingerprint-mode", "--fingerprint-value"
_FINGERPRINT = "api.system_fingerprint"


def _of_fingerprint(value: str, given: Mapping[str, Any]) -> Effect | Harmless:
    match given.get(_MODE, "full"):
        case "custom":
            if not given.get(_TEXT):
                return Harmless(f"it has no effect without {_TEXT}")
            return Effect({_FINGERPRINT: given[_TEXT]})
        case "none":
            return Effect({_FINGERPRINT: "none"})
    if value == given.get(_TEXT):
        return Harmless(f"it has no effect without {_MODE} custom")
    return Effect({_FINGERPRINT: "auto"}, "a hash")


def _to_mode(settings: Settings) -> Any:
    text = settings.get(_FINGERPRINT)
    return UNSAID if text is None else {"auto": "hash", "none": "none"}.get(text, "custom")


def _to_fingerprint(settings: Settings) -> Any:
    text = settings.get(_FINGERPRINT, "auto")
    return UNSAID if text in ("auto", "none") else text


FINGERPRINT_MODE = Means(
    keys=(_FINGERPRINT,), reads=_of_fingerprint, writes=_to_mode, how="full is a hash, too"
)
FINGERPRINT_TEXT = Means(keys=(_FINGERPRINT,), reads=_of_fingerprint, writes=_to_fingerprint)


def _of_no_stats(value: bool, given: Mapping[str, Any]) -> Settings:
    return {"metrics.log_stats_period_s": None if value else 10.0}


def _to_no_stats(settings: Settings) -> Any:
    key = "metrics.log_stats_period_s"
    return True if key in settings and settings[key] is None else UNSAID


NO_STATS = Means(
    keys=("metrics.log_stats_period_s",),
    reads=_of_no_stats,
    writes=_to_no_stats,
    how="the log line only; metrics are counted",
)
SHUTDOWN = Sets(
    key="api.drain_timeout_s",
    unset={0: "a stopping replica gives running requests api.drain_timeout_s to finish"},
    how="the requests of a replica that stops",
)

# LoRA


def _of_modules(value: Sequence[Any], given: Mapping[str, Any]) -> Effect:
    """Read name=path or JSON; the name of the base model is the served one."""
    entries: list[str] = []
    how = ""
    for entry in value:
        if not isinstance(entry, Mapping) and not str(entry).lstrip().startswith("{"):
            entries.append(str(entry))
            continue
        parsed = entry if isinstance(entry, Mapping) else lora_entries.parsed(entry)
        if {"base_model_name", "is_3d_lora_weight"} & parsed.keys():
            how = "base_model_name has no effect: there is one base model"
        path, name = parsed.get("path", ""), parsed.get("name", "")
        entries.append(f"{name}={path}")
    read = lora_entries.of_texts(entries, given)
    return Effect(read.settings, read.how or how)


MODULES = Means(
    keys=("lora.adapters", "lora.dynamic"), reads=_of_modules, writes=lora_entries.to_texts
)


def _of_lora(value: bool, given: Mapping[str, Any]) -> Settings:
    if not value and given.get("--lora-modules"):
        raise Refusal("--lora-modules lists adapters; remove one of the two")
    return {"lora.dynamic": value}


LORA = Means(
    keys=("lora.dynamic",),
    reads=_of_lora,
    how="also loading through the API, which vLLM allows by VLLM_ALLOW_RUNTIME_LORA_UPDATING",
)
