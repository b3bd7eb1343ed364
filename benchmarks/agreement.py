"""What agreement between ranks costs a step: ``python -m benchmarks.agreement``.

Streams of 2 to 64 simulated ranks on one store, in one process: the time that each takes in a step
that was met before, and the store's answers that each needs. Neither may grow with the ranks.
"""

from __future__ import annotations

import time

import torch.distributed as dist

from torpor.distributed import agreement

STEPS = 2_000
BUCKETS = [(f"all_reduce(float32[{1 << 20}], sum)", f"train.py:{line}") for line in range(4)]


def measure(size: int, stride: float) -> tuple[float, float]:
    """Microseconds of a step on the first rank and on another, of `size`; looks after `stride`."""
    store = dist.HashStore()
    ranks = [agreement.CollectiveStream(store, rank, size) for rank in range(size)]
    for rank in ranks:
        rank.known.add(agreement.digest_of(BUCKETS))
    store.set(f"text/{agreement.digest_of(BUCKETS)}", agreement.text_of(BUCKETS))
    seconds = [0.0, 0.0]
    agreement.LOOK = stride
    for _ in range(STEPS):
        for number, rank in enumerate(ranks[:: size - 1]):
            start = time.perf_counter()
            rank.enter(BUCKETS)
            seconds[number] += time.perf_counter() - start
    return seconds[0] / STEPS * 1e6, seconds[1] / STEPS * 1e6


def main() -> None:
    print("ranks  first rank   another   (us a step; looking at the store at every step: us)")
    usually = agreement.LOOK
    for size in (2, 8, 64):
        usual, each = measure(size, usually), measure(size, 0.0)
        print(f"{size:5}  {usual[0]:10.1f} {usual[1]:9.1f}   ({each[0]:.1f}, {each[1]:.1f})")


if __name__ == "__main__":
    main()
