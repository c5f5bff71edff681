"""Where the last decision of the policy can be read: in Ray's key-value store.

The policy decides in Serve's controller; who is asked is a replica or a gateway, which may be gone
the next moment. So the policy writes what it decided into the store of Ray's head node (a few
kilobytes for each deployment, overwritten every WRITE_PERIOD_S), and everybody reads it there. The
entry goes with the deployment; one that nobody renews says how old it is.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

NAMESPACE = b"remora-autoscaling"
WRITE_PERIOD_S = 2.0
OLD_S = 10.0
OLD_NOTE = (
    "Written some time ago. While there is no replica and a request waits, Serve starts the first "
    "one without asking the policy."
)


def publish(app: str, deployment: str, record: Mapping[str, Any]) -> None:
    """Write a record, in place of the former. Needs Ray."""
    from ray.experimental.internal_kv import _internal_kv_put

    _internal_kv_put(_key(app, deployment), json.dumps(record), namespace=NAMESPACE)


def retract(app: str, deployment: str) -> None:
    """Remove a deployment's record, if there is one. Needs Ray."""
    from ray.experimental.internal_kv import _internal_kv_del

    _internal_kv_del(_key(app, deployment), namespace=NAMESPACE)


def explain(app: str, deployment: str) -> dict[str, Any] | None:
    """Return the latest record of a deployment, None if there is none. Blocks; needs Ray."""
    from ray.experimental.internal_kv import _internal_kv_get

    found = _internal_kv_get(_key(app, deployment), namespace=NAMESPACE)
    if not found:
        return None
    record: dict[str, Any] = json.loads(found)
    age_s = max(time.time() - record["time"], 0.0)
    return {**record, "age_s": age_s, **({"note": OLD_NOTE} if age_s > OLD_S else {})}


def _key(app: str, deployment: str) -> bytes:
    return json.dumps([app, deployment]).encode()
