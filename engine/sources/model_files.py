"""Chooses the files that serving a model needs from the names in its repository.

    small_files   configuration, tokenizer, chat templates: everything that is read before weights
    weight_files  safetensors; PyTorch files only where they are asked for; never both
    gguf_files    the parts of one GGUF file

Copies in other formats (original/, consolidated*, onnx/, TensorFlow, Flax) are left where they are.
Works on lists of names and on small files that are here already.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from fnmatch import fnmatch
from pathlib import PurePosixPath
from typing import Literal

from remora.engine.sources.faults import SourceFault
from remora.engine.weights.files import GGUF_PART, INDEX_ENDING, PICKLES, SAFETENSORS, FileKind

# any = safetensors, or else PyTorch files, as draft heads have them.
Weights = Literal["safetensors", "pickles", "any", "none"]

_SMALL_ENDINGS = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py", ".vocab", ".bpe")
_SMALL_NAMES = ("LICENSE", "LICENSE.md", "USE_POLICY.md")
_UNUSED = ("trainer_state.json", "all_results.json", "train_results.json", "requirements.txt")
_TEMPLATES = "additional_chat_templates"
_MODULE = re.compile(r"\d+_[A-Za-z]+")  # folders of sentence-transformers
_MODULE_FILES = ("config.json", "model.safetensors", "pytorch_model.bin")
_PROJECTOR = re.compile(r"(^|[/_.-])mmproj", re.IGNORECASE)
_MAX_SHOWN = 12


def small_files(names: Collection[str]) -> list[str]:
    """Return the files that are needed besides the weights."""
    return sorted(name for name in names if _is_small(PurePosixPath(name), names))


def _is_small(path: PurePosixPath, names: Collection[str]) -> bool:
    folder = str(path.parent)
    if folder == ".":
        is_kind = path.suffix in _SMALL_ENDINGS or path.name in _SMALL_NAMES
        return is_kind and path.name not in _UNUSED
    if folder == _TEMPLATES:
        return path.suffix == ".jinja"
    if _MODULE.fullmatch(folder) and path.name in _MODULE_FILES:
        return path.suffix != ".bin" or f"{folder}/model.safetensors" not in names
    return False


def weight_files(
    names: Collection[str], read: Callable[[str], bytes], weights: Weights, home: str
) -> list[str]:
    """Return the weight files.

    read:  returns the content of one of the small files
    home:  name of the repository, for messages
    Raises SourceFault if there are none in the format.
    """
    kinds = {
        "none": (),
        "safetensors": (SAFETENSORS,),
        "pickles": (PICKLES,),
        "any": (SAFETENSORS, PICKLES),
    }[weights]
    for kind in kinds:
        if found := _of_kind(kind, names, read, home):
            return found
    if not kinds:
        return []
    if weights == "safetensors" and _of_kind(PICKLES, names, read, home):
        raise SourceFault(
            f"{home} holds only PyTorch files, which are pickles: loading one can run code from "
            "the file. Set model.load_format: pt to read its tensors and nothing else, or name a "
            "repository with safetensors."
        )
    if ggufs := gguf_choices(names):
        raise SourceFault(
            f"{home} holds GGUF files: name one of them, as "
            f"{home}{'/' if '://' in home else ':'}{ggufs[0]} (it has "
            f"{_listed(ggufs)})"
        )
    single = kinds[0].single
    raise SourceFault(
        f"{home} holds no weights that are read here: looked for {single} and "
        f"{single}{INDEX_ENDING}. It has {_listed(sorted(names))}."
    )


def _of_kind(
    kind: FileKind, names: Collection[str], read: Callable[[str], bytes], home: str
) -> list[str]:
    index = f"{kind.single}{INDEX_ENDING}"
    if kind.single in names:
        return [kind.single]
    if index in names:
        try:
            found = sorted(set(json.loads(read(index))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise SourceFault(f"{home}/{index} is not an index of weights: {error!r}") from error
        if absent := [name for name in found if name not in names]:
            raise SourceFault(f"{home} lacks {absent[0]}, which {index} names")
        return found
    return sorted(
        name
        for name in names
        if "/" not in name
        and any(fnmatch(name, pattern) for pattern in kind.others)
        and not any(fnmatch(name, pattern) for pattern in kind.never)
    )


def gguf_files(names: Collection[str], wanted: str, home: str) -> list[str]:
    """Return all parts of one GGUF file, the first part first.

    wanted:  its name, or its quantisation (Q4_K_M), in any case
    Raises SourceFault if none or several match.
    """
    firsts = [name for name in _ggufs(names) if _part_number(name) in (None, 1)]
    found = [name for name in firsts if wanted in (name, PurePosixPath(name).name)]
    if not found:
        word = re.compile(rf"(?<![A-Za-z0-9]){re.escape(wanted)}(?![A-Za-z0-9_])", re.IGNORECASE)
        found = [name for name in firsts if word.search(name.removesuffix(".gguf"))]
    if len(found) != 1:
        count = "several GGUF files" if found else "no GGUF file"
        choices = found or gguf_choices(names) or sorted(names)
        raise SourceFault(f"{home} has {count} {wanted!r}; it has {_listed(choices)}")
    named = GGUF_PART.fullmatch(PurePosixPath(found[0]).name)
    if named is None:
        return found
    folder = found[0].rpartition("/")[0]
    total = int(named["total"])
    parts = [f"{named['stem']}-{part:05}-of-{total:05}.gguf" for part in range(1, total + 1)]
    paths = [f"{folder}/{part}" if folder else part for part in parts]
    if absent := [path for path in paths if path not in names]:
        raise SourceFault(f"{home} lacks {absent[0]}, a part of {found[0]}")
    return paths


def only_gguf(names: Collection[str]) -> str | None:
    """Return the GGUF file of a repository that has one and no config.json; else None."""
    firsts = [name for name in _ggufs(names) if _part_number(name) in (None, 1)]
    return firsts[0] if len(firsts) == 1 and "config.json" not in names else None


def _ggufs(names: Collection[str]) -> list[str]:
    return sorted(n for n in names if n.endswith(".gguf") and not _PROJECTOR.search(n))


def _part_number(name: str) -> int | None:
    named = GGUF_PART.fullmatch(PurePosixPath(name).name)
    return None if named is None else int(named["number"])


def gguf_choices(names: Collection[str]) -> list[str]:
    """Return the names of the GGUF files, of several parts the first."""
    return [PurePosixPath(name).name for name in _ggufs(names) if _part_number(name) in (None, 1)]


def _listed(names: Collection[str]) -> str:
    shown = ", ".join(list(names)[:_MAX_SHOWN])
    return f"{shown} and more" if len(names) > _MAX_SHOWN else shown or "no files"
