"""Every private name of Ray that remora uses, compared with the installed Ray.

Run this first after an update of Ray. Where it fails, read the name's replacement in Ray's source,
change `deployments/ray_private.py` (or the module that the failure names), and correct the table
in its opening.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.serve.handle
from ray import serve
from ray._private import ray_constants, utils
from ray.core.generated import gcs_service_pb2_grpc
from ray.experimental import internal_kv
from ray.serve._private import constants, http_util, replica
from ray.serve._private.client import ServeControllerClient
from ray.serve._private.common import DeploymentID, ReplicaID, RequestMetadata
from ray.serve._private.request_router.common import RequestRoutingContext
from ray.serve._private.request_router.replica_wrapper import ReplicaSelection
from ray.serve._private.router import AsyncioRouter
from ray.serve.config import HTTPOptions
from ray.serve.context import _get_global_client
from ray.serve.request_router import PendingRequest, RequestRouter

from remora.deployments import ray_private
from remora.deployments.cli.haproxy.choice import HAPROXY_SWITCH, haproxy_environment
from remora.deployments.cli.haproxy.program import ADD_HEADERS, CONFIG_EDITS, NO_ROUTE, Edit
from remora.deployments.http.core.serve_headers import RULES
from remora.deployments.routing.haproxy_hook import (
    HOOK_SWITCH,
    ROUTE_PATH,
    TRUNCATED_HEADER,
    route_response,
)
from remora.deployments.routing.router import RemoraRouter
from remora.deployments.serve_environment import ENVIRONMENT, WITHOUT_TRACEBACKS
from tests.deployments.serve_files import haproxy_config, routing_script

READ_IN = "2.60"
ADVICE = (
    f"Ray {ray.__version__} differs from {READ_IN}, for which remora was written: {{}}. "
    "Correct deployments/ray_private.py and the table in its opening."
)
SERVE = Path(serve.__file__).parent


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        (_get_global_client, ()),
        (ServeControllerClient.deploy_apps, ("config",)),
        (serve.delete, ("name", "_blocking")),
        (utils.read_ray_address, ("temp_dir",)),
        (internal_kv._internal_kv_put, ("key", "value", "namespace")),
        (internal_kv._internal_kv_get, ("key", "namespace")),
        (internal_kv._internal_kv_del, ("key", "namespace")),
        (serve.Application._with_ingress_request_router, ("ingress_request_router",)),
        (serve.handle.DeploymentHandle.choose_replica, ("kwargs",)),
        (RequestRouter.choose_replicas, ("candidate_replicas", "pending_request")),
        (RequestRouter.on_request_routed, ("pending_request", "replica_id", "result")),
        (RequestRouter.on_request_completed, ("replica_id", "internal_request_id")),
        (RequestRouter.update_replicas, ("replicas",)),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_a_function_takes_the_arguments_that_we_pass(
    function: Callable[..., Any], parameters: tuple[str, ...]
) -> None:
    found = inspect.signature(function).parameters

    assert set(parameters) <= found.keys(), ADVICE.format(f"{function.__qualname__}{(*found,)}")


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (PendingRequest, ("kwargs", "metadata", "routing_context", "future")),
        (RequestMetadata, ("internal_request_id", "session_id")),
        (RequestRoutingContext, ("should_backoff",)),
        (ReplicaSelection, ("_replica",)),
    ],
)
def test_a_record_has_the_fields_that_we_read(kind: Any, fields: tuple[str, ...]) -> None:
    found = {field.name for field in dataclasses.fields(kind)}

    assert set(fields) <= found, ADVICE.format(f"{kind.__name__} has {sorted(found)}")


@pytest.mark.parametrize(
    ("owner", "text"),
    [
        (ray._private.worker.Worker, "self.actors ="),
        (replica, f"async def {ray_private.STREAMED_CALL}("),
        (gcs_service_pb2_grpc.NodeInfoGcsServiceStub, ray_private.CHECK_ALIVE),
        (ray._private.worker.Worker, "def actor_id("),
        (ray._private.worker.Worker, "def connected("),
        (replica, "self._replica_impl: Replica ="),
        (replica, "self._shutting_down = True"),
        (ServeControllerClient, "def http_config("),
        (AsyncioRouter, '.pop("_reserve", '),
        (RequestRouter, "self.queue_len_response_deadline_s"),
        (HTTPOptions, "host:"),
        (constants, '"serve_access_log"'),
        (constants, "SERVE_SESSION_ID ="),
        (constants, f'RAY_SERVE_ENABLE_HA_PROXY = os.environ.get("{HAPROXY_SWITCH}"'),
        (replica, "SERVE_BUILD_ASGI_APP_METHOD"),
    ],
)
def test_an_attribute_is_set_where_we_read_it(owner: Any, text: str) -> None:
    assert text in inspect.getsource(owner), ADVICE.format(f"no {text!r} in {owner.__name__}")


def test_serve_reads_the_environment_that_we_set() -> None:
    names = {*haproxy_environment(Path("/x")), *ENVIRONMENT, HAPROXY_SWITCH} - {HOOK_SWITCH}
    sources = "".join(path.read_text() for path in SERVE.rglob("*.py"))
    unread = sorted(name for name in names if "SERVE" in name and f'"{name}"' not in sources)

    assert unread == [], (
        "Serve reads these no more; see cli/haproxy/choice.py, serve_environment.py"
    )


def test_ray_reads_which_lines_terminals_do_not_get() -> None:
    (name,) = WITHOUT_TRACEBACKS

    assert f'os.environ.get("{name}")' in inspect.getsource(ray_constants), ADVICE.format(name)


def test_serve_reads_the_headers_that_are_checked_before_it() -> None:
    read = {
        constants.SERVE_HTTP_REQUEST_ID_HEADER,
        constants.SERVE_MULTIPLEXED_MODEL_ID,
        http_util.SERVE_HTTP_REQUEST_TIMEOUT_S_HEADER,
        http_util.SERVE_HTTP_REQUEST_DISCONNECT_DISABLED_HEADER,
        "traceparent",
    }

    assert read == RULES.keys(), "see http/core/serve_headers.py"


def test_ray_reads_the_priority_of_its_workers() -> None:
    raylet = Path(ray.__file__).parent / "core/src/ray/raylet/raylet"
    (name,) = (name for name in ENVIRONMENT if name.startswith("RAY_worker"))

    assert name.encode() in raylet.read_bytes(), "see serve_environment.py"


@pytest.mark.parametrize("edit", [*CONFIG_EDITS, NO_ROUTE, ADD_HEADERS], ids=lambda e: e.expected)
def test_serve_writes_the_text_that_we_edit(edit: Edit) -> None:
    text = routing_script() if edit is ADD_HEADERS else haproxy_config()

    assert re.search(edit.expected, text), f"{edit.otherwise} See cli/haproxy/program.py."


def test_the_routing_script_speaks_as_the_routing_service_does() -> None:
    script = routing_script()
    replica_id = ReplicaID("abc", deployment_id=DeploymentID(name="LLMServer", app_name="app"))
    (pattern,) = re.findall(r"json_body:match\('(\"replica_id\".*)'\)", script)
    found = re.search(
        pattern.replace("%s", r"\s"), route_response(replica_id.to_full_id_str()).decode()
    )

    assert f"POST {ROUTE_PATH} " in script
    assert f"{TRUNCATED_HEADER}: " in script.lower()
    assert found is not None
    assert found[1] == replica_id.to_full_id_str()


def test_access_lines_and_others_are_told_apart() -> None:
    record = logging.makeLogRecord({})
    assert not ray_private.is_access_line(record)
    record.serve_access_log = True
    assert ray_private.is_access_line(record)


def test_values_that_serve_reads_at_its_import_have_their_defaults() -> None:
    assert issubclass(RemoraRouter, RequestRouter)
    assert ray_private.session_header() == constants.SERVE_SESSION_ID
    assert ray_private.uses_haproxy() is constants.RAY_SERVE_ENABLE_HA_PROXY
    assert ray_private.missing_routing_hook() is None
    assert ray_private.shutdown_check() is None
