"""One Ray for all tests that need it, with two applications: SmolLM2, and a tiny random model."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from remora.deployments.free_ports import free_port
from tests.conftest import TinyCheckpoints

SMOL, TINY = "smol", "tiny"
START_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Cluster:
    """Ray Serve with our applications; `url(name)` is where one of them answers."""

    port: int

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.port}/{name}"


def make_deploy_config(smol: Path, tiny: Path, batches: Path) -> dict[str, Any]:
    engine = {"kv_tokens": 8192, "num_threads": 1}
    args = {
        SMOL: {
            "model": {"path": str(smol)},
            "engine": engine,
            "api": {"tool_parser": "hermes", "batch_dir": str(batches)},
        },
        TINY: {
            "model": {"path": str(tiny), "served_name": "tiny", "dtype": "float32"},
            "engine": engine | {"max_running_requests": 16, "max_queued_requests": 64},
        },
    }
    return {
        "applications": [
            {
                "name": name,
                "route_prefix": f"/{name}",
                "import_path": "remora.deployments.app:build",
                "args": app_args,
            }
            for name, app_args in args.items()
        ]
    }


@pytest.fixture(scope="session")
def cluster(
    smollm2_path: Path,
    tiny_checkpoints: TinyCheckpoints,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Cluster]:
    """Start Ray and both applications; stop everything afterwards."""
    import ray
    from ray import serve
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    port = free_port()
    ray.init(
        address="local",
        namespace="serve",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        config = make_deploy_config(
            smollm2_path, tiny_checkpoints("llama"), tmp_path_factory.mktemp("batches")
        )
        _get_global_client().deploy_apps(ServeDeploySchema.model_validate(config))
        wait_until_running(SMOL, TINY)
        yield Cluster(port)
    finally:
        serve.shutdown()
        ray.shutdown()


def wait_until_running(*names: str) -> None:
    from ray import serve

    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        found = serve.status().applications
        if all(name in found and found[name].status == "RUNNING" for name in names):
            return
        for name in names:
            if name in found and found[name].status == "DEPLOY_FAILED":
                pytest.fail(f"{name} did not start: {found[name].message}")
        time.sleep(0.2)
    pytest.fail(f"not running after {START_TIMEOUT_S} s: {serve.status()}")
