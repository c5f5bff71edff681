"""Certificates for tests: an authority, and what it issues."""

from __future__ import annotations

import datetime
import ipaddress
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_HOSTS = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.IPv4Address("127.0.0.1"))]


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def write_key(path: Path, key: ec.EllipticCurvePrivateKey, passphrase: bytes | None = None) -> None:
    encryption = (
        serialization.BestAvailableEncryption(passphrase)
        if passphrase
        else serialization.NoEncryption()
    )
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
    )


@dataclass(frozen=True)
class Issued:
    """Files of a certificate, and its serial number."""

    certificate: Path
    key: Path
    serial: int

    @property
    def http_options(self) -> dict[str, str]:
        return {"ssl_certfile": str(self.certificate), "ssl_keyfile": str(self.key)}


class Authority:
    """Issues certificates into a folder."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        self.path = folder / f"{name}.pem"
        own = self._sign(self._name, self._key, is_authority=True)
        self.path.write_bytes(_pem(own))

    def issue(self, name: str) -> Issued:
        """Write the certificate and the key of `name`, over those that it had before."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(_name(name), key)
        issued = Issued(
            self._folder / f"{name}.crt", self._folder / f"{name}.key", certificate.serial_number
        )
        issued.certificate.write_bytes(_pem(certificate))
        write_key(issued.key, key)
        return issued

    def context(self, own: Issued | None = None) -> ssl.SSLContext:
        """Return what a client uses that trusts this authority; own: its own certificate."""
        context = ssl.create_default_context(cafile=str(self.path))
        if own is not None:
            context.load_cert_chain(own.certificate, own.key)
        return context

    def _sign(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, *, is_authority: bool = False
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.SubjectAlternativeName(_HOSTS), critical=False)
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )


def serial_at(port: int, context: ssl.SSLContext) -> int:
    """Return the serial number of the certificate that a server shows."""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as secured,
    ):
        shown = secured.getpeercert(binary_form=True)
    assert shown is not None
    return x509.load_der_x509_certificate(shown).serial_number
