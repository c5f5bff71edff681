"""vLLM's arguments that have no effect here, or are refused, with the reason of each.

Arguments whose subject other servers have too are in `configs/dialects/refusals.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from remora.configs.dialects.rules import NoEffect, Refused, Rule, not_yet
from remora.configs.dialects.vllm.engine_values import EXPERTS, LOCAL, NUMA

_CONTEXT = Refused("not yet: context parallelism", off=(1,))
_BALANCER = Refused(
    "Serve's proxy, the gateway or HAProxy balances requests over replicas; --data-parallel-size "
    "is their number"
)
_SUPERVISOR = NoEffect("Ray Serve probes replicas; there is no supervisor")
_OWN_CODE = Refused("Python code from outside the package is not loaded into the server")
_DETAIL = Refused("not offered: this measurement; /metrics lists what is measured")
_REVISION = Refused("code is that of the model's revision: --revision")
_KERNELS = NoEffect("remora chooses the kernels; same outputs")
_PRODUCTS = NoEffect("products of weights have one set of kernels for each device")
_ADAPTER_KERNELS = NoEffect("there is one set of adapter kernels for each device; same outputs")
_SLEEP = NoEffect("waking reads the weights from their files again (engine.sleep_mode)")
_COHERE = NoEffect("answers of Cohere's API have one form here, whatever the model")
_NO_GRPC = Refused("not offered: gRPC; the HTTP APIs are in docs/http-api.md")
_OFFLOADED = NoEffect("no page leaves the device's memory")

HTTP: Mapping[str, Rule] = {
    "--chat-template-content-format": NoEffect(
        "templates get the content of a message as a text",
        only=("auto", "string"),
        otherwise="not offered: content as a list of parts; auto and string work",
    ),
    "--trust-request-chat-template": Refused(
        "templates that clients send are never run; set model.chat_template"
    ),
    "--response-role": NoEffect(
        "answers have the role assistant",
        only=("assistant",),
        otherwise="not offered: other roles; leave it out",
    ),
    "--enable-auto-tool-choice": NoEffect(
        "tool_choice auto is always served; the parser follows from the chat template"
    ),
    "--exclude-tools-when-tool-choice-none": NoEffect(
        "with tool_choice none the prompt has no tools"
    ),
    "--tool-parser-plugin": _OWN_CODE,
    "--reasoning-parser-plugin": _OWN_CODE,
    "--tool-strict-level": NoEffect(
        "tool calls are constrained where the request says so",
        only=("auto",),
        otherwise="not offered: stricter than the request says; auto works",
    ),
    "--enable-prompt-tokens-details": NoEffect("the usage always includes cached tokens"),
    "--enable-server-load-tracking": NoEffect("/load always reports requests in progress"),
    "--enable-log-deltas": NoEffect("an answer is logged once, as a whole"),
    "--cohere-is-reasoning-model": _COHERE,
    "--cohere-format": _COHERE,
    "--anthropic-disabled-thinking-effort": NoEffect(
        "disabled thinking turns reasoning off where the template can",
        only=("auto", "none"),
        otherwise="not offered: an effort for disabled thinking; auto works",
    ),
    "--log-error-stack": Refused(
        "errors are logged in one line; metrics.log_level DEBUG says more"
    ),
    "--grpc-port": _NO_GRPC,
    "--grpc": _NO_GRPC,
    "--uds": Refused("Serve's proxy listens on a TCP port: --host and --port"),
    "--enable-ssl-refresh": NoEffect("files that have been replaced are always read again"),
    "--ssl-ciphers": Refused("TLS 1.2 and 1.3 are spoken, with the ciphers that OpenSSL chooses"),
    "--middleware": _OWN_CODE,
    "--enable-request-id-headers": NoEffect("responses always have x-request-id"),
    "--enable-offline-docs": NoEffect("/docs needs no files from elsewhere"),
    "--enable-flash-late-interaction": NoEffect("late interaction is not scored"),
    "--io-processor-plugin": _OWN_CODE,
    "--return-sampling-mask": Refused("not offered: the tokens that sampling left"),
    "--logprobs-mode": NoEffect(
        "log-probabilities are those of the model, before penalties and temperature",
        only=("raw_logprobs",),
        otherwise="not offered: other stages; raw_logprobs works",
    ),
    "--aux-output-config": Refused("not offered: auxiliary outputs"),
    "--reasoning-config": NoEffect("the reasoning parser knows the texts that enclose reasoning"),
}

MODEL: Mapping[str, Rule] = {
    "--code-revision": _REVISION,
    "--quantization-config": Refused(
        "not offered: details of rounding; model.quantization_overrides sets formats by layer"
    ),
    "--allow-deprecated-quantization": NoEffect("no format is deprecated"),
    "--use-fp64-gumbel": Refused("not offered: sampling noise in float64"),
    "--enable-trace-replay": Refused("not offered: replaying a trace"),
    "--disable-sliding-window": Refused(
        "the window is part of the model's attention; set --max-model-len to its length"
    ),
    "--disable-cascade-attn": NoEffect("deprecated, without effect in vLLM too"),
    "--config-format": NoEffect(
        "config.json is read",
        only=("auto", "hf"),
        otherwise="not offered: Mistral's params.json; use the checkpoint in Hugging Face layout",
    ),
    "--hf-token": Refused("a secret must not be in a configuration; set the variable HF_TOKEN"),
    "--model-class-overrides": _OWN_CODE,
    "--logits-processors": Refused(
        "processors apply to requests that name them: list them in engine.logit_processors"
    ),
    "--sleep-mode-backend": _SLEEP,
    "--sleep-mode-offload-cudagraph": _SLEEP,
    "--sleep-preserve-parameter-names": _SLEEP,
    "--enable-cumem-allocator": _SLEEP,
    "--safetensors-prefetch-block-size": NoEffect("the system chooses how much is read at once"),
    "--ignore-patterns": NoEffect("only files that the model needs are downloaded"),
    "--use-tqdm-on-load": NoEffect("the log names what is loaded"),
    "--pt-load-map-location": NoEffect("PyTorch files are read into host memory"),
    "--max-parallel-loading-workers": NoEffect("each rank reads only its part of the files"),
    "--weight-transfer-config": Refused(
        "not offered: a trainer's process group; /update_weights_from_disk and "
        "/update_weights_from_tensor install weights (model.weight_roots)"
    ),
    "--diffusion-config": Refused("not offered: diffusion language models"),
    "--engram-config": Refused("not offered: lookup-memory layers"),
    "--watermark-config": Refused("not offered: watermarks in generated text"),
}

PARALLEL: Mapping[str, Rule] = {
    "--distributed-executor-backend": NoEffect(
        "Ray actors are the ranks",
        only=("ray", "mp", "uni"),
        otherwise="not offered: ranks started by another program; leave it out",
    ),
    "--data-parallel-backend": NoEffect(
        "Ray starts the replicas", only=("mp", "ray"), otherwise="supported: mp, ray"
    ),
    "--data-parallel-size-local": LOCAL,
    "--data-parallel-rank": _BALANCER,
    "--data-parallel-start-rank": _BALANCER,
    "--data-parallel-address": _BALANCER,
    "--data-parallel-rpc-port": _BALANCER,
    "--data-parallel-hybrid-lb": _BALANCER,
    "--data-parallel-external-lb": _BALANCER,
    "--data-parallel-multi-port-external-lb": _BALANCER,
    "--headless": _BALANCER,
    "--data-parallel-supervisor-port": _SUPERVISOR,
    "--dp-supervisor-probe-interval-s": _SUPERVISOR,
    "--dp-supervisor-probe-timeout-s": _SUPERVISOR,
    "--dp-supervisor-probe-failure-threshold": _SUPERVISOR,
    "--dp-sync-interval": NoEffect("replicas are independent of each other"),
    "--disable-nccl-for-dp-synchronization": NoEffect("replicas are independent of each other"),
    "--numa-bind": NUMA,
    "--numa-bind-cpus": Refused("--numa-bind-nodes binds a rank to all CPUs of a node"),
    "--decode-context-parallel-size": _CONTEXT,
    "--dcp-comm-backend": _CONTEXT,
    "--dcp-q-replicate": _CONTEXT,
    "--dcp-kv-cache-interleave-size": _CONTEXT,
    "--cp-kv-cache-interleave-size": _CONTEXT,
    "--prefill-context-parallel-size": _CONTEXT,
    "--enable-hc-sp": not_yet("sequence parallelism"),
    "--enable-expert-parallel": EXPERTS,
    "--enable-batch-sharded-sampling": NoEffect("rank 0 samples; same outputs"),
    "--ubatch-size": Refused("not offered: overlapping compute and communication", off=(1,)),
    "--ray-workers-use-nsight": Refused("not offered: Nsight; profile with debug.profile_dir"),
    "--worker-cls": Refused("a rank runs remora's own class", off=("auto",)),
    "--worker-extension-cls": _OWN_CODE,
    "--enable-fault-tolerance": NoEffect(
        "Ray Serve always replaces a replica that fails, and the others go on"
    ),
    "--fault-tolerance-config": Refused("Ray Serve decides; see routing.resume_on_failure"),
    "--additional-config": Refused("not offered: platform plugins"),
    "--fail-on-environ-validation": NoEffect("vLLM's variables are not read"),
}

ENGINE: Mapping[str, Rule] = {
    "--prefix-caching-hash-algo": NoEffect(
        "pages are found by their tokens in a tree; hashes only route requests"
    ),
    "--prefix-cache-retention-interval": NoEffect(
        "pages of window layers stay cached until memory is needed"
    ),
    "--prefix-match-unit": Refused("prefixes are matched by pages; set --block-size"),
    "--kv-sharing-fast-prefill": NoEffect("prompts are computed in all layers; same outputs"),
    "--swa-bounded-replay": NoEffect("a cached prefix is used up to its last complete window"),
    "--kv-offloading-backend": _OFFLOADED,
    "--long-prefill-token-threshold-adaptive": Refused(
        "not offered: a limit that follows the load; --long-prefill-token-threshold is fixed"
    ),
    "--scheduler-cls": _OWN_CODE,
    "--scheduler-reserve-full-isl": NoEffect(
        "a prompt is admitted when all of it and its expected output have room",
        only=(True,),
        otherwise="not offered: admitting a prompt by its first chunk; leave it out",
    ),
    "--ir-op-priority": _KERNELS,
    "--enable-flashinfer-autotune": _KERNELS,
    "--monokernel": _KERNELS,
    "--kernel-config": _KERNELS,
    "--linear-backend": _PRODUCTS,
    "--lora-dtype": NoEffect(
        "adapters are computed in the model's format",
        only=("auto",),
        otherwise="not offered: another format than the model's; auto works",
    ),
    "--fully-sharded-loras": NoEffect("how ranks share an adapter does not change outputs"),
    "--specialize-active-lora": _ADAPTER_KERNELS,
    "--enable-mixed-moe-lora-format": Refused("adapters of experts have one layout"),
    "--enable-moe-shared-loras": Refused("adapters of experts have one layout"),
    "--max-lora-cls-labels": Refused("not offered: adapters that classify"),
}

OBSERVING: Mapping[str, Rule] = {
    "--show-hidden-metrics-for-version": NoEffect("no metric is hidden"),
    "--collect-detailed-traces": Refused(
        "each request has the spans queued, prefill and decode; debug.profile_dir shows kernels"
    ),
    "--kv-cache-metrics": _DETAIL,
    "--kv-cache-metrics-sample": _DETAIL,
    "--cudagraph-metrics": _DETAIL,
    "--enable-mfu-metrics": _DETAIL,
    "--jit-monitor-mode": NoEffect(
        "kernels are compiled before requests are served",
        only=("warn",),
        otherwise="not offered: ending at a compilation; leave it out",
    ),
    "--jit-monitor-verbose": NoEffect("kernels are compiled before requests are served"),
    "--aggregate-engine-logging": NoEffect("each replica logs its own line"),
}

_MEDIA = NoEffect(
    "images, video and audio are not read yet: text is served, and requests with others get "
    "HTTP 400"
)
# What only tunes how media are read; arguments that need media to be read are refused.
MEDIA: Mapping[str, Rule] = dict.fromkeys(
    (
        "--limit-mm-per-prompt",
        "--allowed-local-media-path",
        "--allowed-media-domains",
        "--media-io-kwargs",
        "--mm-processor-kwargs",
        "--mm-processor-cache-gb",
        "--mm-processor-cache-type",
        "--mm-hasher-algorithm",
        "--mm-shm-cache-max-object-size-mb",
        "--mm-encoder-tp-mode",
        "--mm-encoder-attn-backend",
        "--mm-encoder-attn-dtype",
        "--mm-encoder-fp8-scale-path",
        "--mm-encoder-fp8-scale-save-margin",
        "--interleave-mm-strings",
        "--skip-mm-profiling",
        "--video-pruning-rate",
        "--video-pruning-method",
        "--mm-tensor-ipc",
        "--mm-processor-device",
        "--mm-ipc-gpu-memory-gb",
        "--mm-device-do-normalize",
        "--disable-chunked-mm-input",
        "--ec-manager-config",
    ),
    _MEDIA,
)
# Arguments of older releases, which commands in use still have.
FORMER: Mapping[str, Rule] = {
    "--swap-space": NoEffect("preempted requests are computed again; vLLM dropped it too"),
    "--enable-reasoning": NoEffect("the reasoning parser is on where the template has reasoning"),
    "--num-scheduler-steps": NoEffect("the next step is planned while one runs (engine.overlap)"),
    "--use-v2-block-manager": NoEffect("there is one manager of pages"),
    "--max-num-partial-prefills": NoEffect("any number of prompts may be in progress"),
    "--lora-extra-vocab-size": Refused("adapters cannot add tokens", off=(256,)),
    "--disable-frontend-multiprocessing": NoEffect("HTTP and engine share a replica's process"),
}

RULES: Mapping[str, Rule] = {**FORMER, **MEDIA, **HTTP, **MODEL, **PARALLEL, **ENGINE, **OBSERVING}
