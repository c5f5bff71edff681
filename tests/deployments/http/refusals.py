"""Readers of the refusal counter."""

from __future__ import annotations

from typing import Any

import httpx


async def refusals_of(client: httpx.AsyncClient) -> list[str]:
    """Return the limits that refused requests, one entry per refusal."""
    lines = (await client.get("/metrics")).text.splitlines()
    counted = [line for line in lines if line.startswith("remora_refusals_total")]
    return [line.partition('limit="')[2].partition('"')[0] for line in counted]


async def outcome_of(response: httpx.Response, client: httpx.AsyncClient) -> Any:
    """Return the status, the message of a refusal, and the counted limits."""
    message = "" if response.status_code == 200 else response.json()["error"]["message"]
    return response.status_code, message, await refusals_of(client)
