"""The one store of a replica, which the APIs with stored answers share."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from remora.configs.schema import ServeConfig
from remora.deployments.http.core.errors import unsupported
from remora.deployments.http.generation.server_state import ServerState
from remora.deployments.http.storage.store import MemoryStore, ResponseStore, store_of

STORE_FAILURES = (OSError, sqlite3.Error)


@dataclass(frozen=True, slots=True)
class Storage:
    """The store that the configuration selects.

    store:    None = nothing is stored
    refusal:  reason why nothing is stored, for error messages
    """

    store: ResponseStore | None
    refusal: str = ""

    @classmethod
    def configured(cls, config: ServeConfig) -> Storage:
        """Return the storage that the configuration selects. Raises ConfigError."""
        store = store_of(config)
        num_replicas = config.parallel.num_replicas
        if store is None:
            return cls(None, "This server keeps no responses (api.response_store is none).")
        if isinstance(store, MemoryStore) and num_replicas > 1:
            return cls(
                None,
                f"This server has {num_replicas} replicas, none of which knows what another has "
                "answered. Its operator can have them share a database (api.response_store: "
                "file:/path).",
            )
        return cls(store)

    def open(self, param: str) -> ResponseStore:
        """Return the store. Raises InvalidRequest, which names `param`, if nothing is stored."""
        if self.store is None:
            raise unsupported(param, self.refusal)
        return self.store


def storage_of(server: ServerState) -> Storage:
    """Return the server's storage. Raises ConfigError."""
    return server.part(Storage, Storage.configured)
