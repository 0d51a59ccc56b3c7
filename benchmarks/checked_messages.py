"""What a header and a checksum cost each message over a ring of two ranks on this machine.

    python benchmarks/checked_messages.py

Messages of several sizes go there and back, unchecked and checked in turn, in processes of their own. The least and the
median times are shown: what else runs on the machine can only make a message later.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import mlx.core as mx
from two_ranks import free_ports

from transports import RingWorld, Task, Transport

SIZES = {"64 KB": 1 << 16, "1 MB": 1 << 20, "16 MB": 1 << 24}


def main() -> None:
    """Run both ways in turn and print what was seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="how often each way runs")
    parser.add_argument("--messages", type=int, default=40, help="how many of each size in a run")
    parser.add_argument("--rank", choices=["unchecked", "checked"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        run_rank(args.rank == "checked", args.messages)
        return
    seen: dict[str, dict[str, list[float]]] = {name: {"unchecked": [], "checked": []} for name in SIZES}
    for turn in range(args.rounds):
        for way in ("unchecked", "checked"):
            for name, seconds in run_ranks(way, args.messages).items():
                seen[name][way] += seconds
        print(f"round {turn + 1} of {args.rounds}", file=sys.stderr)
    show(seen)


def run_ranks(way: str, messages: int) -> dict[str, list[float]]:
    """Start both ranks; returns the first one's seconds by size."""
    command = [sys.executable, __file__, "--rank", way, "--messages", str(messages)]
    with tempfile.TemporaryDirectory() as directory:
        hosts = Path(directory) / "hosts.json"
        hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(2)]))
        ring = [{**os.environ, "MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)} for rank in range(2)]
        ranks = [subprocess.Popen(command, env=each, stdout=subprocess.PIPE, text=True) for each in ring]
        said = [rank.communicate(timeout=600)[0] for rank in ranks]
    return json.loads(said[0])


def run_rank(is_checked: bool, messages: int) -> None:
    """Print this rank's seconds from each send to its answer."""
    world = RingWorld(check_messages=is_checked)
    rank = world.local_ranks[0]
    print(json.dumps(world.run({rank: there_and_back(world.transport(rank), messages)})[rank]), flush=True)
    world.close()


def there_and_back(transport: Transport, messages: int) -> Task[dict[str, list[float]]]:
    """Messages go to rank 1 and back, one at a time; the first of each size warms up."""
    seen: dict[str, list[float]] = {}
    for name, size in SIZES.items():
        message, seconds = mx.zeros((size,), mx.uint8), list[float]()
        for _ in range(1 + messages):
            began = perf_counter()
            if transport.rank == 0:
                yield transport.send(message, 1, "there")
            yield transport.arrive(transport.receive((size,), mx.uint8, 1 - transport.rank, "there"))
            if transport.rank == 1:
                yield transport.send(message, 0, "there")
            seconds.append(perf_counter() - began)
        seen[name] = seconds[1:]
    return seen


def show(seen: dict[str, dict[str, list[float]]]) -> None:
    """A row for each size: half of the way there and back."""
    print(
        "| message | unchecked, ms (least, median) | checked, ms (least, median) | checked costs, ms (least, median) |"
    )
    print("|---|---|---|---|")
    for name, ways in seen.items():
        least = {way: min(seconds) * 500 for way, seconds in ways.items()}
        median = {way: statistics.median(seconds) * 500 for way, seconds in ways.items()}
        cells = [f"{least[way]:.3f}, {median[way]:.3f}" for way in ways]
        costs = [each["checked"] - each["unchecked"] for each in (least, median)]
        print(f"| {name} | {' | '.join(cells)} | {costs[0]:.3f}, {costs[1]:.3f} |")
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
