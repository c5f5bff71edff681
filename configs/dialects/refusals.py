"""Rules by capability, for features that remora does not have or does not need; for all dialects.

A dialect's own table takes precedence. A name with a trailing dot matches all capabilities that
begin with it; the longest match applies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from remora.configs.dialects.rules import (
    Harmless,
    Means,
    NoEffect,
    Refusal,
    Refused,
    Rule,
    Sets,
    not_yet,
)

_EXPERT_KERNELS = "experts always use Triton's kernels on a GPU, native ones on a CPU; same outputs"
_EXPERT_PARALLEL = not_yet("expert parallelism")
_DISAGGREGATED = not_yet("prefill/decode disaggregation", "parallel.num_replicas adds capacity")
_TIERS = not_yet("KV cache tiers beyond the device's memory", "engine.kv_memory sets its size")
_MULTIMODAL = not_yet("images, video and audio")
_RECURRENT = not_yet("models with recurrent state")
_FP4_EXPERTS = NoEffect("experts in 4 bits are multiplied in one way; activations are never 4 bits")
_MODELOPT = Refused(
    "weights are not calibrated at start-up; export a ModelOpt checkpoint (FP8 or NVFP4) first"
)
_SPARSE = Refused("not offered: sparse attention")
_OWN_KERNELS = NoEffect("remora uses its own attention kernels; same outputs")
_NCCL = Refused("ranks communicate through plain nccl or gloo")
_RAY_PLACES = Refused(
    "Ray starts and places ranks; set parallel.num_nodes and add nodes with `ray start`"
)
_RAY_CONNECTS = NoEffect("Ray connects the nodes, through the ports given to `ray start`")
_HARDWARE = Refused("this hardware is not supported")
_NVTX = Refused("not offered: NVTX ranges; profile with debug.profile_dir")
_ALIKE = "parallel.tp_size divides dense and expert layers alike; other sizes are refused"


def _of_dense_tp(value: int, given: Mapping[str, Any]) -> Harmless:
    if value != (given.get("--tensor-parallel-size") or 1):
        raise Refusal(_ALIKE)
    return Harmless(_ALIKE)


REFUSALS: Mapping[str, Rule] = {
    "moe.": _EXPERT_PARALLEL,
    "moe.runner_backend": NoEffect(_EXPERT_KERNELS),
    "moe.shared_expert_fusion": NoEffect("shared experts run separately; same outputs"),
    "moe.fp4_allgather": _FP4_EXPERTS,
    "moe.mxfp4_precision": _FP4_EXPERTS,
    "deprecated.": NoEffect(f"deprecated; {_EXPERT_KERNELS}"),
    "deprecated.ep_moe": _EXPERT_PARALLEL,
    "deprecated.deepep_moe": _EXPERT_PARALLEL,
    "parallel.ep_size": Refused("not yet: expert parallelism", off=(1,)),
    "parallel.ffn_disaggregate": _DISAGGREGATED,
    "parallel.dp_attention": not_yet("data-parallel attention within tensor parallelism"),
    "parallel.dp_lm_head": not_yet("data-parallel attention within tensor parallelism"),
    "parallel.tp_sp_mix": not_yet("sequence parallelism"),
    "parallel.pp_max_micro_batch": Refused(
        "set the number of parts of a step, parallel.micro_batches, not their size"
    ),
    "parallel.world_rank": _RAY_PLACES,
    "parallel.local_world_size": _RAY_PLACES,
    "parallel.rendezvous_via_registry": _RAY_PLACES,
    "multinode.nnodes": Sets(key="parallel.num_nodes"),
    "multinode.node_rank": NoEffect(
        "Ray places ranks; start the server once, on any node",
        only=(0,),
        otherwise="start the server once, join the other nodes with `ray start`, and leave it out",
    ),
    "multinode.init_addr": NoEffect("ranks meet at rank 0's node, whose address Ray knows"),
    "multinode.http_manager_port": _RAY_CONNECTS,
    "multinode.router_gloo_port": _RAY_CONNECTS,
    "pd.": _DISAGGREGATED,
    "pd.multiplex.": not_yet("prefill and decode on partitions of one GPU"),
    "discovery.": _DISAGGREGATED,
    "discovery.use_local": NoEffect("Ray provides service discovery"),
    "discovery.multimodal_service": _MULTIMODAL,
    "discovery.remote_vit": _MULTIMODAL,
    "hicache.": _TIERS,
    "multimodal.": _MULTIMODAL,
    "multimodal.enabled": NoEffect(
        "text is served, also of models that accept images; requests with images get HTTP 400"
    ),
    "multimodal.fast_image_processor": NoEffect("images are not supported yet"),
    "attention.multimodal_backend": _MULTIMODAL,
    "mamba.": _RECURRENT,
    "quant.modelopt": _MODELOPT,
    "quant.modelopt_restore_path": _MODELOPT,
    "quant.modelopt_save_path": _MODELOPT,
    "memory.host_reserve_bytes": _TIERS,
    "memory.weights_cpu_backup": NoEffect(
        "waking reads the weights from their files again (engine.sleep_mode)"
    ),
    "sparse_attention.": _SPARSE,
    "attention.nsa_decode_backend": _SPARSE,
    "attention.nsa_prefill_backend": _SPARSE,
    "attention.mla.": _OWN_KERNELS,
    "attention.fmha.": _OWN_KERNELS,
    "attention.fmha.nvtx": _NVTX,
    "attention.fmha.show_params": Refused(
        "not offered: printing kernel parameters; `remora doctor` shows the kernels in use"
    ),
    "attention.flashinfer": NoEffect(
        "FlashInfer attends only where engine.attention_backend names it"
    ),
    "attention.xqa": _OWN_KERNELS,
    "attention.triton.reduce_fp32": NoEffect("attention always accumulates in float32"),
    "comm.": _NCCL,
    "comm.custom_allreduce": NoEffect("ranks always communicate through nccl or gloo"),
    "comm.p2p_check": NoEffect("nccl detects peer access between GPUs"),
    "overlap.": Refused("not offered: overlapping compute and communication"),
    "overlap.comm_enabled": NoEffect("compute and communication do not overlap; same outputs"),
    "runtime.non_default_stream": NoEffect("on a GPU steps always run on a separate stream"),
    "runtime.numa_node": Sets(
        key="parallel.numa_nodes",
        how="the CPUs of a node; memory comes from it while there is room",
    ),
    "weights.remote_seed.": Refused(
        "not yet: weights from another server; share a directory of files instead"
    ),
    "moe.recorder.": not_yet("recording which experts tokens use"),
    "runtime.base_gpu_id": Refused("Ray assigns GPUs; hide others with CUDA_VISIBLE_DEVICES"),
    "runtime.gpu_id_step": Refused("Ray assigns GPUs", off=(1,)),
    "cuda_graph.profile_capture": Refused(
        "not offered: a trace of graph capture; profile steps with debug.profile_dir"
    ),
    "cuda_graph.piecewise": NoEffect("a GPU captures steps with prompts by default"),
    "cuda_graph.piecewise_tokens": Refused(
        "the numbers of tokens follow from the largest; set --piecewise-cuda-graph-max-tokens"
    ),
    "kernel.pdl": NoEffect("kernels launch without programmatic dependent launch"),
    "kernel.arm_kleidiai": _HARDWARE,
    "kernel.rocm_hipblaslt_config": _HARDWARE,
    "kernel.deep_gemm_sms": Refused(
        "DeepGEMM is not used; products of weights use cuBLAS, experts Triton's kernels"
    ),
    "determinism.stable_scatter_add": NoEffect("no kernel uses scatter-add"),
    "debug.nvtx": _NVTX,
    "debug.device_perf": Refused(
        "not offered: a report of kernel times; debug.profile_dir writes a trace of kernels, "
        "debug.log_step_times logs steps"
    ),
    "debug.tensor_dump.inject": Refused("not offered: injecting layer inputs"),
    "moe.dense_tp_size": Means(keys=(), reads=_of_dense_tp, why=_ALIKE),
    "lora.chunk_size": NoEffect("the adapter kernel chooses its sizes; same outputs"),
    "routing.wrr_available_ratio": Refused("replicas have no weights; see routing.policy"),
    "sampling.backend": NoEffect(
        "sampling always uses Triton's kernels on a GPU, native ones on a CPU"
    ),
    "http.workers": Refused(
        "Serve's proxy and the replicas accept connections; raise parallel.num_replicas or "
        "routing.num_gateways for more processes",
        off=(1,),
    ),
    "comm.ipc_transport": NoEffect(
        "processes communicate over Unix sockets on one machine and TCP between machines"
    ),
    "http.completion_template": Refused("completions have no template"),
    "http.tool_server": Refused("the client runs tools"),
    "rdma.": _EXPERT_PARALLEL,
    "grammar.outlines_disk_cache": NoEffect("compiled constraints are cached in memory only"),
    "scheduler.batch_decode.": Refused(
        "a decode step never waits for a full batch; engine.admission_interval_steps collects "
        "requests"
    ),
    "runtime.sleep_on_idle": NoEffect("an idle engine always sleeps until a request arrives"),
    "runtime.health_monitor": NoEffect(
        "Ray Serve always probes replicas and replaces failed or hung ones"
    ),
    "scheduler.partial_fallback": NoEffect(
        "pages of a preempted request stay in the prefix cache while there is room"
    ),
    "model.family": NoEffect("the checkpoint's config.json names its family"),
}


def rule_of_capability(capability: str) -> Rule | None:
    """Return the rule of a capability, or of the longest matching prefix."""
    if capability in REFUSALS:
        return REFUSALS[capability]
    prefixes = [name for name in REFUSALS if name.endswith(".") and capability.startswith(name)]
    return REFUSALS[max(prefixes, key=len)] if prefixes else None
