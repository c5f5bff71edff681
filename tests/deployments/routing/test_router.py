"""The policy as Serve runs it: Serve's own choosing over replicas that are not there."""

from __future__ import annotations

import asyncio
import struct
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
from pydantic import ValidationError
from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    ReplicaID,
    RequestMetadata,
)
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest

from remora.configs.errors import ConfigError
from remora.configs.sections.routing import RoutingSection
from remora.deployments.routing.key import RouteKey
from remora.deployments.routing.options import check_alone, routing_options
from remora.deployments.routing.report import Report
from remora.deployments.routing.router import RemoraRouter
from tests.deployments.fakes import make_server_config

HERE = DeploymentID(name="LLMServer")


@dataclass(eq=False)
class FakeReplica:
    """What Serve's router asks of a replica."""

    name: str
    num_ongoing: int = 0
    routing_stats: dict[str, Any] = field(default_factory=dict)
    max_ongoing_requests: int = 4

    @property
    def replica_id(self) -> ReplicaID:
        return ReplicaID(self.name, deployment_id=HERE)

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return self.num_ongoing


def make_router(*replicas: FakeReplica, policy: str = "shortest_queue", **routing: Any) -> Any:
    config = make_server_config(routing={"policy": policy, **routing})
    options = routing_options(config, behind_gateway=True)["request_router_config"]
    router = options.get_request_router_class()(
        deployment_id=HERE,
        handle_source=DeploymentHandleSource.REPLICA,
        use_replica_queue_len_cache=True,
        self_node_id="somewhere",
    )
    router.initialize_state(**options.request_router_kwargs)
    router.update_replicas(list(replicas))
    return router


def make_pending(name: str, *args: Any, **kwargs: Any) -> PendingRequest:
    metadata = RequestMetadata(request_id=name, internal_request_id=name)
    return PendingRequest(args=list(args), kwargs=kwargs, metadata=metadata)


def over_http(name: str, session: str = "") -> PendingRequest:
    """A request as Serve's proxy hands it on."""
    pending = make_pending(name, b"a pickled scope")
    pending.metadata.session_id = session
    return pending


async def choose(router: Any, pending: PendingRequest) -> str:
    replica = await asyncio.wait_for(router._choose_replica_for_request(pending), 10)
    return str(replica.name)


async def test_a_burst_is_spread_before_any_report_comes() -> None:
    router = make_router(FakeReplica("a"), FakeReplica("b"), FakeReplica("c"))
    key = RouteKey(num_tokens=100)

    chosen = await asyncio.gather(
        *(choose(router, make_pending(f"r{n}", route=key)) for n in range(9))
    )

    assert {chosen.count(name) for name in "abc"} == {3}


async def test_reports_decide_when_they_come() -> None:
    busy, idle = FakeReplica("busy"), FakeReplica("idle")
    router = make_router(busy, idle)
    busy.routing_stats = Report(made_at_s=1.0, num_queued_tokens=900).as_stats()
    idle.routing_stats = Report(made_at_s=1.0, num_queued_tokens=100).as_stats()
    router.update_replicas([busy, idle])

    chosen = [
        await choose(router, make_pending(f"r{n}", route=RouteKey(num_tokens=100)))
        for n in range(5)
    ]

    assert chosen == ["idle"] * 5


async def test_requests_that_ended_and_those_given_up_count_no_more() -> None:
    replicas = FakeReplica("a"), FakeReplica("b", num_ongoing=99)
    router = make_router(*replicas)
    pending = make_pending("r1", route=RouteKey(num_tokens=1000))
    await choose(router, pending)
    router.on_request_routed(pending, replicas[0].replica_id, None)
    router.on_request_completed(replicas[0].replica_id, "r1")
    replicas[0].num_ongoing = 99  # nobody has room
    router.on_new_queue_len_info(replicas[0].replica_id, 99)
    waiting = asyncio.create_task(choose(router, make_pending("r2", route=RouteKey())))
    await asyncio.sleep(0.05)
    waiting.cancel()
    await asyncio.sleep(0.05)

    assert [view.load for view in router._ledger.views("ab")] == [0, 0]


@pytest.mark.observes("routing.max_imbalance")
async def test_how_much_busier_the_holder_of_a_prefix_may_be_is_configured() -> None:
    async def chosen(**routing: float) -> str:
        pages = struct.pack("<2Q", 1, 2)
        busy = Report(made_at_s=1.0, num_queued_tokens=500, page_hashes=pages).as_stats()
        idle = Report(made_at_s=1.0, num_queued_tokens=100).as_stats()
        router = make_router(
            FakeReplica("holds", routing_stats=busy),
            FakeReplica("idle", routing_stats=idle),
            policy="prefix",
            **routing,
        )
        key = RouteKey(page_hashes=pages, num_tokens=32)
        return await choose(router, make_pending("r1", route=key))

    assert await chosen() == "idle"
    assert await chosen(max_imbalance=10.0) == "holds"


async def test_a_full_replica_is_passed_over_for_the_next_in_order() -> None:
    pages = struct.pack("<2Q", 1, 2)
    stats = Report(made_at_s=1.0, page_hashes=pages).as_stats()
    full, free = FakeReplica("full", num_ongoing=4, routing_stats=stats), FakeReplica("free")
    router = make_router(full, free, policy="prefix")
    pending = make_pending("r1", route=RouteKey(page_hashes=pages, num_tokens=32))

    assert await choose(router, pending) == "free"
    router.on_request_routed(pending, free.replica_id, None)
    assert [view.num_requests for view in router._ledger.views(["full", "free"])] == [0, 1]


async def test_an_adapter_is_followed_to_where_it_was_loaded_and_where_it_is() -> None:
    replicas = FakeReplica("a"), FakeReplica("b"), FakeReplica("c")
    router = make_router(*replicas, policy="lora")
    key = RouteKey(adapter="x", num_tokens=100)
    home = await choose(router, make_pending("r1", route=key))

    assert await choose(router, make_pending("r2", route=key)) == home
    away = next(replica for replica in replicas if replica.name != home)
    router.update_replicas([replica for replica in replicas if replica.name != home])
    away.routing_stats = Report(made_at_s=1.0, adapters=("x",)).as_stats()
    router.update_replicas(list(replicas))
    assert await choose(router, make_pending("r3", route=key)) == away.name


async def test_at_serves_proxy_a_header_names_the_session() -> None:
    router = make_router(*map(FakeReplica, "abc"), policy="session")

    async def answer(name: str, session: str) -> str:
        chosen = await choose(router, over_http(name, session))
        router.on_request_completed(ReplicaID(chosen, deployment_id=HERE), name)
        return chosen

    by_session = {
        session: {await answer(f"{session}-{n}", session) for n in range(4)}
        for session in map(str, range(9))
    }

    assert all(len(chosen) == 1 for chosen in by_session.values())
    assert len(set.union(*by_session.values())) > 1


async def test_a_request_of_unknown_length_counts_as_a_prompt() -> None:
    router = make_router(FakeReplica("a"), FakeReplica("b"))

    first = await choose(router, over_http("r1"))
    route = RouteKey(num_tokens=10)
    others = {await choose(router, make_pending(f"short-{n}", route=route)) for n in range(5)}

    assert others == {"a", "b"} - {first}


async def test_a_request_waits_for_a_replica_to_come() -> None:
    router = make_router()
    waiting = asyncio.create_task(choose(router, make_pending("r1", route=RouteKey())))
    await asyncio.sleep(0.05)
    assert not waiting.done()

    router.update_replicas([FakeReplica("a")])

    assert await waiting == "a"


def test_without_a_gateway_serves_own_router_does_power_of_two() -> None:
    assert routing_options(make_server_config()) == {}


def test_the_router_is_found_by_its_name_in_a_config_file() -> None:
    config = make_server_config(routing={"policy": "session", "stats_period_s": 2.0})

    options = routing_options(config)["request_router_config"]

    path = f"{RemoraRouter.__module__}.{RemoraRouter.__name__}"
    assert options.request_router_class == path
    assert options.request_routing_stats_period_s == 2.0
    assert RequestRouterConfig(request_router_class=path).request_router_class == path


@pytest.mark.parametrize(
    ("routing", "has_haproxy", "is_possible"),
    [
        ({}, True, True),
        ({"policy": "round_robin", "gateway": "off"}, False, True),
        ({"policy": "round_robin", "gateway": "off"}, True, False),
        ({"policy": "session", "gateway": "off"}, False, True),
        ({"policy": "session", "gateway": "off"}, True, False),
        ({"policy": "session", "session_header": "x-chat"}, False, False),
        ({"policy": "prefix"}, False, False),
        ({"policy": "lora"}, False, False),
    ],
)
def test_a_policy_that_needs_a_gateway_is_refused_without_one(
    routing: dict[str, Any], has_haproxy: bool, is_possible: bool
) -> None:
    refusal = nullcontext() if is_possible else pytest.raises(ConfigError, match=r"routing\.")

    with refusal:
        check_alone(make_server_config(routing=routing), has_haproxy=has_haproxy)


@pytest.mark.parametrize(
    ("policy", "needs_body"), [("session", False), ("prefix", True), ("lora", True)]
)
def test_a_policy_that_reads_bodies_needs_a_gateway(policy: str, needs_body: bool) -> None:
    refusal = pytest.raises(ValidationError, match=policy) if needs_body else nullcontext()
    with refusal:
        RoutingSection.model_validate({"policy": policy, "gateway": "off"})
