"""The manager as replicas call it: through a Serve handle, with errors as it raised them."""

from __future__ import annotations

from typing import Any, Protocol

from ray.serve.handle import DeploymentHandle

from remora.deployments.gateway.failures import told
from remora.lora.records import Desired, ReplicaReport


class Manager(Protocol):
    """See LoRAManager."""

    async def sync(self, replica: str, report: ReplicaReport, *, waits: bool = True) -> Desired:
        """Tell what a replica has; returns what it is to have."""
        ...

    async def load(
        self, name: str, source: str, *, pinned: bool = False, replaces: bool = False
    ) -> dict[str, Any]:
        """Load an adapter at all replicas."""
        ...

    async def unload(self, name: str, *, ends: bool = False) -> dict[str, Any]:
        """Serve an adapter no longer."""
        ...

    async def pin(self, name: str, *, pinned: bool) -> dict[str, Any]:
        """Let an adapter stay loaded, or not."""
        ...

    async def resolve(self, name: str) -> bool:
        """Look for an adapter that nobody serves."""
        ...

    async def adapters(self) -> dict[str, Any]:
        """Return what is known of each adapter, and of each replica."""
        ...


class HandledManager:
    """Manager behind a handle."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    def __getattr__(self, method: str) -> Any:
        async def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return await self._handle.options(method_name=method).remote(*args, **kwargs)
            except Exception as error:
                raise told(error) from None

        return call
