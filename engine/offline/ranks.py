"""The other ranks of an LLM, as processes of this machine; Ray is not needed.

Each rank on a GPU sees one device only. Knows nothing of adapters.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import torch

from remora.configs.errors import ConfigError, EngineError
from remora.configs.facts import MachineFacts, ModelFacts
from remora.configs.planning.plan import EnginePlan
from remora.configs.schema import ServeConfig
from remora.engine.parallel.followers import Followers
from remora.engine.parallel.group import Group
from remora.engine.parallel.layout import Layout
from remora.engine.parallel.rendezvous import Host, Meeting, NoTeam

COMMAND = (sys.executable, "-P", "-m", "remora.engine.offline.rank")
END_S = 5.0  # until a rank that does not end is killed


def team_of(config: ServeConfig) -> ProcessTeam | NoTeam:
    """Return the ranks that a configuration asks for. Raises ConfigError."""
    parallel = config.parallel
    if parallel.num_ranks == 1:
        return NoTeam()
    if parallel.num_nodes != 1:
        raise ConfigError(
            f"parallel.num_nodes is {parallel.num_nodes}: LLM starts its ranks on this machine; "
            "serve a model on several nodes with `remora serve`"
        )
    return ProcessTeam(config)


@dataclass(eq=False, slots=True)
class ProcessTeam:
    """Team over processes."""

    config: ServeConfig
    _ranks: list[_Rank] = field(default_factory=list)
    _host: Host | None = None
    _failure: EngineError | None = None

    def machine(self, own: MachineFacts, model: ModelFacts) -> MachineFacts:
        """Return `own`: all ranks are on this machine."""
        return own

    def load(self, plan: EnginePlan) -> None:
        """Start the processes. Raises ConfigError."""
        devices = _devices(plan)
        self._host = Host(
            None,
            come_s=self.config.parallel.join_timeout_s,
            exchange_s=plan.step_timeout_s,
            port=self.config.parallel.rendezvous_port,
        )
        for number in range(1, plan.num_ranks):
            rank = _Rank(number, devices[number])
            self._ranks.append(rank)
            threading.Thread(
                target=self._watch_start, args=(rank, plan, self._host.meeting), daemon=True
            ).start()

    def gather(self, layout: Layout, device: str) -> tuple[Followers, Group]:
        """Wait for the ranks to join. Raises a rank's error."""
        assert self._host is not None
        try:
            return self._host.gather(layout, device)
        except EngineError as error:
            raise self._failure or error from None
        finally:
            self._host.close()

    def ready(self) -> None:
        """Wait until the ranks can step. Raises a rank's error."""
        timeout_s = self.config.parallel.join_timeout_s
        for number, rank in enumerate(self._ranks, 1):
            has_answered = rank.answered.wait(timeout_s)
            if self._failure is not None:
                raise self._failure
            if not has_answered:
                raise EngineError(
                    f"Rank {number} was not ready within {timeout_s:g} s (parallel.join_timeout_s)."
                )

    def close(self) -> None:
        """End the processes and wait for them."""
        if self._host is not None:
            self._host.close()
        for rank in self._ranks:
            rank.close()

    def _watch_start(self, rank: _Rank, plan: EnginePlan, meeting: Meeting) -> None:
        try:
            rank.load(plan, meeting)
        except EngineError as error:
            self._failure = self._failure or error
            assert self._host is not None
            self._host.close()
        finally:
            rank.answered.set()


class _Rank:
    """The process of a rank.

    answered:  set when it can step, or failed to start
    is_ready:  whether it can step
    """

    def __init__(self, number: int, device: str | None) -> None:
        self.answered = threading.Event()
        self.is_ready = False
        self._number = number
        ours, theirs = socket.socketpair()
        env = dict(os.environ) if device is None else os.environ | {"CUDA_VISIBLE_DEVICES": device}
        with theirs:
            # A group of its own: Ctrl-C interrupts rank 0, which can then go on with this rank.
            self._process = subprocess.Popen(
                COMMAND, stdin=theirs.fileno(), env=env, process_group=0
            )
        self._connection = Connection(ours.detach())

    def load(self, plan: EnginePlan, meeting: Meeting) -> None:
        """Load the share and join. Raises EngineError."""
        try:
            self._connection.send((plan, self._number, meeting))
            reason = self._connection.recv()
        except (EOFError, OSError):
            code = self._process.wait()
            raise EngineError(
                f"Rank {self._number} ended with code {code} before it was ready."
            ) from None
        if reason is not None:
            raise EngineError(f"Rank {self._number} has failed: {reason}")
        self.is_ready = True

    def close(self) -> None:
        """End the process; one that follows ends by itself when rank 0 has closed its channel."""
        if self.is_ready:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
        self._process.kill()
        self._process.wait()
        self._connection.close()


def _devices(plan: EnginePlan) -> list[str | None]:
    """Return the device that each rank sees; None = as this process. Raises ConfigError."""
    if plan.device != "cuda":
        return [None] * plan.num_ranks
    count = torch.cuda.device_count()
    if count < plan.num_ranks:
        raise ConfigError(
            f"parallel.tp_size * parallel.pp_size is {plan.num_ranks}; this process sees {count} "
            "GPUs, and each rank needs one"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(number) for number in range(count)]
    return list(names)
