"""Changes of weights at the ranks other than 0."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from remora.deployments.ranks.team import RayTeam


class TeamWeights:
    """OtherRanks over the actors of a replica's ranks."""

    def __init__(self, team: RayTeam) -> None:
        self._team = team

    async def call(self, operation: str, *args: Any) -> None:
        """Call a method of `RankWeights` at each rank, wait for all, and raise the first error."""
        found = await asyncio.gather(
            *self._team.change_weights(operation, *args), return_exceptions=True
        )
        for each in found:
            if isinstance(each, BaseException):
                raise each
