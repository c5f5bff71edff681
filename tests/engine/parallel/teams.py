"""Ranks without Ray: the followers of a replica as threads of this process."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from remora.configs.facts import MachineFacts, ModelFacts
from remora.configs.planning.plan import EnginePlan
from remora.engine.launch import build_follower
from remora.engine.parallel.follower import Follower
from remora.engine.parallel.followers import Followers
from remora.engine.parallel.group import Group
from remora.engine.parallel.layout import Layout
from remora.engine.parallel.rendezvous import Host
from remora.engine.protocols import NO_ADAPTERS, Adapting


@dataclass
class ThreadTeam:
    """Team whose ranks are threads; `errors` holds what they raised.

    members:  the ranks that follow, or have followed, by rank; `load` begins new ones
    """

    address: str | None = None
    adapting: Adapting = NO_ADAPTERS
    threads: list[threading.Thread] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    members: dict[int, Follower] = field(default_factory=dict)

    def machine(self, own: MachineFacts, model: ModelFacts) -> MachineFacts:
        return own

    def load(self, plan: EnginePlan) -> None:
        self.host = Host(self.address, come_s=30.0, exchange_s=30.0)
        self.begun = [threading.Event() for _ in range(1, plan.num_ranks)]
        for rank, begun in enumerate(self.begun, start=1):
            thread = threading.Thread(target=self.follow, args=(plan, rank, begun))
            thread.start()
            self.threads.append(thread)

    def follow(self, plan: EnginePlan, rank: int, begun: threading.Event) -> None:
        try:
            member = build_follower(plan, rank, self.host.meeting, adapting=self.adapting)
            self.members[rank] = member
            begun.set()
            member.run()
        except BaseException as error:
            self.errors.append(error)
            begun.set()

    def gather(self, layout: Layout, device: str) -> tuple[Followers, Group]:
        try:
            return self.host.gather(layout, device)
        finally:
            self.host.close()

    def ready(self) -> None:
        for begun in self.begun:
            assert begun.wait(30.0)

    def join(self) -> None:
        for thread in self.threads:
            thread.join(20.0)
            assert not thread.is_alive()
