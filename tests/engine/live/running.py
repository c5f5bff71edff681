"""An engine whose weights change while it runs, and the checkpoints of two sets of weights."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from remora.configs.load import parse_args
from remora.engine.client import LocalEngineClient
from remora.engine.launch import BuiltEngine, build_engine
from remora.engine.live.allowed import AllowedSources
from remora.engine.live.control import LiveWeights, OtherRanks
from remora.engine.live.uploads import Uploads
from remora.engine.types import FinishReason, Request, SamplingParams

Answers = list[tuple[int, ...]]
LOADER = f"{__name__}:negated"
PROMPTS = [list(range(3 + number, 40 + 7 * number)) for number in range(4)]


def negated(source: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a folder, those of down_proj negated."""
    if source == "nowhere":
        raise OSError("there is nothing")
    for name, tensor in load_file(Path(source) / "model.safetensors").items():
        yield name, -tensor if "down_proj" in name else tensor


def write_negated(old: Path, new: Path) -> Path:
    """Write the other set of weights as a checkpoint."""
    shutil.copytree(old, new, dirs_exist_ok=True)
    save_file(dict(negated(str(old))), new / "model.safetensors", metadata={"format": "pt"})
    return new


def config_of(path: Path, *, roots: Path | None = None, **sections: Any) -> Any:
    model: dict[str, Any] = {"path": str(path), "dtype": "float32", "weight_upload_limit": "64MiB"}
    if roots is not None:
        model |= {"weight_roots": [str(roots)], "weight_loaders": [LOADER]}
    engine = {
        "device": "cpu",
        "kv_tokens": 2048,
        "num_threads": 1,
        "max_running_requests": 3,
        "sleep_mode": True,
    }
    given = {name: dict(keys) for name, keys in sections.items()}
    given["model"] = model | given.get("model", {})
    given["engine"] = engine | given.get("engine", {})
    return parse_args(given)


def build(path: Path, *, roots: Path | None = None, **sections: Any) -> BuiltEngine:
    return build_engine(config_of(path, roots=roots, **sections), show_progress=False)


class Running:
    """An engine that runs, and what gives it other weights. Make it on the event loop."""

    def __init__(
        self,
        built: BuiltEngine,
        uploads: Path,
        *,
        roots: Path | None = None,
        others: OtherRanks | None = None,
    ) -> None:
        assert built.live is not None
        self.rank = built.live
        self.engine = built.engine
        self.client = LocalEngineClient(built.engine, None)
        self.uploads = Uploads(uploads, 64 * 2**20)
        self.live = LiveWeights(built.live, self.client, self.uploads, others)
        self.allowed = AllowedSources([] if roots is None else [str(roots)], [LOADER])
        self._number = 0

    async def answer(self, prompt: list[int], max_tokens: int = 12) -> tuple[int, ...]:
        self._number += 1
        request = Request(
            request_id=str(self._number),
            prompt_ids=prompt,
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        )
        ids: list[int] = []
        async for output in self.client.generate(request):
            ids += output.token_ids
            if output.finish_reason is FinishReason.ABORT:
                ids.append(-1)
        return tuple(ids)

    async def answers(self) -> Answers:
        return [await self.answer(prompt) for prompt in PROMPTS]

    async def update(self, source: Path | str, load_format: str | None = None) -> None:
        await self.live.prepare("new", self.allowed.source(str(source), load_format))
        await self.live.install("new")

    async def send(self, tensors: dict[str, torch.Tensor], folder: Path) -> None:
        """Update by tensors, as the bytes of a file that arrive in two parts."""
        file = folder / "sent.safetensors"
        save_file(tensors, file)
        content = file.read_bytes()
        half = len(content) // 2
        self.uploads.add("sent", 0, content[:half])
        self.uploads.add("sent", half, content[half:])
        await self.live.prepare("sent", self.live.patched(self.uploads.finish("sent")))
        await self.live.install("sent")

    def close(self) -> None:
        self.live.close()
        self.client.close()
