"""Allocates, draws what lies where, runs out of memory, and reads the error.

Needs no GPU.

    $ python examples/first_allocation.py
    simulated:0  97.8 KiB in use (1 chunk), 1.00 MiB reserved, limit 1.00 MiB
    free 926.2 KiB in 2 chunks, the largest 626.2 KiB, fragmentation 32.4%
    0x10000000000    1.00 MiB |_____________________*******____________________________________________|
                              * asked for   x slack   _ free
    900 KiB are refused: 926.2 KiB are free, but in pieces of at most 626.2 KiB
    after b.free(): 900 KiB at 0x10000000000
"""

import bfc
from bfc.units import format_bytes

device = bfc.SimulatedSubAllocator("1 MiB")  # addresses, and no memory behind them
with bfc.BFCAllocator(device) as allocator:
    a, b = allocator.allocate("300 KiB"), allocator.allocate(100_000)
    a.free()
    print(allocator.snapshot())
    try:
        allocator.allocate("900 KiB")
    except bfc.OutOfMemoryError as error:
        free, largest = error.reserved - error.in_use, error.largest_free
        print(
            f"900 KiB are refused: {format_bytes(free)} are free, "
            f"but in pieces of at most {format_bytes(largest)}"
        )
    b.free()
    with allocator.allocate("900 KiB") as whole:
        print(f"after b.free(): 900 KiB at {whole.ptr:#x}")
