"""`remora serve --local` with HTTPS."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import yaml

from remora.configs.serve_file import config_of_args
from tests.conftest import TinyCheckpoints
from tests.deployments.https.certificates import Authority, serial_at
from tests.deployments.local.test_process import started


@pytest.mark.observes("http.ssl_certfile", "http.ssl_keyfile", "http.ssl_ca_certs")
def test_it_speaks_https_and_takes_up_renewed_files(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    authority, clients = Authority(tmp_path), Authority(tmp_path, "clients")
    first, client = authority.issue("server"), clients.issue("client")
    http = first.http_options | {"ssl_ca_certs": str(clients.path)}
    args = {"model": {"path": str(tiny_checkpoints("llama"))}}
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump(config_of_args(args, dict(http))))

    with started(tmp_path, str(file)) as server:
        server.until_printed("ready in")
        address = urlsplit(server.url)
        url = f"https://{address.netloc}"
        assert address.port is not None
        body = {"prompt": "a", "max_tokens": 2}
        trusted = authority.context(client)
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60, verify=trusted)
        assert answer.status_code == 200
        assert f"{url}/v1 (OpenAI)" in server.printed()
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{url}/health", verify=authority.context())
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{server.url}/health")

        second = authority.issue("server")
        server.until_printed("HTTPS uses the new files of")
        assert serial_at(address.port, trusted) == second.serial != first.serial
