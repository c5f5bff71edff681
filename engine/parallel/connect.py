"""Joins ranks by torch.distributed.

Process groups are objects around a store that one rank hosts. Nothing is registered globally, so
threads of one process may be ranks, and one rank may be in several groups.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from remora.configs.errors import EngineError
from remora.engine.parallel.group import ALONE, Group
from remora.engine.parallel.layout import Layout

logger = logging.getLogger(__name__)

BACKLOG = 1024
SOURCE_PLACE = re.compile(r"^\[\S+:\d+\] ")  # gloo's messages begin with a source line
# On CPUs a rank sends up to so many bytes directly to the others, which is faster than gloo's ring
# for the few tokens of a decode step (tests/benchmarks/ranks/sums.py).
EXCHANGE_BYTES = 2**18
MESSAGES, SUMS = 0, 1  # tags
LOOK_S = 0.02
c10d: Any = torch.distributed  # torch's annotations lack its stores and options


def listen(host: str, port: int = 0) -> socket.socket:
    """Return a listening socket for the ranks, on that address only; port 0 = any free port."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family, backlog=BACKLOG)


def connect(
    layout: Layout,
    *,
    host: str,
    port: int,
    listener: socket.socket | None,
    device: str,
    timeout_s: float,
    key: str = "",
    is_lost: Callable[[], bool] = lambda: False,
) -> Group:
    """Join the other ranks in one group. All ranks call it at about the same time.

    host, port:  of the store
    listener:    the socket at that address, at the rank that hosts the store, which takes it over
    device:      of the tensors to exchange: cpu (gloo) or cuda (nccl)
    timeout_s:   of joining, and of every exchange afterwards
    key:         known only to ranks of this group
    is_lost:     polled while waiting: whether another rank is known to be gone
    Raises EngineError when a rank does not join.
    """
    if layout.num_ranks == 1:
        return ALONE
    logger.info("rank %d of %d joins at %s:%d", layout.rank, layout.num_ranks, host, port)
    with _as_engine_error(layout, f"did not meet the others at {host}:{port}"):
        number = -1 if listener is None else listener.fileno()
        store = _open_store(host, port, listener, timedelta(seconds=timeout_s))
        _meet(layout, c10d.PrefixStore(f"meet {key}", store), timeout_s, is_lost)
        address = host if listener is not None else _address_towards(host, port)
        group = RankGroup(layout, c10d.PrefixStore(key, store), address, device, timeout_s)
        if number >= 0 and device == "cpu":  # nccl uses the store again in its first exchanges
            _stop_listening(number)
        return group


class RankGroup:
    """Group over two process groups: all ranks, and the ranks of this stage.

    A rank leaves the group when an exchange fails, because others may wait for its data.
    """

    def __init__(
        self, layout: Layout, store: Any, address: str, device: str, timeout_s: float
    ) -> None:
        """Join through a store, at this rank's own address; see `connect`."""
        self.layout = layout
        timeout = timedelta(seconds=timeout_s)

        def join(name: str, rank: int, size: int) -> Any:
            named = c10d.PrefixStore(name, store)
            make = _make_gloo if device == "cpu" else _make_nccl
            return make(named, rank, size, timeout, address)

        self._all: Any = join("all", layout.rank, layout.num_ranks)
        self._stage: Any = None
        if layout.pp_size == 1:
            self._stage = self._all
        elif layout.tp_size > 1:
            self._stage = join(f"stage {layout.stage}", layout.tp_rank, layout.tp_size)
        self.store: Any = store
        self._exchanges = device == "cpu"

    def all_reduce(self, values: Tensor) -> Tensor:
        """Sum over the ranks of this stage, in place; returns `values`."""
        if self.layout.tp_size == 1:
            return values
        dense = values.contiguous()  # the groups need contiguous memory
        stage = self._present(self._stage)
        with self._exchange_or_leave("could not sum with the other ranks"):
            if self._exchanges and dense.nbytes * (self.layout.tp_size - 1) <= EXCHANGE_BYTES:
                self._exchange(stage, dense)
            else:
                stage.allreduce([dense]).wait()
        return values if dense is values else values.copy_(dense)

    def _exchange(self, stage: Any, values: Tensor) -> None:
        """Sum in one exchange. All ranks add in the same order and get the same bits."""
        own = self.layout.tp_rank
        others = [rank for rank in range(self.layout.tp_size) if rank != own]
        parts = [torch.empty_like(values) for _ in range(self.layout.tp_size)]
        parts[own] = values
        under_way = [stage.recv([parts[rank]], rank, SUMS) for rank in others]
        under_way += [stage.send([values], rank, SUMS) for rank in others]
        for work in under_way:
            work.wait()
        values.copy_(torch.stack(parts).sum(0))

    def send(self, values: Tensor, to: int) -> None:
        """Send to a rank, which must be receiving the same shape and dtype."""
        with self._exchange_or_leave(f"could not send to rank {to}"):
            self._present(self._all).send([values.contiguous()], to, MESSAGES).wait()

    def receive(self, values: Tensor, source: int) -> Tensor:
        """Overwrite `values` with what a rank sends; returns `values`."""
        dense = values.contiguous()
        with self._exchange_or_leave(f"could not receive from rank {source}"):
            self._present(self._all).recv([dense], source, MESSAGES).wait()
        return values if dense is values else values.copy_(dense)

    def broadcast(self, values: Tensor) -> Tensor:
        """Overwrite `values` with rank 0's, on all ranks of the replica; returns `values`."""
        dense = values.contiguous()
        with self._exchange_or_leave("could not receive from rank 0"):
            self._present(self._all).broadcast(dense, 0).wait()
        return values if dense is values else values.copy_(dense)

    def close(self) -> None:
        """Leave the group; the others notice at once.

        A call of another thread ends at its timeout or when the rank that it waits for leaves;
        connections close after it.
        """
        for group in {self._all, self._stage} - {None}:
            group.abort()
        self._all = self._stage = self.store = None

    @contextmanager
    def _exchange_or_leave(self, what: str) -> Iterator[None]:
        try:
            with _as_engine_error(self.layout, what):
                yield
        except EngineError:
            self.close()
            raise

    def _present(self, group: Any) -> Any:
        if group is None:
            raise EngineError(f"rank {self.layout.rank} has left its group")
        return group


def _open_store(host: str, port: int, listener: socket.socket | None, timeout: timedelta) -> Any:
    """Open the store at one address; by default torch would listen on every interface."""
    listening = {} if listener is None else {"master_listen_fd": listener.detach()}
    return c10d.TCPStore(
        host,
        port,
        is_master=listener is not None,
        timeout=timeout,
        wait_for_workers=False,
        **listening,
    )


def _meet(layout: Layout, store: Any, timeout_s: float, is_lost: Callable[[], bool]) -> None:
    """Wait for every rank to register."""
    store.set(f"here {layout.rank}", "")
    keys = [f"here {rank}" for rank in range(layout.num_ranks)]
    deadline = time.monotonic() + timeout_s
    while not store.check(keys):
        missing = ", ".join(str(rank) for rank, key in enumerate(keys) if not store.check([key]))
        if is_lost():
            raise EngineError(f"another rank failed while this one waited for rank {missing}")
        if time.monotonic() > deadline:
            raise EngineError(
                f"rank {layout.rank} waited {timeout_s:g} s for rank {missing}, which did not "
                "join; see the log of that rank"
            )
        time.sleep(LOOK_S)


def _stop_listening(number: int) -> None:
    """Close the store's listening port, for which torch has no call; its connections stay.

    The descriptor becomes that of an idle socket, which the store closes.
    """
    with socket.socket() as idle:
        os.dup2(idle.fileno(), number, inheritable=False)


def _address_towards(host: str, port: int) -> str:
    """Return this machine's address on the route to the host."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def _make_gloo(store: Any, rank: int, size: int, timeout: timedelta, address: str) -> Any:
    options = c10d.ProcessGroupGloo._Options()
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=address)]
    options._threads = 1  # calls do not overlap
    options._timeout = timeout
    return c10d.ProcessGroupGloo(store, rank, size, options)


def _make_nccl(store: Any, rank: int, size: int, timeout: timedelta, address: str) -> Any:
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return c10d.ProcessGroupNCCL(store, rank, size, options)


@contextmanager
def _as_engine_error(layout: Layout, what: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError) as error:
        said = (str(error) or type(error).__name__).splitlines()[0]
        reason = SOURCE_PLACE.sub("", said).partition(". This is typically")[0]
        raise EngineError(
            f"rank {layout.rank} of {layout.num_ranks} {what}: {reason}. The replica must restart"
        ) from error
