"""Finds the weight files of a model folder and checks that they are complete.

Knows names, indexes and checksums of files, not their content.
"""

from __future__ import annotations

import hashlib
import json
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from remora.configs.errors import ConfigError

HASH = re.compile(r"[0-9a-f]{64}")
HASHED_AT_ONCE = 8 * 2**20  # bytes
POINTER_START = b"version https://git-lfs"
GGUF_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})\.gguf")
INDEX_ENDING = ".index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileKind:
    """File names of one format.

    single:  name of a checkpoint's only file; with INDEX_ENDING, the index of several
    others:  patterns of other names; all files that match are read
    never:   patterns of files that match `others` and hold no weights
    """

    single: str
    others: tuple[str, ...] = ()
    never: tuple[str, ...] = ()


SAFETENSORS = FileKind(single="model.safetensors")
PICKLES = FileKind(
    single="pytorch_model.bin",
    others=("*.pt", "*.pth", "*.bin"),
    never=("optimizer.*", "scheduler.*", "scaler.*", "rng_state*", "training_args.*"),
)


def find_files(folder: Path, load_format: str = "auto") -> list[Path]:
    """Return the weight files of a folder: pickles for `pt`, else safetensors.

    Raises ConfigError if there are none, or if some are missing or empty.
    """
    if load_format == "pt":
        found = _of_kind(folder, PICKLES)
        if found:
            return found
        raise ConfigError(
            f"{folder} holds no PyTorch files: looked for {PICKLES.single}, "
            f"{PICKLES.single}{INDEX_ENDING} and {', '.join(PICKLES.others)}. "
            f"{_list_folder(folder)}"
        )
    found = _of_kind(folder, SAFETENSORS)
    if found:
        return found
    pickles = _of_kind(folder, PICKLES)
    if pickles:
        raise ConfigError(
            f"{folder} holds {pickles[0].name}, a pickle: loading one can run code from the file. "
            "Set model.load_format: pt to read its tensors and nothing else, or convert it with "
            "transformers' save_pretrained to safetensors, which also loads faster."
        )
    raise ConfigError(
        f"{folder} holds no weights: looked for {SAFETENSORS.single} and "
        f"{SAFETENSORS.single}{INDEX_ENDING}. {_list_folder(folder)} "
        "To run with random weights set load_format: dummy."
    )


def weight_files(path: Path, load_format: str = "auto") -> list[Path]:
    """Return the weight files of a model's path, in any format; [] if there are none."""
    if path.is_file():
        return gguf_parts(path)
    for kind in (PICKLES,) if load_format == "pt" else (SAFETENSORS, PICKLES):
        with suppress(ConfigError):  # loading reports the error
            found = _of_kind(path, kind)
            if found:
                return found
    return []


def gguf_parts(path: Path) -> list[Path]:
    """Return all parts of the GGUF model `path`. Raises ConfigError if a part is missing."""
    named = GGUF_PART.fullmatch(path.name)
    if named is None:
        return [path]
    number, total = int(named["number"]), int(named["total"])
    names = [f"{named['stem']}-{part:05}-of-{total:05}.gguf" for part in range(1, total + 1)]
    if number != 1:
        raise ConfigError(f"{path} is part {number} of {total}: give the path of {names[0]}.")
    absent = [name for name in names if not (path.parent / name).is_file()]
    if absent:
        raise ConfigError(
            f"{len(absent)} of the {total} parts of {path} are missing, {absent[0]} first. "
            "Is the download complete?"
        )
    return [path.parent / name for name in names]


def check_whole(file: Path) -> None:
    """Raise ConfigError for an empty file and for a git-lfs pointer."""
    with file.open("rb") as opened:
        start = opened.read(len(POINTER_START))
    if not start:
        raise ConfigError(f"{file} is empty. Is the download complete?")
    if start == POINTER_START:
        raise ConfigError(
            f"{file} is a git-lfs pointer, not the file itself: run `git lfs pull` in "
            f"{file.parent}, or fetch the model with `hf download`."
        )


def check_hashes(files: list[Path]) -> None:
    """Compare files with their stored SHA-256. Raises ConfigError if one differs or is missing.

    It is stored in FILE.sha256, in SHA256SUMS, in the metadata of `hf download`, or as the name of
    a file in the hub's cache.
    """
    for file in files:
        noted = _noted_hash(file)
        if noted is None:
            raise ConfigError(
                f"model.verify_checksums: no SHA-256 of {file.name} is noted in {file.parent}: "
                f"looked for {file.name}.sha256, SHA256SUMS and the notes of `hf download`. "
                "Write one with sha256sum, or leave the key out."
            )
        found = hash_of(file)
        if found != noted:
            raise ConfigError(
                f"{file} has the SHA-256 {found}; expected {noted}. It was damaged or changed: "
                "fetch it again."
            )


def hash_of(file: Path) -> str:
    """Return a file's SHA-256 in hexadecimal."""
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while part := opened.read(HASHED_AT_ONCE):
            digest.update(part)
    return digest.hexdigest()


def _noted_hash(file: Path) -> str | None:
    folder, name = file.parent, file.name
    for note in (folder / f"{name}.sha256", folder / "SHA256SUMS"):
        if not note.is_file():
            continue
        for line in note.read_text(encoding="utf-8", errors="replace").splitlines():
            noted, _, named = line.strip().lower().partition(" ")
            if HASH.fullmatch(noted) and named.strip(" *") in ("", name.lower()):
                return noted
    stored = file.resolve()  # the hub's cache names large files by their hash
    if stored.parent.name == "blobs" and HASH.fullmatch(stored.name):
        return stored.name
    note = folder / ".cache" / "huggingface" / "download" / f"{name}.metadata"
    if note.is_file():  # commit, ETag, time; the ETag of a large file is its hash
        lines = note.read_text(encoding="utf-8", errors="replace").split()
        return next((line for line in lines if HASH.fullmatch(line)), None)
    return None


def _of_kind(folder: Path, kind: FileKind) -> list[Path]:
    index = folder / f"{kind.single}{INDEX_ENDING}"
    if (folder / kind.single).is_file():
        found = [folder / kind.single]
    elif index.is_file():
        found = _indexed(index)
    else:
        fitting = {file for pattern in kind.others for file in folder.glob(pattern)}
        found = sorted(
            file for file in fitting if not any(file.match(pattern) for pattern in kind.never)
        )
    for file in found:
        check_whole(file)
    return found


def _indexed(index: Path) -> list[Path]:
    check_whole(index)
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        outside = [name for name in names if Path(name).name != name]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{index} cannot be read as an index of weights: {error!r}. Expected an object with "
            "`weight_map`, the file of each tensor."
        ) from error
    if outside:
        raise ConfigError(f"{index} names {outside[0]}, a file outside its folder.")
    absent = [name for name in names if not (index.parent / name).is_file()]
    if absent:
        raise ConfigError(
            f"{len(absent)} of the {len(names)} weight files that {index} names are not there, "
            f"{absent[0]} first. Is the download complete?"
        )
    return [index.parent / name for name in names]


def _list_folder(folder: Path) -> str:
    names = sorted(file.name for file in folder.iterdir())
    if not names:
        return "The folder is empty."
    shown = ", ".join(names[:8])
    return f"It has {shown}{' and more' if len(names) > 8 else ''}."
