"""Connects a running engine to new ranks after it has lost the others.

Rank 0 keeps its weights, its memory for KV and its counters. All that was computed for requests is
dropped, because new ranks know none of it. Knows nothing of how ranks are started.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Self

from remora.configs.errors import EngineError
from remora.configs.facts import MachineFacts, ModelFacts
from remora.engine.engine import Engine
from remora.engine.parallel.followers import Followers
from remora.engine.parallel.layout import Layout
from remora.engine.parallel.rendezvous import Team
from remora.engine.runner.eager import EagerForward
from remora.engine.runner.runner import LocalRunner


@dataclass(frozen=True, slots=True)
class Renewal:
    """What rank 0 needs to meet new ranks.

    team:            starts them
    facts, machine:  of rank 0, which the ranks' are compared with
    forward:         of the weights that new ranks load
    """

    team: Team
    layout: Layout
    facts: ModelFacts
    machine: MachineFacts
    forward: weakref.ref[EagerForward]
    runner: LocalRunner
    engine: Engine

    @classmethod
    def of(
        cls,
        team: Team,
        layout: Layout,
        facts: ModelFacts,
        machine: MachineFacts,
        runner: LocalRunner,
        engine: Engine,
    ) -> Self | None:
        """Return the renewal of an engine, if its ranks can be replaced.

        On a GPU, captured graphs and nccl know the ranks that they began with.
        """
        forward = runner.forward_pass
        is_on_cpu = engine.plan.device == "cpu"
        if layout.num_ranks == 1 or not (is_on_cpu and isinstance(forward, EagerForward)):
            return None
        return cls(team, layout, facts, machine, weakref.ref(forward), runner, engine)

    def run(self) -> Followers:
        """Meet new ranks and begin without requests; return the ranks.

        On the engine's thread, after a step has failed or between two steps. Raises what the team
        raises, and EngineError after a change of weights; the engine must not step then.
        """
        team, plan, forward = self.team, self.engine.plan, self.forward()
        if forward is None or forward is not self.runner.forward_pass:
            raise EngineError("The weights were changed, and new ranks would load the first ones.")
        team.machine(self.machine, self.facts)
        team.load(plan)
        followers, group = team.gather(self.layout, plan.device)
        forward.rejoin(group)
        self.runner.rejoin(followers, group)
        team.ready()
        self.engine.restart()
        return followers
