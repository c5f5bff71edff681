"""What remora does not do, or need not do, by capability: the same for all dialects.

A dialect's own table comes first; this one says the rest. A name ending in a dot stands for all
capabilities that begin so; the longest fitting name counts.
"""

from __future__ import annotations

from collections.abc import Mapping

from remora.configs.dialects.rules import NoEffect, Refused, Rule, not_yet

_SPECULATION = not_yet("speculative decoding")
_EXPERT_PARALLEL = not_yet("expert parallelism")
_DISAGGREGATED = not_yet("prefill/decode disaggregation", "parallel.num_replicas adds capacity")
_TIERS = not_yet("KV tiers beyond the device's memory", "engine.kv_memory sizes the one there is")
_MULTIMODAL = not_yet("images, video and audio")
_RECURRENT = not_yet("models with recurrent state")
_QUANTISED = not_yet(
    "quantised checkpoints", "model.quantization rounds weights to int8 or int4 on a CPU"
)
_OFFLOAD = not_yet("weights in the host's memory")
_SPARSE = Refused("sparse attention is not offered: every token is attended")
_OWN_KERNELS = NoEffect("remora has attention kernels of its own, which give the same outputs")
_NCCL = Refused("sums between ranks go through nccl or gloo as they are")
_RAY_PLACES = Refused(
    "Ray starts and places ranks; give parallel.num_nodes and join the nodes by `ray start`"
)
_HARDWARE = Refused("this hardware is not supported")
_RECORDED_PROMPTS = not_yet("recorded prefill", "prompts are launched kernel by kernel")
_NVTX = Refused("no NVTX ranges are written; profile with debug.profile_dir")

REFUSALS: Mapping[str, Rule] = {
    "spec.": _SPECULATION,
    "moe.": _EXPERT_PARALLEL,
    "moe.runner_backend": NoEffect("experts have kernels of their own here; outputs agree"),
    "moe.shared_expert_fusion": NoEffect("shared experts run beside the others; outputs agree"),
    "moe.fp4_allgather": NoEffect("experts of four bits are dequantised when they load"),
    "moe.mxfp4_precision": NoEffect("experts of four bits are dequantised when they load"),
    "deprecated.": Refused(
        "an old way to choose how experts run, of which there is one here; leave it out"
    ),
    "parallel.ep_size": Refused("not yet: expert parallelism", off=(1,)),
    "parallel.ffn_disaggregate": _DISAGGREGATED,
    "parallel.dp_attention": not_yet("attention that is data parallel within tensor parallelism"),
    "parallel.dp_lm_head": not_yet("attention that is data parallel within tensor parallelism"),
    "parallel.tp_sp_mix": not_yet("sequence parallelism"),
    "parallel.pp_max_micro_batch": Refused(
        "steps are cut into parallel.micro_batches parts; their size follows from that"
    ),
    "parallel.world_rank": _RAY_PLACES,
    "parallel.local_world_size": _RAY_PLACES,
    "parallel.rendezvous_via_registry": _RAY_PLACES,
    "multinode.": _RAY_PLACES,
    "pd.": _DISAGGREGATED,
    "pd.multiplex.": not_yet("prefill and decode on parts of one GPU"),
    "discovery.": _DISAGGREGATED,
    "discovery.use_local": NoEffect("Ray knows where everything runs; nothing else is asked"),
    "discovery.multimodal_service": _MULTIMODAL,
    "discovery.remote_vit": _MULTIMODAL,
    "hicache.": _TIERS,
    "multimodal.": _MULTIMODAL,
    "multimodal.fast_image_processor": NoEffect("no images are taken yet"),
    "attention.multimodal_backend": _MULTIMODAL,
    "mamba.": _RECURRENT,
    "quant.": _QUANTISED,
    "kv_cache.dtype": not_yet("8-bit KV cache"),
    "offload.": _OFFLOAD,
    "memory.host_reserve_bytes": _TIERS,
    "memory.": not_yet("releasing memory while serving"),
    "sparse_attention.": _SPARSE,
    "attention.nsa_decode_backend": _SPARSE,
    "attention.nsa_prefill_backend": _SPARSE,
    "attention.mla.": _OWN_KERNELS,
    "attention.fmha.": _OWN_KERNELS,
    "attention.fmha.nvtx": _NVTX,
    "attention.fmha.show_params": Refused(
        "no parameters of attention kernels are printed; `remora doctor` says which run"
    ),
    "attention.flashinfer": NoEffect("FlashInfer is never chosen"),
    "attention.xqa": _OWN_KERNELS,
    "attention.triton.reduce_fp32": NoEffect("attention always adds up in float32"),
    "comm.": _NCCL,
    "comm.custom_allreduce": NoEffect("sums go through nccl or gloo, always"),
    "comm.p2p_check": NoEffect("nccl checks by itself which GPUs reach each other"),
    "overlap.": Refused("compute and communication are not overlapped"),
    "overlap.comm_enabled": NoEffect("compute and communication take turns; outputs agree"),
    "runtime.non_default_stream": NoEffect("on a GPU steps run on a stream of their own, always"),
    "runtime.numa_node": Refused(
        "ranks are not bound to NUMA nodes; start the server with numactl --cpunodebind"
    ),
    "runtime.base_gpu_id": Refused("Ray assigns GPUs; hide others by CUDA_VISIBLE_DEVICES"),
    "runtime.gpu_id_step": Refused("Ray assigns GPUs", off=(1,)),
    "cuda_graph.profile_capture": Refused(
        "no trace of recording graphs is written; profile steps with debug.profile_dir"
    ),
    "cuda_graph.piecewise": _RECORDED_PROMPTS,
    "cuda_graph.piecewise_max_tokens": _RECORDED_PROMPTS,
    "cuda_graph.piecewise_tokens": _RECORDED_PROMPTS,
    "kernel.pdl": NoEffect("kernels are launched one after the other, without that attribute"),
    "kernel.arm_kleidiai": _HARDWARE,
    "kernel.rocm_hipblaslt_config": _HARDWARE,
    "kernel.deep_gemm_sms": Refused("DeepGEMM is not used"),
    "determinism.stable_scatter_add": NoEffect("nothing is added by scattering"),
    "debug.nvtx": _NVTX,
    "debug.device_perf": Refused(
        "times of single kernels are not shown; debug.profile_dir writes a trace that holds them, "
        "debug.log_step_times those of steps"
    ),
    "debug.tensor_dump.inject": Refused("outputs of another program cannot be fed to layers"),
    "model.revision": Refused(
        "nothing is downloaded at start-up; fetch the revision with `hf download` and give its "
        "folder as the model"
    ),
    "weights.download_dir": Refused(
        "nothing is downloaded at start-up; give the folder of the model"
    ),
    "weights.remote_seed.": Refused("weights are read from files, not from another server"),
    "moe.dense_tp_size": Refused(
        "dense layers are divided as those of experts are: parallel.tp_size divides both"
    ),
    "lora.chunk_size": NoEffect("the kernel of adapters chooses its own sizes; outputs agree"),
    "routing.wrr_available_ratio": Refused("replicas have no weights; see routing.policy"),
    "sampling.backend": NoEffect("sampling has one implementation for each device"),
    "http.workers": Refused(
        "Serve's proxy and the replicas take connections; parallel.num_replicas or "
        "routing.num_gateways give more processes",
        off=(1,),
    ),
    "comm.ipc_transport": NoEffect(
        "processes talk over Unix sockets of their own on one machine and TCP between machines"
    ),
    "http.completion_template": Refused("completions have no template"),
    "http.tool_server": Refused("tools are the client's to run"),
    "rdma.": _EXPERT_PARALLEL,
    "grammar.outlines_disk_cache": NoEffect("tables of constraints are kept in memory only"),
    "scheduler.batch_decode.": Refused(
        "a decode step never waits for a full batch, which too few requests would never fill; "
        "engine.admission_interval_steps gathers requests"
    ),
    "runtime.sleep_on_idle": NoEffect("an idle engine always sleeps until a request comes"),
    "runtime.health_monitor": NoEffect(
        "Ray Serve always probes replicas and replaces those that have died or hang"
    ),
    "sampling.diverse_mode": NoEffect(
        "outputs of one prompt (n, best_of) always share its pages and draw for themselves"
    ),
    "scheduler.partial_fallback": NoEffect(
        "pages of a preempted request stay in the prefix cache while there is room"
    ),
    "model.family": NoEffect("the checkpoint's config.json names its family"),
}


def rule_of_capability(capability: str) -> Rule | None:
    """Return what is said of a capability, or of the longest beginning of its name."""
    if capability in REFUSALS:
        return REFUSALS[capability]
    prefixes = [name for name in REFUSALS if name.endswith(".") and capability.startswith(name)]
    return REFUSALS[max(prefixes, key=len)] if prefixes else None
