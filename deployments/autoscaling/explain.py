"""The policy's last decision, kept in Ray's key-value store.

The policy runs in Serve's controller; `GET /autoscaling/explain` is answered by a replica or a
gateway. So the policy writes its decision (a few kilobytes for each deployment) to the store of
Ray's head node every WRITE_PERIOD_S, and every process reads it there. The record is deleted with
the deployment; each carries its time, so that an old one is recognised.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from remora.deployments.ray_private import kv_delete, kv_get, kv_put

NAMESPACE = b"remora-autoscaling"
WRITE_PERIOD_S = 2.0
OLD_S = 10.0
OLD_NOTE = (
    "This decision is not recent: while there is no replica and a request waits, Serve starts the "
    "first one without calling the policy."
)


def publish(app: str, deployment: str, record: Mapping[str, Any]) -> None:
    """Write a deployment's record, replacing the former one. Needs Ray."""
    kv_put(_key(app, deployment), json.dumps(record), namespace=NAMESPACE)


def retract(app: str, deployment: str) -> None:
    """Delete a deployment's record, if there is one. Needs Ray."""
    kv_delete(_key(app, deployment), namespace=NAMESPACE)


def explain(app: str, deployment: str) -> dict[str, Any] | None:
    """Return a deployment's latest record, None if there is none. Blocks; needs Ray."""
    found = kv_get(_key(app, deployment), namespace=NAMESPACE)
    if not found:
        return None
    record: dict[str, Any] = json.loads(found)
    age_s = max(time.time() - record["time"], 0.0)
    return {**record, "age_s": age_s, **({"note": OLD_NOTE} if age_s > OLD_S else {})}


def _key(app: str, deployment: str) -> bytes:
    return json.dumps([app, deployment]).encode()
