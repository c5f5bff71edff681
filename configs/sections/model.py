"""Which weights, by which name, in which number format: the section `model`, tokenizer included."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from remora.configs.fields import Name, Section, conflict


class ModelSection(Section):
    """Which model is served, by which name, in which number format."""

    path: Name
    """Folder in Hugging Face layout, a .gguf file, or the built-in model smollm2-135m-instruct.
    Best absolute: a relative path counts from the folder that the replica runs in."""

    served_name: Name | None = None
    """Name that clients put into `model`. Default: the last part of `path`, without .gguf."""

    task: Literal["auto", "generate", "embed", "classify", "rerank", "reward"] = "auto"
    """What the model is for: text, embeddings, or scores of classes, of pairs of a query and a
    document, or of answers. Decides which routes answer. auto = what the checkpoint was made for;
    embed serves a model that generates as an embedder, rerank as one that says yes or no."""

    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Number format of weights, activations and KV cache; auto = the checkpoint's own."""

    quantization: Literal["none", "int8", "int4"] = "none"
    """Format that the weights are rounded to at start-up, on a CPU with native kernels: int8 halves
    them (groups of 64), int4 makes them a third (groups of 32; the head stays int8)."""

    impl: Literal["auto", "remora", "transformers"] = "auto"
    """Whose code runs the model: remora = our own, for the families that it knows; transformers =
    that of the package transformers on our KV cache, which knows more families and is slower;
    auto = our own where it can, else transformers'."""

    trust_remote_code: bool = False
    """Whether Python code that lies beside the weights is run, where config.json or the tokenizer
    names some. It can do all that the server can: read it first."""

    load_format: Literal["auto", "safetensors", "gguf", "pt", "dummy"] = "auto"
    """How weights are read; auto = safetensors or GGUF, as `path` is; pt = PyTorch's own files
    (pytorch_model.bin, *.pt), tensors alone; dummy = random numbers, for trials without weights."""

    mmap: bool = True
    """Whether weight files are mapped into memory while they are read; off: each tensor is read
    into memory whole, of PyTorch's files each file, which some network file systems do better."""

    load_threads: Annotated[int, Field(ge=1, le=64)] = 2
    """Threads that fill the weights from the files, so that one copies while another waits for the
    disk; so many tensors take memory at a time."""

    verify_checksums: bool = False
    """Whether weight files are read once more at first and compared with the SHA-256 noted beside
    them: FILE.sha256, SHA256SUMS, or what `hf download` wrote. A file without one is refused."""

    delete_after_load: bool = False
    """Whether the weight files are removed once the model is loaded, for want of space. A replica
    that starts again then finds none."""

    weight_roots: list[Name] = Field(default_factory=list, max_length=64)
    """Folders below which /update_weights_from_disk may read other weights of the same model while
    it serves. A replica that starts again begins with `path`. On a CPU, with one replica of one
    rank, no adapters, and memory for two copies. Default: none; the route is off."""

    weight_loaders: list[Name] = Field(default_factory=list, max_length=64)
    """Functions that /update_weights_from_disk may name as `load_format`: module:function on the
    replica's Python path. Each takes what the request says as `model_path` and gives pairs of a
    name, as in the checkpoint, and a tensor: all of the model's. Otherwise as weight_roots."""

    weight_version: Name = "default"
    """Label of the weights, told as `weight_version` in /model_info until an update brings
    another."""

    config_overrides: dict[str, Any] = Field(default_factory=dict)
    """Entries of config.json, as JSON, in the place of the checkpoint's own."""

    context_length: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    """Most tokens of one sequence, prompt and output. Default: what the model was made for."""

    tokenizer_path: Name | None = None
    """Where the tokenizer is, if it is not with the model: what `path` may be."""

    tokenizer_loader: Literal["auto", "transformers"] = "auto"
    """What reads the tokenizer: auto = our own reader where it understands all of its files, which
    is faster, else transformers; transformers = always the checkpoint's own class."""

    chat_template: Name | None = None
    """What chats are written by in place of the checkpoint's default template: a file in Jinja's
    language (of a .json file its entry chat_template), or the name of another of its templates."""

    skip_tokenizer: bool = False
    """Whether the model is served without tokenizer: token ids in and out, texts get HTTP 400."""

    eos_token_ids: list[Annotated[int, Field(ge=0)]] | None = Field(
        default=None, min_length=1, max_length=64
    )
    """Token ids that end an output. Default: what the checkpoint says."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.path.endswith(".gguf") and self.load_format in ("safetensors", "pt"):
            raise conflict("load_format", "path is a .gguf file; use load_format auto or gguf")
        if self.path.endswith(".gguf") and not self.mmap:
            raise conflict("mmap", "path is a .gguf file, which is always mapped")
        if self.load_format == "dummy" and self.verify_checksums:
            raise conflict("verify_checksums", "load_format dummy reads no files")
        if self.skip_tokenizer and self.tokenizer_path is not None:
            raise conflict("tokenizer_path", "skip_tokenizer is true; leave one of them out")
        if self.skip_tokenizer and self.chat_template is not None:
            raise conflict("chat_template", "skip_tokenizer is true, so no chats are written")
        return self
