"""How the ranks of a replica find each other at start-up.

Each rank loads its share first and comes then, so that nobody waits in an exchange of tensors for
one that has nothing to exchange yet. Knows neither who started the ranks nor where.
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
    """Where the ranks meet.

    steps:         where rank 0 listens for followers
    come_s:        most seconds until everybody has come, from when rank 0 is ready
    exchange_s:    most seconds of one exchange of tensors
    """

    steps: Address
    come_s: float
    exchange_s: float


class Host:
    """Rank 0's side of a meeting. To be closed when it is over."""

    def __init__(
        self, address: str | None, *, come_s: float, exchange_s: float, port: int | None = None
    ) -> None:
        """Listen at this node's `address`; None = for ranks of this node only.

        port:  at which all meet as a group; None = any
        """
        self._port = port or 0
        self._address = address or LOOPBACK
        self._listener = Listener(address)
        self.meeting = Meeting(steps=self._listener.address, come_s=come_s, exchange_s=exchange_s)

    def gather(self, layout: Layout, device: str) -> tuple[ChannelFollowers, Group]:
        """Wait for the others. Raises EngineError when one does not come, or after `close`."""
        connections = self._listener.accept(layout.num_ranks, self.meeting.come_s)
        followers = ChannelFollowers(connections)
        try:
            return followers, self._join_group(followers, layout, device)
        except Exception as error:
            blamed = followers.cause_of(error)
            followers.close()
            raise blamed from error

    def _join_group(self, followers: ChannelFollowers, layout: Layout, device: str) -> Group:
        with listen(self._address, self._port) as listener:
            port = listener.getsockname()[1]
            followers.come_in(self._address, port)
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
        """Wait for nobody any more; from any thread."""
        self._listener.close()


def join(meeting: Meeting, layout: Layout, device: str) -> tuple[Channel, Group]:
    """Come to a meeting as a rank other than 0. Raises EngineError."""
    channel = Channel.connect(meeting.steps, layout.rank, meeting.come_s)
    try:
        where = channel.come_in(meeting.come_s)
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
    """The other ranks of a replica, as rank 0's start-up sees them. Every call may block.

    Raises, in any call, what has failed in another rank.
    """

    def machine(self, own: MachineFacts, model: ModelFacts) -> MachineFacts:
        """Return the facts that hold for every rank: the least of what their machines offer.

        own, model:  what rank 0 has found
        """
        ...

    def load(self, plan: EnginePlan) -> None:
        """Let them load their shares; returns at once."""
        ...

    def gather(self, layout: Layout, device: str) -> tuple[Followers, Group]:
        """Wait until they have, and meet."""
        ...

    def ready(self) -> None:
        """Wait until they can take steps."""
        ...


class NoTeam:
    """The Team of a single rank."""

    def machine(self, own: MachineFacts, model: ModelFacts) -> MachineFacts:
        """Return `own`."""
        return own

    def load(self, plan: EnginePlan) -> None:
        """Nobody loads."""

    def gather(self, layout: Layout, device: str) -> tuple[Followers, Group]:
        """Nobody comes."""
        return NoFollowers(), ALONE

    def ready(self) -> None:
        """Nobody is waited for."""
