"""HAProxy's routing hook: HAProxy asks the routing service for a replica before it connects.

For each POST to an application with a routing service, HAProxy sends `POST /internal/route` there,
with as much of the body as it has, and the response names a replica. Ray 2.60 calls the hook
unstable. Where a later Ray lacks it, requests pass through a gateway instead.

`cli/haproxy/program.py` adds the path and the client's headers to that request, which policies
need; it runs only under `remora serve`, which sets HOOK_SWITCH.
"""

from __future__ import annotations

import json
import os

from remora.deployments.ray_private import missing_routing_hook

# 1 in Ray's environment: HAProxy sends what the routing service needs.
HOOK_SWITCH = "REMORA_HAPROXY_ASKS"
ROUTE_PATH = "/internal/route"
# Request header: the path of the client's request.
PATH_HEADER = "x-asked-path"
# Request header, of a body that was cut off: bytes sent and bytes in all, `1048576/2000000`.
TRUNCATED_HEADER = "x-body-truncated"
# HAProxy sends no more of a body; a longer one does not parse as JSON and is routed by load.
MAX_BODY_BYTES = 2**20


def haproxy_asks() -> bool:
    """Return whether HAProxy would ask a routing service, if the application has one."""
    return os.environ.get(HOOK_SWITCH) == "1" and missing_routing_hook() is None


def route_response(replica: str) -> bytes:
    """Return the response body that names a replica to HAProxy."""
    return json.dumps({"replica_id": replica}).encode()
