"""Whatever is wrong with a checkpoint's files: one ConfigError that names it, at every rank."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from remora.configs.errors import ConfigError
from remora.configs.planning.loading import Loading
from remora.engine.parallel.layout import Layout
from tests.conftest import TinyCheckpoints
from tests.engine.loaded import load_f32
from tests.engine.weights.gguf.converter import writing
from tests.engine.weights.gguf.tiny_gguf import make_gguf

NORM, DOWN = "model.norm.weight", "model.layers.0.mlp.down_proj.weight"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n"
Damage = Callable[[Path], Any]


def load(path: Path, load_format: str = "auto", **loading: Any) -> None:
    """Load both shares of two ranks: each has to say the same."""
    messages = []
    for rank in (0, 1):
        try:
            load_f32(
                path,
                load_format=load_format,
                layout=Layout(rank=rank, tp_size=2),
                loading=Loading(**loading),
            )
        except ConfigError as error:
            messages.append(str(error))
    assert len(messages) == 2
    assert messages[0] == messages[1]
    raise ConfigError(messages[0])


def retensor(**changes: torch.Tensor | None) -> Damage:
    """Replace tensors, add them, or leave them out (None)."""

    def damage(file: Path) -> None:
        is_pickle = file.suffix == ".bin"
        tensors = (torch.load(file) if is_pickle else load_file(file)) | changes
        kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        (torch.save if is_pickle else save_file)(kept, file)

    return damage


def reheader(**changes: Any) -> Damage:
    """Change what a safetensors header says of the norm."""

    def damage(file: Path) -> None:
        content = file.read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:end])
        header[NORM] = {**header[NORM], **changes}
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + content[end:])

    return damage


def cut(share: float) -> Damage:
    """Leave only the first part of the file."""

    def damage(file: Path) -> None:
        content = file.read_bytes()
        file.write_bytes(content[: int(len(content) * share)])

    return damage


def put(start: int, content: bytes) -> Damage:
    """Overwrite bytes."""

    def damage(file: Path) -> None:
        whole = bytearray(file.read_bytes())
        whole[start : start + len(content)] = content
        file.write_bytes(whole)

    return damage


def become(content: bytes) -> Damage:
    return lambda file: file.write_bytes(content)


def instead(name: str, content: Any) -> Damage:
    """Put a file of JSON in the place of the weights."""

    def damage(file: Path) -> None:
        file.unlink()
        (file.parent / name).write_text(json.dumps(content))

    return damage


def as_pickle(file: Path) -> None:
    """Put a pickle in the place of the weights."""
    file.unlink()
    torch.save({}, file.with_name("pytorch_model.bin"))


def twice(file: Path) -> None:
    """Have an index name two files with the same tensors."""
    second = file.with_name("second.safetensors")
    shutil.copy(file, second)
    file.rename(file.with_name("first.safetensors"))
    index = {"weight_map": {"a": "first.safetensors", "b": second.name}}
    file.with_name("model.safetensors.index.json").write_text(json.dumps(index))


INDEX = "model.safetensors.index.json"
SAFETENSORS: dict[str, tuple[Damage, str]] = {
    "missing tensor": (retensor(**{NORM: None}), r"missing: model\.norm\.weight"),
    "extra tensor": (retensor(more=torch.zeros(2)), "not part of the model: more"),
    "other shape": (
        retensor(**{NORM: torch.zeros(5)}),
        r"model\.norm\.weight is \[5\] instead of \[96\]",
    ),
    "all of them": (
        retensor(**{NORM: None, DOWN: torch.zeros(5), "more": torch.zeros(2)}),
        r"missing: model\.norm\.weight\. .*model: more\. .*down_proj\.weight is \[5\] instead of",
    ),
    "many missing": (lambda file: save_file({}, file), r"lm_head\.weight, .* and 22 more"),
    "a pickle": (as_pickle, r"pytorch_model\.bin, a pickle: .*load_format: pt"),
    "whole numbers": (
        retensor(**{DOWN: torch.zeros(96, 128, dtype=torch.int8)}),
        r"layers\.0\.mlp\.down_proj\.weight in model is stored as int8; expected float32",
    ),
    "floats of a byte": (
        retensor(**{DOWN: torch.zeros(96, 128).to(torch.float8_e4m3fn)}),
        r"down_proj\.weight in model is stored as float8_e4m3fn; expected float32",
    ),
    "cut in the data": (
        cut(0.6),
        r"model\.safetensors cannot be read .*: \S+weight ends at byte [\d,]+, and the file has",
    ),
    "cut in the header": (cut(0.001), r"its header claims [\d,]+ bytes, and the file has"),
    "cut in the length": (become(b"\x10\0"), "its header claims 16 bytes"),
    "length out of bounds": (put(0, b"\xff" * 8), "claims 18,446,744,073,709,551,615 bytes"),
    "header of noise": (put(8, b"\xff" * 20), r"model\.safetensors .*its header is no JSON"),
    "header of a list": (become(b"\x02\0\0\0\0\0\0\0[]"), "its header is a list"),
    "entry without shape": (reheader(shape=None), r"model\.norm\.weight has no dtype, shape"),
    "unknown dtype": (reheader(dtype="F3"), r"model\.norm\.weight \(F3\); only tensors of BF16"),
    "shape of other bytes": (
        reheader(shape=[7]),
        r"model\.norm\.weight, F32 \[7\], is said to lie in .* expected 28 bytes",
    ),
    "shared bytes": (reheader(data_offsets=[0, 384]), "another tensor is"),
    "bytes out of bounds": (reheader(data_offsets=[10**12, 10**12 + 384]), "where a gap is"),
    "empty file": (become(b""), r"model\.safetensors is empty"),
    "pointer of git-lfs": (become(POINTER), "is a git-lfs pointer.*git lfs pull"),
    "no weights": (Path.unlink, r"no weights: looked for .* It has config\.json"),
    "index without its files": (
        instead(INDEX, {"weight_map": {"a": "b.safetensors"}}),
        r"1 of the 1 weight files that .* names are not there, b\.safetensors first",
    ),
    "index of nothing": (
        instead(INDEX, {"a": 1}),
        "cannot be read as an index.*Expected an object",
    ),
    "index that leads out": (
        instead(INDEX, {"weight_map": {"a": "../b"}}),
        "outside its folder",
    ),
    "a tensor in two files": (twice, r"\S+weight in two of its weight files"),
    "config of noise": (
        lambda file: file.with_name("config.json").write_text('{"vocab'),
        r"config\.json is not valid JSON",
    ),
}


@pytest.fixture
def folder(tiny_checkpoints: TinyCheckpoints, tmp_path: Path) -> Path:
    """A checkpoint without tokenizer."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tiny_checkpoints("llama") / name, folder)
    return folder


@pytest.mark.parametrize("damage", SAFETENSORS)
def test_safetensors(damage: str, folder: Path) -> None:
    inflict, message = SAFETENSORS[damage]
    inflict(folder / "model.safetensors")

    with pytest.raises(ConfigError, match=message):
        load(folder)


def test_a_changed_bit(folder: Path) -> None:
    file = folder / "model.safetensors"
    (folder / "model.safetensors.sha256").write_text("0" * 64 + "  model.safetensors\n")

    with pytest.raises(ConfigError, match=rf"{file} has the SHA-256 \w+; expected 0{{64}}"):
        load(folder, verify_checksums=True)


class Strange:
    """What no state dict holds."""


def cut_as_old(file: Path) -> None:
    """Leave the first half of a file in the format of before 2020."""
    torch.save(torch.load(file), file, _use_new_zipfile_serialization=False)
    cut(0.5)(file)


PICKLES: dict[str, tuple[Damage, str]] = {
    "missing tensor": (retensor(**{NORM: None}), r"missing: model\.norm\.weight"),
    "other shape": (retensor(**{NORM: torch.zeros(5)}), r"weight is \[5\] instead of \[96\]"),
    "cut": (cut(0.5), r"pytorch_model\.bin cannot be read as a PyTorch file.*download"),
    "old and cut": (
        cut_as_old,
        r"pytorch_model\.bin cannot be read as a PyTorch file",
    ),
    "noise": (become(b"\x07noise" * 40), r"pytorch_model\.bin cannot be read as a PyTorch file"),
    "empty": (become(b""), r"pytorch_model\.bin is empty"),
    "pointer of git-lfs": (become(POINTER), "git lfs pull"),
    "other objects": (
        lambda file: torch.save({NORM: Strange()}, file),
        r"pytorch_model\.bin asks for \S*Strange: it holds objects",
    ),
    "a list": (lambda file: torch.save([1], file), "holds a list; expected tensors by name"),
    "numbers": (lambda file: torch.save({"a": 1}, file), "holds a int as 'a'; expected tensors"),
    "nothing": (Path.unlink, r"no PyTorch files: looked for pytorch_model\.bin"),
}


@pytest.mark.parametrize("damage", PICKLES)
def test_pytorch_files(damage: str, folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    inflict, message = PICKLES[damage]
    inflict(folder / "pytorch_model.bin")

    with pytest.raises(ConfigError, match=message):
        load(folder, "pt")


def write_gguf(file: Path, **tensors: np.ndarray[Any, Any]) -> None:
    """Write a model that has settings and these tensors."""
    lengths = dict.fromkeys(("context_length", "embedding_length", "feed_forward_length"), 96)
    with writing(file, "llama", {"block_count": 1, "attention.head_count": 6, **lengths}) as writer:
        for name, values in tensors.items():
            writer.add_tensor(name, values)


GGUFS: dict[str, tuple[Damage, str]] = {
    "cut in the data": (
        cut(0.6),
        r"model\.gguf .*: \S+, F32 \[[\d, ]+\], ends at byte [\d,]+, and the file has [\d,]+",
    ),
    "cut in the metadata": (cut(0.001), r"at byte [\d,]+ .* are to follow, and [\d,]+ bytes do"),
    "other start": (put(0, b"GGML"), "begins with b'GGML'; expected b'GGUF'"),
    "other version": (put(4, struct.pack("<I", 9)), r"its version is 9; known are \(2, 3\)"),
    "countless entries": (put(16, struct.pack("<Q", 2**60)), "entries of metadata are to follow"),
    "countless tensors": (put(8, struct.pack("<Q", 2**60)), "tensors are to follow"),
    "noise": (put(24, b"\xff" * 64), r"model\.gguf cannot be read as GGUF"),
    "empty": (become(b""), r"model\.gguf is empty"),
    "pointer of git-lfs": (become(POINTER), "git lfs pull"),
    "gone": (Path.unlink, r"model\.gguf does not exist"),
    "no embedding": (write_gguf, r"model\.gguf has no tensor token_embd\.weight"),
    "missing tensors": (
        lambda file: write_gguf(file, **{"token_embd.weight": np.zeros((32, 96), np.float32)}),
        r"missing: model\.layers\.0\.input_layernorm\.weight, .* more",
    ),
    "whole numbers": (
        lambda file: write_gguf(file, **{"token_embd.weight": np.zeros((32, 96), np.int8)}),
        r"token_embd\.weight as I8, which weights cannot be read from",
    ),
}


@pytest.mark.parametrize("damage", GGUFS)
def test_gguf(damage: str, tiny_checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    file = make_gguf(tiny_checkpoints("llama"), tmp_path / "model.gguf")
    inflict, message = GGUFS[damage]
    inflict(file)

    with pytest.raises(ConfigError, match=message):
        load(file)


def test_every_cut_of_a_gguf_file_is_told_at_once(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    file = make_gguf(tiny_checkpoints("llama"), tmp_path / "model.gguf")
    content = file.read_bytes()

    for share in np.linspace(0.0005, 0.9995, 60):
        file.write_bytes(content[: int(len(content) * share)])
        with pytest.raises(ConfigError, match="cannot be read as GGUF"):
            load(file)
