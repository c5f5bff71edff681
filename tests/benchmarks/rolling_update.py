"""A rolling update, and a scale-down from 3 replicas to 1, under 300 streams.

    python tests/benchmarks/rolling_update.py [--proxy haproxy] [--streams 300] [--tokens 600]

Prints a row for each; anything but `whole` would be a stream that failed or was cut short.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.deployments.lifecycle.load import Load
from tests.deployments.lifecycle.rolling import KNOWN, change_under_load, with_replicas, with_seed
from tests.deployments.lifecycle.server import Server, make_serve_config, running
from tests.tiny_models import make_tiny_checkpoint


async def measure(server: Server, config: dict[str, object], args: argparse.Namespace) -> None:
    """Make both changes, one after the other."""
    changed = with_seed(config, 1)
    async with Load(server.url, args.tokens) as load:
        await load.learn(KNOWN)
        for name, after in (("update", changed), ("3 to 1", with_replicas(changed, 1))):
            change = await change_under_load(
                server, load, after, num_streams=args.streams, per_second=args.per_second
            )
            load.streams.clear()
            print(
                f"| {args.proxy} | {name} | {change.num_streams} | {change.peak_running} | "
                f"{dict(change.verdicts)} | {change.change_s:.1f} s |"
            )
            print("\n".join(change.failures[:20]))


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--proxy", default="python", choices=("python", "haproxy"))
    parser.add_argument("--streams", type=int, default=300)
    parser.add_argument("--per-second", type=float, default=15.0)
    parser.add_argument("--tokens", type=int, default=600)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_checkpoint(Path(folder) / "model", "llama", max_position_embeddings=8192)
        config = make_serve_config(
            model,
            parallel={"num_replicas": 3},
            engine={"max_running_requests": 128, "kv_tokens": 200_000},
            api={"drain_timeout_s": 300.0},
        )
        with running(config, Path(folder), proxy=args.proxy) as server:
            asyncio.run(measure(server, config, args))


if __name__ == "__main__":
    main()
