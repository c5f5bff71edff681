"""HTTPS: the files that `http_options` names, checked before a server starts, and their renewal.

The keys are Ray Serve's. Its own proxy reads the files itself; HAProxy and a server without Ray get
them from here. Knows files and OpenSSL, and neither of the two servers.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from remora.configs.errors import ConfigError

CERTIFICATE, KEY = "ssl_certfile", "ssl_keyfile"
PASSPHRASE, AUTHORITIES = "ssl_keyfile_password", "ssl_ca_certs"
KEYS = frozenset({CERTIFICATE, KEY, PASSPHRASE, AUTHORITIES})
_ENCRYPTED = (
    "is encrypted, and nothing here could keep its passphrase secret; write it without one, "
    "readable by the server's user alone: openssl pkey -in {} -out NEW"
)

Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """What a server needs for HTTPS. All files are PEM.

    certificate:  the server's, and the intermediate ones up to a known authority
    key:          without a passphrase
    authorities:  each client must have a certificate of one of these; None = clients need none
    """

    certificate: Path
    key: Path
    authorities: Path | None = None

    @classmethod
    def of(cls, http: Mapping[str, Any]) -> Self | None:
        """Return the files of `http_options`; None = plain HTTP. Raises ConfigError."""
        certificate, key, authorities = (http.get(name) for name in (CERTIFICATE, KEY, AUTHORITIES))
        if http.get(PASSPHRASE):
            raise ConfigError(f"http_options.{PASSPHRASE}: the key {_ENCRYPTED.format(key)}")
        if not certificate and not key:
            if authorities:
                raise ConfigError(f"http_options.{AUTHORITIES}: needs {CERTIFICATE} and {KEY}")
            return None
        if not certificate or not key:
            lacking, given = (CERTIFICATE, KEY) if key else (KEY, CERTIFICATE)
            raise ConfigError(f"http_options.{given}: HTTPS needs {lacking} too")
        found = cls(
            certificate=Path(certificate).expanduser().absolute(),
            key=Path(key).expanduser().absolute(),
            authorities=Path(authorities).expanduser().absolute() if authorities else None,
        )
        found.load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        return found

    def load(self, context: ssl.SSLContext) -> None:
        """Make a context use the files as they are now. Raises ConfigError naming the file."""
        for name, path in self._named():
            try:
                path.read_bytes()
            except OSError as error:
                raise ConfigError(f"{name} = {path}: {error.strerror}") from None
        try:
            context.load_cert_chain(self.certificate, self.key, password=self._refuse_passphrase)
        except ssl.SSLError as error:
            reason = error.reason or "not PEM"
            if reason == "KEY_VALUES_MISMATCH":
                reason = f"{KEY} = {self.key} is the key of another certificate"
            else:
                reason = f"no certificate, or no key in {self.key} ({reason})"
            raise ConfigError(
                f"http_options.{CERTIFICATE} = {self.certificate}: {reason}"
            ) from None
        if self.authorities is not None:
            try:
                context.load_verify_locations(self.authorities)
            except ssl.SSLError as error:
                reason = f"no certificates ({error.reason or 'not PEM'})"
                message = f"http_options.{AUTHORITIES} = {self.authorities}: {reason}"
                raise ConfigError(message) from None
            context.verify_mode = ssl.CERT_REQUIRED

    def stamp(self) -> Stamp | None:
        """Return what changes with the files; None while one of them is missing."""
        try:
            found = [path.stat() for _, path in self._named()]
        except OSError:
            return None
        return tuple((each.st_mtime_ns, each.st_size, each.st_ino) for each in found)

    def _named(self) -> list[tuple[str, Path]]:
        files = ((CERTIFICATE, self.certificate), (KEY, self.key), (AUTHORITIES, self.authorities))
        return [(f"http_options.{name}", path) for name, path in files if path is not None]

    def _refuse_passphrase(self) -> str:
        raise ConfigError(f"http_options.{KEY}: {self.key} {_ENCRYPTED.format(self.key)}")


class Renewal:
    """Installs the files again when they have been replaced, as certificates are every few months.

    Files that cannot be used are reported once, and what was installed before stays.

    install:  puts the files into the running server; may raise ConfigError or OSError
    report:   shows a line to the operator
    """

    def __init__(
        self, tls: Tls, install: Callable[[], None], report: Callable[[str], None]
    ) -> None:
        self._tls = tls
        self._install = install
        self._report = report
        self._installed = self._last = tls.stamp()

    def look(self) -> None:
        """Install files that have changed, once they are as they were when looked at last."""
        last, self._last = self._last, self._tls.stamp()
        if self._last in (None, self._installed) or self._last != last:
            return
        self._installed = self._last
        try:
            self._tls.load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
            self._install()
        except (ConfigError, OSError) as error:
            self._report(f"warning: HTTPS keeps its certificate: {error}")
        else:
            self._report(f"HTTPS uses the new files of {self._tls.certificate}")
