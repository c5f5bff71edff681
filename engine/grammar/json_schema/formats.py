"""The formats of JSON schema that are enforced, as patterns.

Both backends have formats of their own, which differ and accept wrong values; these patterns apply
to both. They are narrower than the standards where a pattern cannot express them: no 29th of
February, no leap seconds, no quoted or international mail addresses.
"""

from __future__ import annotations

_YEAR = "[0-9]{4}"
_DATE = (
    f"{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_CLOCK})"
_LABEL = "[A-Za-z0-9]{1,12}(?:-[A-Za-z0-9]{1,12}){0,2}"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,4}}"
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]{1,12}"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_GROUP = "[0-9A-Fa-f]{1,4}"
_URI_CHAR = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@/?-]|%[0-9A-Fa-f]{2})"
_NUMBER = "[0-9]{1,9}"
_CLOCK_SPAN = f"T(?:{_NUMBER}H(?:{_NUMBER}M)?(?:{_NUMBER}S)?|{_NUMBER}M(?:{_NUMBER}S)?|{_NUMBER}S)"
_DAY_SPAN = f"(?:{_NUMBER}Y(?:{_NUMBER}M(?:{_NUMBER}D)?)?|{_NUMBER}M(?:{_NUMBER}D)?|{_NUMBER}D)"

PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"(?:{_DATE})T(?:{_TIME})",
    "duration": f"P(?:{_DAY_SPAN}(?:{_CLOCK_SPAN})?|{_CLOCK_SPAN}|{_NUMBER}W)",
    "email": rf"{_ATOM}(?:\.{_ATOM}){{0,3}}@{_HOST}",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": (
        f"(?:(?:{_GROUP}:){{7}}{_GROUP}|::|(?:{_GROUP}:){{1,7}}:"
        f"|(?:{_GROUP}:){{1,3}}(?::{_GROUP}){{1,4}}|:(?::{_GROUP}){{1,7}})"
    ),
    "uuid": "[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}",
    "uri": rf"[A-Za-z][A-Za-z0-9+.-]{{1,15}}://{_HOST}(?::[0-9]{{1,4}})?(?:/{_URI_CHAR}*)?",
}

# Other formats of the standard are refused; names that the standard lacks are hints.
UNENFORCEABLE = frozenset(
    {
        "idn-email",
        "idn-hostname",
        "iri",
        "iri-reference",
        "json-pointer",
        "regex",
        "relative-json-pointer",
        "uri-reference",
        "uri-template",
    }
)
