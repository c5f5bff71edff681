"""Connects the ranks of a replica at start-up.

Each rank loads its share before it connects, so that no rank waits in an exchange of tensors for
one that is still loading. Knows nothing of how ranks are started or placed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from remora.configs.errors import EngineError
from remora.configs.facts import MachineFacts, ModelFacts
from remora.configs.planning.plan import EnginePlan
from remora.engine.parallel.channel import Address, Channel, Listener
from remora.engine.parallel.connect import connect, listen
from remora.engine.parallel.followers import ChannelFollowers, Followers, NoFollowers
from remora.engine.parallel.group import ALONE, Group
from remora.engine.parallel.layout import Layout
from remora.engine.parallel.wire import Failed

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where and within which times the ranks meet.

    steps:       where rank 0 listens for followers
    come_s:      timeout until all ranks have connected, once rank 0 is ready
    exchange_s:  timeout of one exchange of tensors
    """

    steps: Address
    come_s: float
    exchange_s: float


class Host:
    """Rank 0's side of a meeting; close it afterwards."""

    def __init__(
        self, address: str | None, *, come_s: float, exchange_s: float, port: int | None = None
    ) -> None:
        """Listen at this node's `address`; None = for ranks of this node only.

        port:  of the tensor group's store; None = any
        """
        self._port = port or 0
        self._address = address or LOOPBACK
        self._listener = Listener(address)
        self.meeting = Meeting(steps=self._listener.address, come_s=come_s, exchange_s=exchange_s)

    def gather(self, layout: Layout, device: str) -> tuple[ChannelFollowers, Group]:
        """Wait for the others. Raises EngineError if one does not connect, or after `close`."""
        connections = self._listener.accept(layout.num_ranks, self.meeting.come_s)
        followers = ChannelFollowers(connections)
        try:
            return followers, self._join_group(followers, layout, device)
        except Exception as error:
            cause = followers.cause_of(error)
            followers.close()
            raise cause from error

    def _join_group(self, followers: ChannelFollowers, layout: Layout, device: str) -> Group:
        with listen(self._address, self._port) as listener:
            port = listener.getsockname()[1]
            followers.join_group(self._address, port)
            return connect(
                layout,
                host=self._address,
                port=port,
                listener=listener,
                device=device,
                timeout_s=self.meeting.exchange_s,
                key=self.meeting.steps.key,
                is_lost=lambda: followers.failure is not None,
            )

    def close(self) -> None:
        """Stop waiting. Thread-safe."""
        self._listener.close()


def join(meeting: Meeting, layout: Layout, device: str) -> tuple[Channel, Group]:
    """Join a meeting as a rank other than 0. Raises EngineError."""
    channel = Channel.connect(meeting.steps, layout.rank, meeting.come_s)
    try:
        where = channel.wait_to_join(meeting.come_s)
        return channel, connect(
            layout,
            host=where.host,
            port=where.port,
            listener=None,
            device=device,
            timeout_s=meeting.exchange_s,
            key=meeting.steps.key,
            is_lost=lambda: channel.is_lost,
        )
    except BaseException as error:
        channel.fail(Failed(str(error) or type(error).__name__, isinstance(error, EngineError)))
        channel.close()
        raise


class Team(Protocol):
    """The other ranks of a replica, as rank 0's start-up sees them.

    Every call may block, and raises the failure of another rank.
    """

    def machine(self, own: MachineFacts, model: ModelFacts) -> MachineFacts:
        """Return the least that the ranks' machines offer.

        own, model:  facts that rank 0 has read
        """

    def load(self, plan: EnginePlan) -> None:
        """Start to load the ranks' shares; returns at once."""

    def gather(self, layout: Layout, device: str) -> tuple[Followers, Group]:
        """Wait until all shares are loaded, and connect the ranks."""

    def ready(self) -> None:
        """Wait until all ranks can run steps."""


class NoTeam:
    """The Team of a single rank."""

    def machine(self, own: MachineFacts, model: ModelFacts) -> MachineFacts:
        """Return `own`."""
        return own

    def load(self, plan: EnginePlan) -> None:
        """Do nothing."""

    def gather(self, layout: Layout, device: str) -> tuple[Followers, Group]:
        """Return no followers, and the group of one rank."""
        return NoFollowers(), ALONE

    def ready(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
