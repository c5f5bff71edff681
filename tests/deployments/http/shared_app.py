"""One HTTP application for the servers of many tests, since building one takes longer than most.

Its routes are made over a stand-in for a server's state, which leads each request to the state of
its own server. What routes take from the state while they are made is a stand-in too, or a setting
that each application has for itself; anything else fails at once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NoReturn, cast

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from remora.deployments.http.app import build_http_app
from remora.deployments.http.core.auth import Access
from remora.deployments.http.generation.server_state import ServerState

_is_making: ContextVar[bool] = ContextVar("whether routes are made now", default=False)
_apps: dict[tuple[str, ...], FastAPI] = {}


class _Late:
    """What is found at a path of attributes, such as `calls.tenants`, in the request's state.

    known:  attributes that have values while routes are made
    """

    def __init__(self, *path: str, **known: Any) -> None:
        self._path = path
        self._known = known

    def __getattr__(self, name: str) -> Any:
        if not _is_making.get():
            return getattr(self._found(), name)
        return self._known[name] if name in self._known else _Late(*self._path, name)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return self._found()(*args, **keywords)

    def _found(self) -> Any:
        found: Any = _current.get().state
        for name in self._path:
            found = getattr(found, name)
        return found

    def _unknown(self, *_: object) -> NoReturn:
        raise TypeError(f"{'.'.join(self._path)} is not known while routes are made")

    __bool__ = __len__ = __iter__ = __hash__ = __eq__ = _unknown


@dataclass(frozen=True, eq=False)
class _Served:
    """A shared application for the requests to one server."""

    app: ASGIApp
    state: ServerState
    access: Callable[[], Access]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        token = _current.set(self)
        try:
            await self.app(scope, receive, send)
        finally:
            _current.reset(token)


_current: ContextVar[_Served] = ContextVar("whom the request is for")


def share_http_app(state: ServerState, *, access: Callable[[], Access]) -> ASGIApp:
    """Return an application that answers as `build_http_app` of the same would."""
    api, name = state.config.api, state.plan.served_model_name
    if api.batch_dir is not None:  # of each test another, which the routes of batches begin with
        return build_http_app(state, access=access)
    key = (repr(api.cors), api.generate_dialect, name)
    if key not in _apps:
        known = SimpleNamespace(
            cors=api.cors, generate_dialect=api.generate_dialect, batch_dir=None
        )
        late = _Late(
            config=SimpleNamespace(api=known), plan=SimpleNamespace(served_model_name=name)
        )
        token = _is_making.set(True)
        try:
            _apps[key] = build_http_app(
                cast("ServerState", late), access=lambda: _current.get().access()
            )
        finally:
            _is_making.reset(token)
    return _Served(_apps[key], state, access)
