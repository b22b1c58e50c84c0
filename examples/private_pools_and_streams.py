"""PyTorch's policy by hand: memory kept by stream, a use on another stream, and a private pool.
Needs no GPU: a simulated stream is finished when the program says so.

    $ python examples/private_pools_and_streams.py
    reused while the copy is under way: False
    reused when it is done: True
    the private pool keeps [20] MiB; the request outside got a segment of its own:
    120 MiB are reserved in all
"""

import bfc

COMPUTE, COPIES = 2, 4  # handles of two streams

device = bfc.SimulatedSubAllocator("1 GiB")
with bfc.CachingAllocator(device) as allocator:
    with bfc.use_stream(COMPUTE):
        activations = allocator.allocate("40 MiB")
    first = activations.ptr

    # The other stream still reads the activations when they are freed.
    device.hold(COPIES)
    allocator.record_stream(activations, COPIES)
    activations.free()
    with bfc.use_stream(COMPUTE):
        early = allocator.allocate("40 MiB")
    print("reused while the copy is under way:", early.ptr == first)
    early.free()

    device.finish(COPIES)
    with bfc.use_stream(COMPUTE):
        kept = [allocator.allocate("40 MiB") for _ in range(2)]
    print("reused when it is done:", first in [buffer.ptr for buffer in kept])

    # No other part of the program gets what the private pool has.
    pool = bfc.MemPool(allocator)
    with bfc.use_mem_pool(pool):
        cache = allocator.allocate("3 MiB")
    cache.free()
    other = allocator.allocate("3 MiB")
    segments = [region.size >> 20 for region in pool.snapshot().regions]
    print("the private pool keeps", segments, "MiB; the request outside got a segment of its own:")
    reserved = allocator.memory_stats()["reserved_bytes.all.current"] >> 20
    print(reserved, "MiB are reserved in all")
    del kept, other
    pool.release()
