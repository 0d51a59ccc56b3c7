"""A rank of `JacclWorld` where there is no JACCL: MLX's ring stands in for it, all else is the class's own.

`python tests/jaccl_rank.py DEVICES COORDINATOR`, started as a rank of a ring.
"""

from __future__ import annotations

import os
import sys
import time

import mlx.core as mx

from transports import jaccl, setup
from transports.contract import in_one_run


def late(_: str) -> mx.distributed.Group:
    """Rank 1 joins, and goes on a second later."""
    group = setup.init_group("ring")
    if group.rank() == 1:
        time.sleep(1)
        print(time.monotonic())
    return group


def main() -> None:
    jaccl.check_available, jaccl.init_group = lambda _: None, late
    environ = {"MLX_IBV_DEVICES": sys.argv[1], "MLX_JACCL_COORDINATOR": sys.argv[2], "MLX_RANK": os.environ["MLX_RANK"]}
    world = jaccl.JacclWorld(check_messages=True, environ=environ)
    rank = world.local_ranks[0]
    if rank == 0:
        print(time.monotonic())
    transport = world.transport(rank)
    for promise in in_one_run(transport):
        world.run({rank: promise.check(transport)})
    print(transport.lanes)
    world.close()


if __name__ == "__main__":
    main()
