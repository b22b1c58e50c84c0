"""Gives the module frames.c an allocator; frames.c says how to compile it."""

import frames  # type: ignore[import-not-found]  # compiled from frames.c

import bfc
from bfc.integrations.torch_backend import capsule

pool = bfc.CachingAllocator(bfc.HostSubAllocator("64 MiB"))
frames.serve(capsule([pool]))  # one allocator for each device; this is device 0

for _ in range(3):
    held = frames.grab(6 << 20)
print(held, "frames of 6 MiB hold", pool.stats().bytes_in_use >> 20, "MiB")

frames.drop_all()
print("nothing is left" if pool.stats().bytes_in_use == 0 else "a frame is left")

try:
    frames.grab(1 << 30)
except MemoryError as error:
    print("no room:", str(error).splitlines()[0])
