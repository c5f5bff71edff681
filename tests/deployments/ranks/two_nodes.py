"""Replicas on two Ray nodes, simulated on one machine: a rank on each, or all on one by its label.

Run as a program:

    python -m tests.deployments.ranks.two_nodes MODEL

It has a cluster of its own, so it cannot run in a process that is connected to another one.
Prints what it found as one line of JSON, the last of its output.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

PROMPT = "Number 5: what is the capital of France?"
WAIT_S = 150.0
LABELS, KIND = {"zone": "b"}, "H100"  # the label is the second node's, the accelerators are of both
TWO_RANKS = {"tp_size": 2, "num_nodes": 2, "rank_timeout_s": 2.0}
PLACED = {
    "num_replicas": 2,
    "cpus_per_rank": 0.1,
    "label_selector": LABELS,
    "accelerator_type": KIND,
}


def make_args(path: str, parallel: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": {"path": path, "served_name": "tiny2", "dtype": "float32"},
        "engine": {"kv_tokens": 2048, "num_threads": 1},
        "parallel": parallel,
    }


def main() -> None:
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    from remora.deployments.app import build

    both: dict[str, Any] = {
        "num_cpus": 1,
        "resources": {f"accelerator_type:{KIND}": 1},
        "object_store_memory": 80 * 2**20,
    }
    head = {"include_dashboard": False, **both}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    second = cluster.add_node(labels=LABELS, **both)
    ray.init(address=cluster.address, namespace="serve", log_to_driver=False)
    try:
        serve.start(proxy_location="Disabled")
        app = build(make_args(sys.argv[1], TWO_RANKS))
        handle = serve.run(app, name="two", route_prefix=None)
        found: dict[str, Any] = {"text": ask(handle)}
        found |= places(second.node_id)
        name, facts = rank_1()
        found["name"] = name
        os.kill(facts.pid, signal.SIGSTOP)
        stopped = time.monotonic()
        found["text after"] = until_replaced(handle, name)
        found["recovery_s"] = time.monotonic() - stopped
        found["stopped rank lives"] = is_alive(facts.pid)
        serve.delete("two")
        serve.run(build(make_args(sys.argv[1], PLACED)), name="placed", route_prefix=None)
        found |= placed(second.node_id)
        serve.shutdown()
        found["text of one rank"] = text_of_one_rank(sys.argv[1])
        found["groups left"] = [g for g in groups() if g["state"] != "REMOVED"]
    finally:
        ray.shutdown()
        cluster.shutdown()
    sys.stdout.write(json.dumps(found) + "\n")


def ask(handle: Any) -> str:
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 24, "ignore_eos": True}
    return str(handle.completions.remote(body).result(timeout_s=WAIT_S)["choices"][0]["text"])


def text_of_one_rank(path: str) -> str:
    from remora.engine.llm import LLM, SamplingParams

    llm = LLM(path, dtype="float32", kv_tokens=2048, num_threads=1, show_progress=False)
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    return llm.generate([PROMPT], params)[0].text


def groups() -> list[dict[str, Any]]:
    from ray.util import placement_group_table

    return list(placement_group_table().values())


def places(second: str) -> dict[str, Any]:
    """Return where the bundles are, as `ray list placement-groups` would say."""
    (group,) = [group for group in groups() if group["state"] == "CREATED"]
    at = group["bundles_to_node_id"]
    return {
        "strategy": group["strategy"],
        "bundles": group["bundles"],
        "nodes": ["second" if at[index] == second else "head" for index in sorted(at)],
    }


def placed(second: str) -> dict[str, Any]:
    """Return where the replicas with a label are, and how many accelerators are reserved."""
    import ray
    from ray.serve.context import _get_global_client

    details = _get_global_client().get_serve_details()["applications"]["placed"]["deployments"]
    at = [replica["node_id"] for replica in details["LLMServer"]["replicas"]]
    kind = f"accelerator_type:{KIND}"
    reserved = ray.cluster_resources()[kind] - ray.available_resources()[kind]
    return {
        "labelled": ["second" if node == second else "head" for node in at],
        "accelerators": round(reserved, 4),
    }


def rank_1() -> tuple[str, Any]:
    import ray

    names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    (name,) = [name for name in names if name.startswith("remora:tiny2:")]
    return name, ray.get(ray.get_actor(name, namespace="serve").facts.remote(), timeout=20)


def until_replaced(handle: Any, old: str) -> str:
    import ray
    from ray.serve.exceptions import RayServeException

    from remora.configs.errors import RemoraError

    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        try:
            if rank_1()[0] != old:
                return ask(handle)
        except (RemoraError, RayServeException, ray.exceptions.RayError, ValueError):
            pass
        time.sleep(0.2)
    raise TimeoutError(f"{old} was not replaced within {WAIT_S} s")


def is_alive(pid: int) -> bool:
    import psutil  # type: ignore[import-untyped]

    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


if __name__ == "__main__":
    main()
