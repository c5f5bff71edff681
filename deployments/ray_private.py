"""Every private name of Ray and Ray Serve that remora uses; no other module uses one.

Based on Ray 2.60. A later Ray may rename these without notice, so a test compares each with the
installed Ray (`tests/deployments/test_ray_private.py`): run it first after an update of Ray. The
environment variables that remora sets for Serve are in `serve_environment.py` and
`cli/haproxy/choice.py`, the edits of Serve's HAProxy files in `cli/haproxy/program.py`; the same
test covers both.

| private name | used for |
|---|---|
| `ray._private.worker.global_worker`: `actors`, `actor_id`, `connected` | this actor |
| `_replica_impl`, `_shutting_down` of a replica's actor | noticing that Serve stops this replica |
| `ray.serve.context._get_global_client`: `http_config.host` | the address that Serve listens on |
| `ray.serve.context._get_global_client`: `deploy_apps` | deploying a whole config file |
| `ray.serve.delete(_blocking=False)` | stopping applications without Serve's time limit |
| `ray.serve.context._get_global_client`: `get_serve_details` | the drain timeouts of deployments |
| `ray.serve._private.constants`: `SERVE_CONTROLLER_NAME`, `SERVE_NAMESPACE` | the controller |
| the programs `gcs_server` and `raylet`, children of a process that calls `ray.init` | their end |
| `ray._private.worker._global_node`: `get_logs_dir_path` | naming Ray's logs in an error |
| `ray._private.utils.read_ray_address` | the cluster that `ray.init` would join |
| the GCS method `NodeInfoGcsService/CheckAlive` | whether a cluster requires a token |
| `ray.serve._private.constants`: `SERVE_SESSION_ID` | the header that names a session |
| `ray.serve._private.constants`: `RAY_SERVE_ENABLE_HA_PROXY` | whether HAProxy is the proxy |
| `serve_access_log` of a log record | telling access lines from other log lines |
| `ray.experimental.internal_kv`: `_internal_kv_put`, `_get`, `_del` | autoscaling decisions |
| `Application._with_ingress_request_router` | HAProxy asks the routing service (since 2.60) |
| `DeploymentHandle.choose_replica(_reserve=False)`, `ReplicaSelection._replica` | its answer |
| `_call_generator_async`, a function in Serve's replica | `handle.options(stream=True)` |
| `PendingRequest.metadata`: `internal_request_id`, `session_id` | requests in the router's ledger |
| `PendingRequest.routing_context`: `should_backoff` | pauses while all replicas are full |

Imports Ray only inside functions: the command line imports this module before Ray may be imported.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ray.serve import Application
    from ray.serve.handle import DeploymentHandle
    from ray.serve.request_router import PendingRequest
    from ray.serve.schema import ServeDeploySchema

    from remora.deployments.routing.key import RouteKey

log = logging.getLogger(__name__)

STREAMED_CALL = "_call_generator_async"
_MAX_CALL_FRAMES = 8
CHECK_ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"
_PROBE_S = 2.0


# -- this process's replica ------------------------------------------------------------------------


def shutdown_check() -> Callable[[], bool] | None:
    """Return a function that says whether Serve is stopping this process's replica.

    None outside a replica, and, with a warning, in a Ray that does not mark the replica.
    """
    import ray

    worker = ray._private.worker.global_worker
    actor = worker.actors.get(worker.actor_id) if worker.connected else None
    replica = getattr(actor, "_replica_impl", None)
    if replica is None or not hasattr(replica, "_shutting_down"):
        if actor is not None:
            log.warning(
                "drain: this version of Ray does not mark a replica that is being stopped; "
                "long streams may end without an error event"
            )
        return None
    return lambda: bool(replica._shutting_down)


def is_streamed_call() -> bool:
    """Return whether the running method was called by `handle.options(stream=True)`.

    Serve then awaits the method in a function of this name, and expects a generator from it. It
    tells the method nothing.
    """
    frame = sys._getframe(1)
    for _ in range(_MAX_CALL_FRAMES):
        if frame.f_back is None:
            return False
        frame = frame.f_back
        if frame.f_code.co_name == STREAMED_CALL:
            return True
    return False


def is_access_line(record: logging.LogRecord) -> bool:
    """Return whether Serve wrote a log record about a single request."""
    return bool(getattr(record, "serve_access_log", False))


# -- Serve as a whole ------------------------------------------------------------------------------


def http_host() -> str:
    """Return the address that the running Serve listens on."""
    from ray.serve.context import _get_global_client

    return str(_get_global_client().http_config.host)


def deploy(config: ServeDeploySchema) -> None:
    """Deploy a config file on the running Serve without waiting for its applications."""
    from ray.serve.context import _get_global_client

    _get_global_client().deploy_apps(config)


def start_deleting(application: str) -> None:
    """Start to delete an application without waiting for its end."""
    from ray import serve

    serve.delete(application, _blocking=False)


def longest_drain_s() -> float:
    """Return the longest time that Serve gives a replica of any deployment to stop."""
    from ray.serve.context import _get_global_client

    applications = _get_global_client().get_serve_details()["applications"].values()
    configs = [
        deployment["deployment_config"]
        for application in applications
        for deployment in application["deployments"].values()
    ]
    return max((float(config["graceful_shutdown_timeout_s"]) for config in configs), default=0.0)


def has_controller() -> bool:
    """Return whether Serve's controller runs or is being restarted. May block without a GCS."""
    import ray
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    try:
        ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    except ValueError:
        return False
    return True


def session_header() -> str:
    """Return the header that names a session when Serve's own proxy routes."""
    from ray.serve._private import constants

    return str(constants.SERVE_SESSION_ID)


def uses_haproxy() -> bool:
    """Return whether Serve runs HAProxy instead of its Python proxy."""
    from ray.serve._private import constants

    return bool(constants.RAY_SERVE_ENABLE_HA_PROXY)


# -- Ray's own processes ---------------------------------------------------------------------------


def cluster_pids() -> dict[str, int]:
    """Return the pids of the processes that Ray's cluster fails without, below this process."""
    import psutil  # type: ignore[import-untyped]

    names = {"gcs_server": "Ray's GCS", "raylet": "Ray's raylet"}
    found = {}
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if child.name() in names:
                found[names[child.name()]] = child.pid
    return found


def ray_logs() -> str | None:
    """Return the folder of the logs of the Ray that this process started; None if it has none."""
    import ray

    node = ray._private.worker._global_node
    return None if node is None else str(node.get_logs_dir_path())


def last_started_cluster() -> str | None:
    """Return the address of the cluster that `ray start` has started on this machine, if any."""
    from ray._private.utils import read_ray_address

    address: str | None = read_ray_address(None)
    return address


def requires_token(address: str) -> bool:
    """Return whether the cluster at an address refuses calls without a token."""
    import grpc

    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary(CHECK_ALIVE)(b"", timeout=_PROBE_S)
        except grpc.RpcError as error:
            return bool(error.code() is grpc.StatusCode.UNAUTHENTICATED)
    return False


# -- the key-value store of Ray's head node --------------------------------------------------------


def kv_put(key: bytes, value: str, *, namespace: bytes) -> None:
    """Write a value, replacing any existing one."""
    from ray.experimental.internal_kv import _internal_kv_put

    _internal_kv_put(key, value, namespace=namespace)


def kv_get(key: bytes, *, namespace: bytes) -> bytes | None:
    """Return a value, or None if there is none."""
    from ray.experimental.internal_kv import _internal_kv_get

    value: bytes | None = _internal_kv_get(key, namespace=namespace)
    return value


def kv_delete(key: bytes, *, namespace: bytes) -> None:
    """Delete a value if it exists."""
    from ray.experimental.internal_kv import _internal_kv_del

    _internal_kv_del(key, namespace=namespace)


# -- HAProxy's routing hook ------------------------------------------------------------------------


def missing_routing_hook() -> str | None:
    """Return the names of HAProxy's routing hook that this Ray lacks; None if it has all."""
    from ray.serve import Application
    from ray.serve.handle import DeploymentHandle

    hooks = ((Application, "_with_ingress_request_router"), (DeploymentHandle, "choose_replica"))
    names = [f"{kind.__name__}.{name}" for kind, name in hooks if not hasattr(kind, name)]
    return " and ".join(names) or None


def with_routing_service(application: Application, routing_service: Application) -> Application:
    """Return an application in which a routing service chooses the replica for HAProxy."""
    return application._with_ingress_request_router(routing_service)


async def choose_replica(handle: DeploymentHandle, key: RouteKey) -> str:
    """Let a handle's router choose a replica; return its name in HAProxy.

    Waits while there is no replica. Reserves no capacity on it: the request arrives through
    HAProxy.
    """
    async with handle.choose_replica(route=key, _reserve=False) as selection:
        name: str = selection._replica.replica_id.to_full_id_str()
        return name


# -- a request in a router -------------------------------------------------------------------------


def request_id_of(pending: PendingRequest) -> str:
    """Return Serve's own id of a request, which `on_request_completed` also receives."""
    return str(pending.metadata.internal_request_id)


def session_of(pending: PendingRequest) -> str | None:
    """Return the session from the session header that Serve's proxy read; None if there is none."""
    return pending.metadata.session_id or None


def back_off(pending: PendingRequest) -> None:
    """Make Serve pause before it chooses replicas again; otherwise it retries in a busy loop."""
    pending.routing_context.should_backoff = True
