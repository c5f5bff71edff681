"""Heads where a device computes: drafts stay there, and are those of a plain implementation.

A CPU stands for the device; attention is Triton's backend, which computes with torch there.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from remora.configs.planning.device_plan import DevicePlan
from remora.configs.planning.loading import PLAIN_LOADING
from remora.engine.attention.triton_backend import TritonAttention
from remora.engine.graphs.device_forward import DeviceForward
from remora.engine.models.checkpoint import read_config, read_raw_config
from remora.engine.spec.draft_chain import DeviceChain
from remora.engine.spec.heads.config import DraftHeadConfig, read_eagle, read_mtp
from remora.engine.spec.heads.head import open_stored_head
from tests.conftest import TinyCheckpoints
from tests.engine.graphs.device_runs import Rerun, run
from tests.engine.graphs.test_device_forward import ASKED, make_requests
from tests.engine.spec.heads import plain
from tests.engine.spec.heads.watched import Watched

CAPTURED = DevicePlan(
    graph_sizes=(1, 2, 4), graph_prompt_sizes=(2, 8, 16, 24), attention_backend="triton"
)
ROOM: dict[str, Any] = {"max_running_requests": 4, "max_step_tokens": 24}
ON_DEVICE: dict[str, Any] = {**ROOM, "make_attention": TritonAttention, "how": CAPTURED}

MTP = {
    "mimo": ("qwen2.5-tied", "MiMoForCausalLM"),
    "deepseek": ("deepseek-v3", "DeepseekV3ForCausalLM"),
}


def make(
    kind: str, checkpoints: TinyCheckpoints, folder: Path
) -> tuple[Path, DraftHeadConfig, plain.PlainHead]:
    """Return a model, its head, and the head in plain torch."""
    if kind in MTP:
        family, architecture = MTP[kind]
        source = checkpoints(family, tie_word_embeddings=False)
        path = shutil.copytree(source, folder / "model")
        raw = json.loads((path / "config.json").read_text())
        changed = {**raw, "architectures": [architecture]}
        (path / "config.json").write_text(json.dumps(changed))
        own = plain.add_mtp(path)
        return (
            path,
            read_mtp(path, read_config(path), read_raw_config(path)),
            plain.mtp_head(path, own),
        )
    path = checkpoints("llama", num_hidden_layers=4 if kind == "eagle3" else 2)
    head: plain.PlainHead
    if kind == "eagle":
        at = plain.write_eagle(folder / "head", path, bias=True)
        head = plain.eagle_head(path, at)
    else:
        at = plain.write_eagle_3(folder / "head", path)
        head = plain.eagle_3_head(path, at, (2, 2, 1))
    shapes = open_stored_head(at, PLAIN_LOADING).shapes()
    return path, read_eagle(at, read_config(path), shapes), head


@pytest.mark.parametrize(
    "recorded",
    [pytest.param(True, id="recorded"), pytest.param(False, marks=pytest.mark.slow, id="launched")],
)
@pytest.mark.parametrize("kind", ["eagle", "eagle3", *MTP])
def test_drafts_are_those_of_a_plain_head(
    kind: str,
    recorded: bool,
    tiny_checkpoints: TinyCheckpoints,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, config, head = make(kind, tiny_checkpoints, tmp_path)
    requests = make_requests(max_tokens=20)
    expected = run(path, requests, forward="eager", **ROOM)
    watched: list[Watched] = []
    num_waits = count_waits(monkeypatch)
    graph_runner = Rerun() if recorded else None

    got = run(
        path,
        requests,
        head=config,
        graph_runner=graph_runner,
        watch=lambda engine: watched.append(Watched(engine)),
        prefix_cache=False,  # cached pages may have the head's KV of another continuation
        **ON_DEVICE,
    )

    assert got.token_ids() == expected.token_ids()
    assert got.num_drafts > 50
    assert num_waits["take"] <= got.num_steps
    watched[0].check(head, set())
    assert graph_runner is None or graph_runner.num_replayed > 50


def count_waits(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count the calls in which a chain waits for its drafts."""
    counts, take = {"take": 0}, DeviceChain.take

    def counted(chain: DeviceChain) -> Any:
        counts["take"] += 1
        return take(chain)

    monkeypatch.setattr(DeviceChain, "take", counted)
    return counts


@pytest.mark.parametrize("name", ["drawn", "several", "penalised", "stopped", "scored", "mixed"])
def test_outputs_are_those_without_drafts(
    name: str, tiny_checkpoints: TinyCheckpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, config, _ = make("eagle3", tiny_checkpoints, tmp_path)
    expected = run(path, ASKED[name], forward="eager", **ROOM)
    monkeypatch.delattr(DeviceForward, "_launch")  # warming up aside, all steps are in graphs
    monkeypatch.setattr("remora.engine.runner.device.warm_up", lambda forward, plan: None)

    got = run(path, ASKED[name], head=config, graph_runner=Rerun(), **ON_DEVICE)

    assert got.token_ids() == expected.token_ids()
    assert got.ends() == expected.ends()
    assert got.num_drafts > 20


def test_rows_that_are_preempted_get_drafts_again(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    path, config, _ = make("eagle", tiny_checkpoints, tmp_path)
    requests = make_requests(max_tokens=24, temperature=0.9, seed=11, ignore_eos=False)
    few: dict[str, Any] = {"num_pages": 20, "conservativeness": 0.1, "max_model_len": 80}
    expected = run(path, requests, forward="eager", **ROOM)

    got = run(path, requests, head=config, graph_runner=Rerun(), **ON_DEVICE, **few)

    assert got.token_ids() == expected.token_ids()
    assert got.num_drafts > 30
    assert got.num_preemptions > 0
