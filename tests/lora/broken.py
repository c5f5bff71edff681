"""What can be wrong with the folder of an adapter, and the words that tell of it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from remora.lora.files import CONFIG, MAX_TENSORS, PICKLES, WEIGHTS

MAX_BYTES = 10_000_000  # of lora.max_adapter_bytes, so that one of them is too large
Breaker = Callable[[Path], object]
"""Given a sound folder of rank 1 or 2, spoils it."""


def settings(**changes: object) -> Breaker:
    def spoil(folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps(config | changes))

    return spoil


def instead(name: str, make: Callable[[Path], object]) -> Breaker:
    def spoil(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return spoil


def filled(value: float) -> Breaker:
    def spoil(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        save_file(
            {name: torch.full_like(t, value) for name, t in tensors.items()}, folder / WEIGHTS
        )

    return spoil


def of_a_wider_model(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    wider = {
        name: torch.cat((t, t), 1) if "lora_A" in name else torch.cat((t, t))
        for name, t in tensors.items()
    }
    save_file(wider, folder / WEIGHTS)


def of_a_deeper_model(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    save_file({n.replace(".0.", ".77."): t for n, t in tensors.items()}, folder / WEIGHTS)


def dora(folder: Path) -> None:
    settings(use_dora=True)(folder)
    tensors = load_file(folder / WEIGHTS)
    magnitudes = {
        name.replace("lora_B.weight", "lora_magnitude_vector"): torch.ones(len(tensor))
        for name, tensor in tensors.items()
        if "lora_B" in name
    }
    save_file(tensors | magnitudes, folder / WEIGHTS)


def cut(folder: Path) -> None:
    os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size - 7)


def led_away(folder: Path) -> None:
    elsewhere = folder.parents[1] / "elsewhere"
    shutil.rmtree(elsewhere, ignore_errors=True)
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere)


def file_led_away(name: str) -> Breaker:
    def spoil(folder: Path) -> None:
        other = folder.with_name(f"{folder.name}-other")
        shutil.copytree(folder, other)
        instead(name, lambda file: file.symlink_to(other / name))(folder)

    return spoil


def huge(file: Path) -> None:
    file.touch()
    os.truncate(file, 50 * MAX_BYTES)


def many_tensors(file: Path) -> None:
    entry = '"%x":{"dtype":"F16","shape":[0],"data_offsets":[0,0]}'
    header = "{" + ",".join(entry % number for number in range(MAX_TENSORS + 1)) + "}"
    file.write_bytes(len(header).to_bytes(8, "little") + header.encode())


def other_sum(folder: Path) -> None:
    (folder / "SHA256SUMS").write_text(f"{'0' * 64}  {WEIGHTS}\n")


def a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.touch()


def only_pickle(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / PICKLES[0])


# Refused by whatever reads the folder.
BROKEN_FILES: dict[str, tuple[Breaker, str]] = {
    "missing folder": (shutil.rmtree, "is not there"),
    "missing config": (instead(CONFIG, lambda file: None), f"{CONFIG} is not there"),
    "missing weights": (instead(WEIGHTS, lambda file: None), f"{WEIGHTS} is not there"),
    "truncated": (cut, "Is the copy complete"),
    "broken JSON": (instead(CONFIG, lambda file: file.write_text('{"r": ')), "not valid JSON"),
    "config links out": (file_led_away(CONFIG), "leads out of the adapter's folder"),
    "weights link out": (file_led_away(WEIGHTS), "leads out of the adapter's folder"),
    "huge config": (instead(CONFIG, huge), "at most"),
    "pipe": (instead(WEIGHTS, os.mkfifo), "no regular file"),
    "config is a pipe": (instead(CONFIG, os.mkfifo), "no regular file"),
    "pickle": (only_pickle, "a pickle"),
    "endless": (instead(WEIGHTS, lambda file: file.symlink_to("/dev/zero")), "leads out"),
    "folder of that name": (instead(WEIGHTS, Path.mkdir), "no regular file"),
    "many tensors": (instead(WEIGHTS, many_tensors), f"at most {MAX_TENSORS} are read"),
    "empty file": (instead(WEIGHTS, Path.touch), "cannot be read as safetensors"),
}
BROKEN: dict[str, tuple[Breaker, str]] = BROKEN_FILES | {
    "a file": (a_file, "is no folder"),
    "wrong shapes": (settings(r=4), r"instead of 4"),
    "wrong base": (of_a_wider_model, r"\d\] instead of \["),
    "deeper base": (of_a_deeper_model, "the model has no"),
    "NaN": (filled(float("nan")), "not finite"),
    "Inf": (filled(float("inf")), "not finite"),
    "link out of the root": (led_away, "below none of lora.roots"),
    "link in a circle": (instead(WEIGHTS, lambda file: file.symlink_to(file)), "cannot be opened"),
    "huge": (instead(WEIGHTS, huge), f"at most {MAX_BYTES}"),
    "DoRA": (dora, "it uses DoRA"),
    "bias": (settings(bias="all"), "bias"),
    "other sum": (other_sum, "SHA-256"),
}
