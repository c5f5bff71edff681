"""The manager's methods behind a Serve handle, with its errors unwrapped from Ray's.

Imports Ray only where a manager is called: a server without Ray imports this module, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from remora.configs.errors import RemoraError
from remora.lora.records import Desired, ReplicaReport

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle


class Manager(Protocol):
    """See LoRAManager."""

    async def sync(self, replica: str, report: ReplicaReport, *, waits: bool = True) -> Desired:
        """Report a replica's changes; return the registry's."""
        ...

    async def load(
        self, name: str, source: str, *, pinned: bool = False, replaces: bool = False
    ) -> dict[str, Any]:
        """Load an adapter at all replicas, then serve it."""
        ...

    async def unload(self, name: str, *, ends: bool = False) -> dict[str, Any]:
        """Stop serving an adapter."""
        ...

    async def pin(self, name: str, *, pinned: bool) -> dict[str, Any]:
        """Pin or unpin an adapter."""
        ...

    async def resolve(self, name: str) -> bool:
        """Return whether a name is served, after a look into the repository if necessary."""
        ...

    async def adapters(self) -> dict[str, Any]:
        """Describe each adapter and each replica."""
        ...


@dataclass(frozen=True, slots=True)
class RefusedCall:
    """The result of a call that the manager has refused."""

    error: RemoraError


class HandledManager:
    """Manager behind a Serve handle. Raises the errors of its methods."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    def __getattr__(self, method: str) -> Any:
        async def call(*args: Any, **kwargs: Any) -> Any:
            try:
                found = await self._handle.options(method_name="call").remote(
                    method, *args, **kwargs
                )
            except Exception as error:
                from remora.deployments.gateway.failures import client_error

                raise client_error(error) from None
            if isinstance(found, RefusedCall):
                raise found.error
            return found

        return call
