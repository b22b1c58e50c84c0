"""One pool of CUDA memory under numba, cuda.core and, on a GPU, CuPy.

Needs `pip install 'bfc-allocator[cuda]' cuda-core numba-cuda`. With --emulated it runs on machines
without a GPU, on the CUDA driver of `bfc.testing`, which CuPy refuses.

    $ python examples/one_pool.py --emulated
    numba's array        4096 bytes of the pool
    cuda.core's buffer   5120 bytes of the pool
    our own buffer     131072 bytes of the pool
    numba has written [0. 1. 2. 3. 4. 5. 6. 7.]
    0 bytes are in use at the end
"""

import argparse
import importlib.util

import numpy as np

import bfc
from bfc.testing import cuda_emulator


def main(emulated: bool) -> None:
    if emulated:
        cuda_emulator.load()  # before anything calls CUDA
    elif not bfc.cuda.is_available():
        raise SystemExit(f"{bfc.cuda.is_available()}\nTry --emulated.")
    from cuda.core import Device
    from numba import cuda

    has_cupy = not emulated and importlib.util.find_spec("cupy") is not None
    libraries = ["numba", "cuda_core", *(["cupy"] if has_cupy else [])]
    source = bfc.CUDASubAllocator(0)
    with bfc.BFCAllocator(source, memory_limit="1 GiB", allow_growth=True) as pool:
        with bfc.use(pool, *libraries):
            used = 0

            def account(what: str) -> None:
                nonlocal used
                now = pool.stats().bytes_in_use
                print(f"{what:18} {now - used:6} bytes of the pool")
                used = now

            host = np.arange(1000, dtype="float32")
            array = cuda.to_device(host)
            account("numba's array")

            device = Device(0)
            device.set_current()
            buffer = device.allocate(5000, stream=device.default_stream)
            account("cuda.core's buffer")

            ours = pool.allocate("128 KiB").view("float32", (128, 256))
            account("our own buffer")
            cuda.as_cuda_array(ours)[0, :8].copy_to_device(array[:8])  # no copy on the way
            print("numba has written", ours.to_host()[0, :8])

            if has_cupy:
                import cupy

                squares = cupy.arange(100, dtype="float32") ** 2
                account("CuPy's arrays")
                del squares
            buffer.close()
            del array, buffer, ours
        print(pool.stats().bytes_in_use, "bytes are in use at the end")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--emulated", action="store_true", help="run without a GPU")
    main(parser.parse_args().emulated)
