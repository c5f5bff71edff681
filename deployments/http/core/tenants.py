"""The tenants of a configuration: their limits, and what of these is used.

All of it counts on one replica. Used on one event loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from remora.configs.errors import InvalidRequest, RateLimited
from remora.configs.sections.limits import UNNAMED, LimitsSection, TenantEntry
from remora.deployments.http.core.concurrency import ConcurrencyLimiter
from remora.deployments.http.core.rate_limits import RateLimit
from remora.engine.tenants import EVERYONE, Tenant
from remora.engine.types import Request


class Account:
    """One tenant's limits and what is used of them.

    tenant:      as the engine knows it
    concurrent:  its requests at this moment
    """

    def __init__(
        self,
        tenant: Tenant,
        entry: TenantEntry | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tenant = tenant
        self.concurrent = ConcurrencyLimiter()
        self._clock = clock
        self._requests: RateLimit | None = None
        self._tokens: RateLimit | None = None
        self._max_priority: int | None = None
        if entry is not None:
            self.adopt(tenant, entry)

    def adopt(self, tenant: Tenant, entry: TenantEntry) -> None:
        """Replace the limits. What is used of one that stays the same remains used."""
        self.tenant = tenant
        self._max_priority = entry.max_priority
        self._requests = self._limited(self._requests, entry.requests_per_minute)
        self._tokens = self._limited(self._tokens, entry.tokens_per_minute)

    def _limited(self, known: RateLimit | None, per_minute: int | None) -> RateLimit | None:
        if per_minute is None or (known is not None and known.per_minute == per_minute):
            return known if per_minute is not None else None
        return RateLimit(per_minute, self._clock)

    def check_priority(self, requests: Sequence[Request], *, low_first: bool) -> None:
        """Raise InvalidRequest for a priority that the tenant may not use.

        low_first:  engine.low_priority_first
        """
        most, sign = self._max_priority, -1 if low_first else 1
        for request in requests:
            if most is not None and sign * request.priority > most:
                bound = f"{'lowest' if low_first else 'highest'} of your key is {sign * most}"
                raise InvalidRequest(
                    f"priority is {request.priority}; the {bound}.", "priority", "priority_too_high"
                )

    def admit(self, requests: Sequence[Request]) -> None:
        """Count one call of the API with these prompts. Raises RateLimited."""
        num_tokens = sum(len(request.prompt_ids) for request in requests)
        for limit, num, unit, what in (
            (self._requests, 1, "request", "requests"),
            (self._tokens, num_tokens, "tokens of prompts", "tokens"),
        ):
            wait_s = 0.0 if limit is None else limit.wait_s(num)
            if limit is not None and wait_s > 0:
                raise RateLimited(
                    f"Your key's limit is {limit.per_minute} {what} per minute: "
                    f"{max(0, int(limit.level))} are left, and this call takes {num} ({unit}). "
                    f"Try again in {wait_s:.1f} s.",
                    wait_s,
                    limit=f"{what}_per_minute",
                )
        if self._requests is not None:
            self._requests.take(1)
        self.spend(num_tokens)

    def spend(self, num_tokens: int) -> None:
        """Count tokens."""
        if self._tokens is not None:
            self._tokens.take(num_tokens)

    def headers(self, *, as_anthropic: bool = False) -> dict[str, str]:
        """Return the headers that report the limits per minute; none without limits."""
        found: dict[str, str] = {}
        for what, limit in (("requests", self._requests), ("tokens", self._tokens)):
            if limit is not None:
                found |= limit.anthropic_headers(what) if as_anthropic else limit.headers(what)
        return found


class Tenants:
    """The accounts of all tenants, which outlive changes of the configuration.

    clock:  returns seconds
    """

    def __init__(self, limits: LimitsSection, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._accounts: dict[str, Account] = {}
        self._everyone = Account(EVERYONE)
        self.adopt(limits)

    def adopt(self, limits: LimitsSection) -> None:
        """Apply other limits to later requests."""
        entries = {entry.name: entry for entry in limits.tenants}
        if entries:
            entries.setdefault(UNNAMED, TenantEntry(name=UNNAMED))
        known, self._accounts = self._accounts, {}
        for name, entry in entries.items():
            account = known.get(name) or Account(EVERYONE, clock=self._clock)
            account.adopt(_tenant_of(entry), entry)
            self._accounts[name] = account

    def account(self, name: str | None) -> Account:
        """Return a tenant's account.

        name:  "" or one that is not configured (any more) = callers without a tenant's key; None =
               the server itself, which has no limits
        """
        if name is None or not self._accounts:
            return self._everyone
        return self._accounts.get(name) or self._accounts[UNNAMED]

    def headers(self, name: str, *, as_anthropic: bool = False) -> Mapping[str, str]:
        """Return the headers that report the limits of a tenant, as OpenAI's API or Anthropic's."""
        return self.account(name).headers(as_anthropic=as_anthropic)


def _tenant_of(entry: TenantEntry) -> Tenant:
    return Tenant(
        name=entry.name,
        weight=entry.weight,
        kv_fraction=entry.max_kv_fraction,
        max_open=entry.max_open_requests,
    )
