"""The section `model`: weights, number formats, tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from remora.configs.fields import BaseUrl, Bytes, Name, Section

Layer = Annotated[int, Field(ge=0, le=4095)]
CheckpointFormat = Literal[
    "awq",
    "gptq",
    "auto-round",
    "compressed-tensors",
    "fp8",
    "fbgemm-fp8",
    "modelopt",
    "mxfp4",
    "bitsandbytes",
    "torchao",
]


class QuantizationOverride(Section):
    """Another format for some weights."""

    parts: Annotated[list[Name], Field(min_length=1, max_length=32)]
    """Weights by the last parts of their names (q_proj, ...), in Llama's naming. gate_proj and
    up_proj are one product: name both."""

    layers: Annotated[list[Layer], Field(min_length=1, max_length=1024)] | None = None
    """Layers, counted from 0. Default: all."""

    format: Literal["none", "int8", "int5", "int4"]
    """Format: groups of 32 weights (int8 with AMX: 64); none = the model's own."""


def download_folder(download_dir: str | None) -> Path | None:
    """Return the folder that `model.download_dir` names; None = the caches of this machine."""
    return None if download_dir is None else Path(download_dir).expanduser()


class ModelSection(Section):
    """Model, number formats, tokenizer."""

    path: Name
    """Directory in Hugging Face layout, a .gguf file, or a built-in model (smollm2-135m-instruct,
    all-minilm-l6-v2); or a remote model, which is downloaded once: OWNER/NAME or
    OWNER/NAME@REVISION of the Hugging Face hub, OWNER/NAME:Q4_K_M for a GGUF file in it, or a URL
    (s3://BUCKET/PATH, gs://, az://). Prefer absolute paths: relative ones start from the replica's
    working directory."""

    served_name: Name | None = None
    """Model name that clients use. Default: OWNER/NAME of a model of the hub, else the last part of
    `path`, without .gguf."""

    task: Literal["auto", "generate", "embed", "classify", "rerank", "reward"] = "auto"
    """What the model does: generate text; embed; or score: classify, rerank (pairs of query and
    document), reward. Decides which routes are served. auto = the checkpoint's own task. A
    generation model also serves as an embedder (embed) or as a reranker that answers yes or no
    (rerank)."""

    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Number format of weights, activations and KV cache. auto = the checkpoint's."""

    quantization: Literal["none", "int8", "int4", "int4_pure", "fp8"] = "none"
    """Format that weights are quantised to at start-up. On a CPU with native kernels: int8 takes
    half the memory of bfloat16 (groups of 32, with AMX of 64); int4 about 37 % (groups of 32:
    q_proj and k_proj in 4 bits, v_proj and the head in 8, other parts in 5); int4_pure a third,
    with several times the loss (4 bits, the head in 8). On a GPU with Triton kernels: fp8 (e4m3) or
    int8, with a scale for each output; products quantise the activations of each token; head,
    embeddings and, with int8, experts are not rounded."""

    quantization_overrides: list[QuantizationOverride] = Field(default_factory=list, max_length=64)
    """Exceptions from `quantization`, for parts of layers; the last that matches counts. With
    quantization none, all other weights keep their format. Needs a CPU with native kernels."""

    checkpoint_formats: list[CheckpointFormat] = Field(default_factory=list, max_length=16)
    """Formats of quantised weights that the checkpoint may have. One in another format, or not
    quantised, is refused. Default: the checkpoint's format is recognised, and any is read."""

    packed_cache: Bytes | None = 32 * 2**30
    """Limit of the cache of weights that `quantization` rounded on a CPU, over all models; null =
    none is kept. Later starts read them, unless weight files, `quantization` or kernels differ.
    They are in packed/ of the cache directory; models that were started longest ago are removed."""

    impl: Literal["auto", "remora", "transformers"] = "auto"
    """Model implementation: remora = its own; transformers = the transformers package with remora's
    KV cache, which supports more model families and is slower; auto = remora where it supports the
    model, else transformers."""

    trust_remote_code: bool = False
    """Whether Python code from the checkpoint may run, if config.json or the tokenizer refers to
    it. It can do everything that the server can: read it first."""

    download_dir: Name | None = None
    """Absolute path of a folder for downloads of remote models, tokenizers and drafts, in the hub
    library's layout. Default: its cache (HF_HOME), and for URLs remora's (REMORA_CACHE)."""

    load_format: Literal["auto", "safetensors", "gguf", "pt", "dummy"] = "auto"
    """Format of the weight files: auto = safetensors or GGUF, by `path`; pt = PyTorch files
    (pytorch_model.bin, *.pt), tensors only; dummy = random weights, for trials without files."""

    mmap: bool = True
    """Whether weight files are memory-mapped. false = tensors are read into memory (PyTorch files
    as a whole), which is faster on some network file systems."""

    load_threads: Annotated[int, Field(ge=1, le=64)] = 2
    """Threads that load weights. Each holds one tensor in memory at a time."""

    verify_checksums: bool = False
    """Whether weight files are compared with their SHA-256 checksums before loading (FILE.sha256,
    SHA256SUMS, or the metadata of `hf download`). A file without a checksum is refused."""

    delete_after_load: bool = False
    """Whether the weight files are deleted once the model is loaded, to free disk space. A
    restarted replica cannot load them again."""

    weight_roots: list[Name] = Field(default_factory=list, max_length=64)
    """Directories from which /update_weights_from_disk may load new weights of the same model while
    it serves, and below which /save_weights may write them; all nodes see the same files. Needs a
    CPU, no adapters, and memory for two copies. Default: none; the routes are off."""

    weight_loaders: list[Name] = Field(default_factory=list, max_length=64)
    """Functions that /update_weights_from_disk may use (`load_format`): module:function on the
    replica's Python path. Each takes the request's `model_path` and yields (checkpoint name,
    tensor) pairs for all tensors of the model. Same requirements as weight_roots."""

    weight_upload_limit: Bytes | None = None
    """Largest update by /update_weights_from_tensor, in bytes or as 2GiB. The tensors stay in
    updates/ of the cache directory until later ones replace them. Same requirements as
    weight_roots, and one node. Default: the route is off."""

    weight_instances: list[BaseUrl] = Field(default_factory=list, max_length=64)
    """Other servers of the same model, http://host:port, whose weights
    /update_weights_from_instance may take; they need share_weights. Requests to other addresses are
    never sent. Same requirements as weight_upload_limit, which must be set and bounds the weights.
    Default: none; the route is off."""

    share_weights: bool = False
    """Whether GET /weights gives the served weights to the operator and to servers that have his
    key. Needs an unquantised checkpoint in safetensors or PyTorch files. Same requirements as
    weight_roots, except for the memory."""

    weight_version: Name = "default"
    """Label of the weights, returned as `weight_version` until an update changes it."""

    config_overrides: dict[str, Any] = Field(default_factory=dict)
    """Entries that replace those of config.json, as JSON."""

    context_length: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    """Most tokens of one sequence, prompt and output. Default: the model's own limit."""

    tokenizer_path: Name | None = None
    """Directory or file of the tokenizer, in the formats that `path` allows. Default: `path`."""

    tokenizer_loader: Literal["auto", "transformers"] = "auto"
    """Tokenizer implementation: auto = remora's faster one where it supports the tokenizer's files,
    else transformers; transformers = always the checkpoint's own class."""

    chat_template: Name | None = None
    """Chat template that replaces the checkpoint's default: a Jinja file (or a .json file with the
    entry chat_template), or the name of another template of the checkpoint."""

    skip_tokenizer: bool = False
    """Whether the model is served without a tokenizer: prompts and outputs are token ids, and texts
    get HTTP 400."""

    eos_token_ids: list[Annotated[int, Field(ge=0)]] | None = Field(
        default=None, min_length=1, max_length=64
    )
    """Token ids that end an output. Default: the checkpoint's."""

    @property
    def download_folder(self) -> Path | None:
        """The folder for downloads; None = the caches of this machine."""
        return download_folder(self.download_dir)

    def _conflicts(self) -> Iterator[tuple[str, str]]:
        if self.download_folder is not None and not self.download_folder.is_absolute():
            yield (
                "download_dir",
                "must be an absolute path: replicas have working directories of their own",
            )
        if self.path.endswith(".gguf") and self.load_format in ("safetensors", "pt"):
            yield "load_format", "path is a .gguf file; use load_format auto or gguf"
        if self.path.endswith(".gguf") and not self.mmap:
            yield "mmap", "path is a .gguf file, which is always mapped"
        if self.load_format == "dummy" and self.verify_checksums:
            yield "verify_checksums", "load_format dummy reads no files"
        if self.skip_tokenizer and self.tokenizer_path is not None:
            yield "tokenizer_path", "skip_tokenizer is true; remove one of the two"
        if self.skip_tokenizer and self.chat_template is not None:
            yield "chat_template", "skip_tokenizer is true, so no chat is rendered"
