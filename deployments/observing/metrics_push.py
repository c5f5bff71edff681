"""Pushes metrics to a Prometheus push gateway, for replicas that cannot be scraped."""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Callable, Mapping
from urllib.parse import quote

import httpx
from prometheus_client import CONTENT_TYPE_LATEST

from remora.configs.secrets import read_keys
from remora.configs.sections.metrics import MetricsSection

log = logging.getLogger(__name__)

TIMEOUT_S = 10.0


class MetricsPusher:
    """Pushes the output of `render` periodically. Raises ConfigError if it cannot read credentials.

    instance:  this replica's name, so that replicas do not replace each other's metrics
    """

    def __init__(
        self, keys: MetricsSection, url: str, render: Callable[[], bytes], instance: str
    ) -> None:
        group = {"job": keys.push_job, "instance": instance, **keys.push_labels}
        self._url = (
            url.rstrip("/") + "/metrics" + "".join(map(_path_segment, group, group.values()))
        )
        self._headers = {"content-type": CONTENT_TYPE_LATEST, **_credentials(keys.push_auth)}
        self._period_s = keys.push_period_s
        self._render = render
        self._is_failing = False

    async def run(self) -> None:
        """Push until cancelled. Of consecutive failures, log only the first."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        async with httpx.AsyncClient(timeout=TIMEOUT_S, headers=self._headers) as client:
            while True:
                await self._push(client)
                due = max(due + self._period_s, loop.time())
                await asyncio.sleep(due - loop.time())

    async def _push(self, client: httpx.AsyncClient) -> None:
        try:
            response = await client.put(self._url, content=self._render())
            response.raise_for_status()
        except httpx.HTTPError as error:
            if not self._is_failing:
                log.warning("metrics push: failed: %s", error)
            self._is_failing = True
        else:
            self._is_failing = False


def _path_segment(name: str, value: str) -> str:
    """Return a label as a part of the path, with base64 for values that contain a slash."""
    if "/" in value:
        coded = base64.urlsafe_b64encode(value.encode()).decode()
        return f"/{name}@base64/{coded}"
    return f"/{name}/{quote(value, safe='')}"


def _credentials(reference: str | None) -> Mapping[str, str]:
    if reference is None:
        return {}
    secret = read_keys(reference, "metrics.push_auth")[0]
    if ":" in secret:
        return {"authorization": "Basic " + base64.b64encode(secret.encode()).decode()}
    return {"authorization": f"Bearer {secret}"}
