"""A loader that copies batches to a device from pinned memory, and pins each block only once.

Needs `pip install 'bfc-allocator[cuda]' cuda-core`. With --emulated it runs on machines without a
GPU, on the CUDA driver of `bfc.testing`.

    $ python examples/pinned_batches.py --emulated
    8 batches copied, their means add up to 28
    1 block of 1048576 bytes was pinned
"""

import argparse

import numpy as np

import bfc
from bfc.testing import cuda_emulator

SHAPE = (64, 3, 32, 32)


def main(emulated: bool) -> None:
    if emulated:
        cuda_emulator.load()  # before anything calls CUDA
    elif not bfc.cuda.is_available():
        raise SystemExit(f"{bfc.cuda.is_available()}\nTry --emulated.")
    from cuda.core import Device

    device = Device(0)
    device.set_current()
    stream = device.create_stream()
    nbytes = 4 * int(np.prod(SHAPE))
    source = bfc.CUDASubAllocator(0)
    with (
        bfc.BFCAllocator(source, memory_limit="64 MiB", stream=stream) as pool,
        bfc.PinnedAllocator() as pinned,
    ):
        there = pool.allocate(nbytes).view("float32", SHAPE)
        addresses, total = set(), 0.0
        for number in range(8):
            batch = pinned.allocate(nbytes).view("float32", SHAPE)
            addresses.add(batch.base.ptr)
            np.asarray(batch)[:] = number  # what a loader reads from its files
            bfc.copy(there, batch, non_blocking=True, stream=stream)
            del batch  # while the copy may be under way: the block waits for the stream
            total += float(there.to_host().mean())  # waits for the stream, as a step would
        stats = pinned.host_memory_stats()
        print(f"8 batches copied, their means add up to {total:g}")
        print(f"{len(addresses)} block of {stats['allocated_bytes.current']} bytes was pinned")
        del there


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--emulated", action="store_true", help="run without a GPU")
    main(parser.parse_args().emulated)
