"""The servers that are disturbed, and what each fault of a process may cost.

The models are tiny and random: what is tested is everything around them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.deployments.lifecycle.server import make_serve_config
from tests.endurance.oracle import Reach
from tests.endurance.traffic import Ask, embedding_asks, generation_asks, of_adapters, tool_asks
from tests.lora.adapters import make_adapter
from tests.tiny_encoders import make_tiny_encoder
from tests.tiny_models import make_tiny_checkpoint

ADAPTERS = ("pirate", "sailor")
GUEST = "guest"  # an adapter that comes and goes
# A rank that hangs is given up after this time, and pauses shorter than half of it end nothing.
HANG_S = 4.0


@dataclass(frozen=True, slots=True)
class Target:
    """A kind of process (`processes.KINDS`) and which requests may end with one of them."""

    kind: str
    reach: Reach


REPLICA = Target("replica", Reach.VICTIM)
GATEWAY = Target("gateway", Reach.ALL)
SERVE_PROXY, HAPROXY = Target("serve proxy", Reach.ALL), Target("haproxy", Reach.ALL)
FALLBACK_PROXY = Target("serve proxy", Reach.NOTHING)
CONTROLLER = Target("controller", Reach.NOTHING)
ROUTING_SERVICE = Target("routing service", Reach.NOTHING)
MANAGER = Target("manager", Reach.NOTHING)
# Any rank ends its replica, and all of them are of one replica where there are several.
ONLY_REPLICA, RANK = Target("replica", Reach.ALL), Target("rank", Reach.ALL)


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Folders of the models.

    generator:  with 6 query and 3 KV heads, so that it can be divided between three ranks
    """

    generator: Path
    embedder: Path
    adapters: Path

    @classmethod
    def make(cls, folder: Path) -> Checkpoints:
        """Write them all."""
        generator = make_tiny_checkpoint(
            folder / "generator", "llama", max_position_embeddings=8192, num_key_value_heads=3
        )
        make_tiny_encoder(folder / "embedder", "bert")
        for seed, name in enumerate((*ADAPTERS, GUEST)):
            target = folder / "adapters" / name
            make_adapter(generator, target, seed=seed, r=4, target_modules="all-linear")
        return cls(generator, folder / "embedder", folder / "adapters")

    def adapter(self, name: str) -> Path:
        return self.adapters / name


@dataclass(frozen=True, slots=True)
class Topology:
    """A server, its requests, and its faults.

    args:          sections of its configuration
    targets:       what faults choose from; one that is named twice is chosen twice as often
    proxy:         `--proxy` of the server
    num_tokens:    of the longest streams
    is_resumed:    whether `routing.resume_on_failure` is on
    has_adapters:  whether it serves ADAPTERS, and GUEST at times
    """

    name: str
    args: Callable[[Checkpoints], dict[str, Any]]
    targets: Sequence[Target]
    proxy: str = "haproxy"
    num_tokens: int = 600
    is_resumed: bool = False
    has_adapters: bool = False

    def config(self, checkpoints: Checkpoints) -> dict[str, Any]:
        """Return the Serve config, on a free port."""
        sections = {"metrics": {"log_requests": "metadata"}, **self.args(checkpoints)}
        engine = {"step_timeout_s": HANG_S}
        config = make_serve_config(checkpoints.generator, engine=engine, **sections)
        args = config["applications"][0]["args"]
        if "models" in args:
            del args["model"]
        return config

    def asks(self) -> list[Ask]:
        """Return the requests with known answers."""
        asks = generation_asks(self.num_tokens)
        if self.has_adapters:
            some = [*asks[:2], asks[4]]
            base = "m:" if self.name == "soak" else ""  # adapters behind a gateway
            asks += of_adapters(some, [base + name for name in ADAPTERS])
            guests = of_adapters(some, [base + GUEST])
            asks += [replace(ask, may_be_missing=True) for ask in guests]
        if self.name in ("gateway", "soak"):
            asks += embedding_asks("e")
        if self.name == "soak":
            asks += tool_asks()
        return asks


def _models(checkpoints: Checkpoints, **sections: Any) -> list[dict[str, Any]]:
    generator = {"path": str(checkpoints.generator), "served_name": "m", "dtype": "float32"}
    embedder = {"path": str(checkpoints.embedder), "served_name": "e", "dtype": "float32"}
    return [{"model": generator, **sections}, {"model": embedder}]


def _dynamic_lora(checkpoints: Checkpoints) -> dict[str, Any]:
    return {"dynamic": True, "roots": [str(checkpoints.adapters)]}


def _three(_: Checkpoints) -> dict[str, Any]:
    return {"parallel": {"num_replicas": 3}, "routing": {"policy": "shortest_queue"}}


def _gateway(checkpoints: Checkpoints) -> dict[str, Any]:
    two = {"num_replicas": 2, "cpus_per_rank": 0.1}
    # Repeated requests would be blamed for the crashes of replicas.
    routing = {"resume_on_failure": True, "max_crashes": 100}
    return {"models": _models(checkpoints, parallel=two, routing=routing)}


def _ranks(_: Checkpoints) -> dict[str, Any]:
    return {"parallel": {"tp_size": 3, "rank_timeout_s": HANG_S}}


def _lora(checkpoints: Checkpoints) -> dict[str, Any]:
    return {"lora": _dynamic_lora(checkpoints), "parallel": {"num_replicas": 2}}


def _soak(checkpoints: Checkpoints) -> dict[str, Any]:
    ranks = {"tp_size": 3, "cpus_per_rank": 0.1}
    sections = {"parallel": ranks, "lora": _dynamic_lora(checkpoints)}
    return {"models": _models(checkpoints, **sections), "api": {"tool_parser": "hermes"}}


TOPOLOGIES: Mapping[str, Topology] = {
    topology.name: topology
    for topology in (
        Topology("one", lambda _: {}, (ONLY_REPLICA, SERVE_PROXY, CONTROLLER), proxy="python"),
        Topology("three", _three, (REPLICA, ROUTING_SERVICE, HAPROXY, FALLBACK_PROXY, CONTROLLER)),
        Topology(
            "gateway", _gateway, (REPLICA, REPLICA, GATEWAY, HAPROXY, CONTROLLER), is_resumed=True
        ),
        Topology("ranks", _ranks, (ONLY_REPLICA, RANK, RANK, HAPROXY, CONTROLLER), num_tokens=150),
        Topology("lora", _lora, (REPLICA, MANAGER, MANAGER, CONTROLLER), has_adapters=True),
        Topology("soak", _soak, (), num_tokens=80, has_adapters=True),
    )
}
