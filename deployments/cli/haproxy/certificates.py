"""HAProxy's copies of the files for HTTPS, in the run's folder, and their exchange while it runs.

HAProxy reads certificate and key from one file. A running one gets the contents of new files
through its control socket; connections that are open keep theirs.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from remora.deployments.cli.haproxy.watch import CONTROL_SOCKET, RUNNING
from remora.deployments.tls import Tls

BUNDLE, AUTHORITIES = "tls.pem", "authorities.pem"
_TIMEOUT_S = 5.0


def bind_options(folder: Path, tls: Tls) -> str:
    """Return the options of the line that binds the server's port."""
    options = f"ssl crt {folder}/{BUNDLE} alpn http/1.1"
    if tls.authorities is not None:
        options += f" ca-file {folder}/{AUTHORITIES} verify required"
    return options


def write_certificates(folder: Path, tls: Tls) -> dict[str, str]:
    """Write the files, readable by this user alone; return their texts. Raises OSError."""
    files = _files(tls)
    for name, text in files.items():
        draft = folder / f"{name}.draft"
        draft.unlink(missing_ok=True)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
        draft.rename(folder / name)
    return files


def renew_certificates(folder: Path, tls: Tls) -> None:
    """Write the files again, and make a HAProxy that runs use them. Raises OSError."""
    files = write_certificates(folder, tls)
    control = _control_socket(folder)
    for name, text in files.items():
        what = f"ssl {'cert' if name == BUNDLE else 'ca-file'} {folder / name}"
        reply = _tell(control, f"set {what} <<\n{text}") + _tell(control, f"commit {what}")
        if "Success" not in reply:
            raise OSError(f"HAProxy answers {reply.strip() or 'nothing'!r}")


def _files(tls: Tls) -> dict[str, str]:
    """Return the text of each file, without empty lines, which would end a command."""
    files = {BUNDLE: f"{tls.certificate.read_text()}\n{tls.key.read_text()}"}
    if tls.authorities is not None:
        files[AUTHORITIES] = tls.authorities.read_text()
    return {
        name: "\n".join(line for line in text.splitlines() if line.strip()) + "\n"
        for name, text in files.items()
    }


def _control_socket(folder: Path) -> Path:
    """Return the socket that the configuration of the HAProxy names that was started last."""
    _, _, config = (folder / RUNNING).read_text().partition(" ")
    for line in Path(config).read_text().splitlines():
        if line.strip().startswith(CONTROL_SOCKET):
            return Path(line.split()[2])
    raise OSError("HAProxy has no control socket")


def _tell(control: Path, command: str) -> str:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_TIMEOUT_S)
        connection.connect(str(control))
        connection.sendall(f"{command}\n".encode())
        connection.shutdown(socket.SHUT_WR)
        reply = b""
        while part := connection.recv(4096):
            reply += part
    return reply.decode(errors="replace")
