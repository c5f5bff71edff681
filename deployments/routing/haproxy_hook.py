"""HAProxy asks which replica is to answer: Ray's private hook, which this module alone knows.

Of an application that has one, HAProxy asks a deployment beside the replicas before it connects to
one of them itself: `POST /internal/route`, with the body as far as it has it, and the answer names
the replica. Ray 2.60 calls that unstable. Where a later Ray lacks it, `missing` says so, and a
gateway does the work.

What HAProxy shows beyond what Ray lets it (the path and the client's headers) is put into the
question by `deployments/cli/haproxy_program.py`; so it asks only under `remora serve`, which says
so by SWITCH. Imports Ray late: the command line reads this before Ray may be imported.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from remora.deployments.routing.key import RouteKey

if TYPE_CHECKING:
    from ray.serve import Application
    from ray.serve.handle import DeploymentHandle

# Set to 1 in the environment of Ray: HAProxy asks, and shows what is needed.
SWITCH = "REMORA_HAPROXY_ASKS"
QUESTION = "/internal/route"
# The path that the client has asked for.
PATH_HEADER = "x-asked-path"
# Shown bytes and all bytes of a body, where they differ: `1048576/2000000`.
CUT_HEADER = "x-body-truncated"
# Of a longer body only the beginning is shown, which is no JSON.
SHOWN_BYTES = 2**20


def missing() -> str | None:
    """Return what is missing in this Ray for HAProxy to ask; None = nothing."""
    from ray.serve import Application
    from ray.serve.handle import DeploymentHandle

    hooks = ((Application, "_with_ingress_request_router"), (DeploymentHandle, "choose_replica"))
    names = [f"{kind.__name__}.{name}" for kind, name in hooks if not hasattr(kind, name)]
    return " and ".join(names) or None


def is_asked() -> bool:
    """Return whether HAProxy asks in this Ray, if there is somebody to be asked."""
    return os.environ.get(SWITCH) == "1" and missing() is None


def ask_first(application: Application, chooser: Application) -> Application:
    """Return an application of whose replicas HAProxy asks a chooser."""
    return application._with_ingress_request_router(chooser)


async def pick(handle: DeploymentHandle, key: RouteKey) -> str:
    """Let the router choose a replica; return the name by which HAProxy knows it.

    Waits while there is no replica. No room is kept there: the request comes by another way.
    """
    async with handle.choose_replica(route=key, _reserve=False) as selection:
        name: str = selection._replica.replica_id.to_full_id_str()
        return name


def answer(name: str) -> bytes:
    """Return the body that tells HAProxy the name of a replica."""
    return json.dumps({"replica_id": name}).encode()
