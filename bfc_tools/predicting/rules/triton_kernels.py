"""Triton's kernels: they write into tensors that the program has made, and take none themselves.

Nothing is compiled, and nothing runs. A driver stands in for that of the GPU, since programs ask it
for the device and its properties. An autotuned kernel takes its first configuration; while it is
tuned, Triton clears a buffer of 256 MiB before each run (triton/testing.py, do_bench, and
triton/backends/nvidia/driver.py, get_empty_cache_for_benchmark).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from bfc.libraries import torch
from bfc_tools.predicting import ordinal
from bfc_tools.predicting.arrivals import Arrivals
from bfc_tools.predicting.rules.operators import around, file

#: What a kernel may hold of a multiprocessor, by compute capability: the most of shared memory for
#: a block, in bytes (CUDA C++ Programming Guide, technical specifications).
SHARED = {(7, 0): 96, (7, 5): 64, (8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227}


@around(
    source=(
        file("triton-lang/triton: python/triton/testing.py", read="3.9.0"),
        file("triton-lang/triton: third_party/nvidia/backend/driver.py", read="3.9.0"),
    )
)
@contextmanager
def kernels_of_triton(recorder: Any) -> Iterator[None]:
    """While a prediction runs, a launch of a kernel only notes that there was one."""
    with ExitStack() as stack:

        def change_kernels(module: Any) -> None:
            stack.enter_context(patch.object(module.JITFunction, "run", _launch(recorder)))

        def change_driver(module: Any) -> None:
            held = vars(module.driver)
            stack.callback(held.update, dict(held))
            module.driver.set_active(Driver(recorder))

        stack.enter_context(Arrivals(["triton.runtime.jit"], change_kernels))
        stack.enter_context(Arrivals(["triton.runtime.driver"], change_driver))
        yield


def body_of(operator: str) -> Callable[..., Any] | None:
    """The function that `torch.library.triton_op` has made an operator of, or None."""
    from torch._library import custom_ops, triton

    if operator not in triton.triton_ops_to_kernels:
        return None
    body: Callable[..., Any] = custom_ops.OPDEFS[operator]._init_fn
    return body


def _launch(recorder: Any) -> Callable[..., Any]:
    """What stands for `JITFunction.run`."""

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        for hook in self.pre_run_hooks:
            hook(*args, **kwargs)
        given = [*args, *kwargs.values()]
        # descriptors of tensors have them as their base
        recorder.known.forget([getattr(one, "base", one) for one in given])
        recorder.note(f"the Triton kernel {self.__name__}", "not run; it allocates nothing")
        return Compiled()

    return run


class Compiled:
    """A kernel that was not compiled. Programs ask what it takes of a multiprocessor."""

    def __init__(self) -> None:
        self.n_regs, self.n_spills, self.n_max_threads = 32, 0, 1024
        self.metadata = SimpleNamespace(shared=0, num_warps=4, num_stages=2, num_ctas=1)
        self.asm: dict[str, str] = {}
        self.function = None

    def _init_handles(self) -> None:
        """Nothing is loaded."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: None


class Driver:
    """What programs ask Triton's driver for, answered for the GPU of the prediction."""

    def __init__(self, recorder: Any) -> None:
        gpu = recorder.gpu
        self._capability: tuple[int, int] = gpu.cc
        properties = {
            "max_shared_mem": SHARED.get(gpu.cc, 99) << 10,
            "max_num_regs": 1 << 16,
            "multiprocessor_count": gpu.sms,
            "warpSize": 32,
            "sm_clock_rate": 1_500_000,
            "mem_clock_rate": 1_500_000,
            "mem_bus_width": 5120,
        }
        self.utils = SimpleNamespace(get_device_properties=lambda device=0: properties)
        self._places = recorder.memory.places

    def get_current_stream(self, device: int = 0) -> int:
        """That of the program."""
        stream: int = self._places.stream()
        return stream

    def get_current_device(self) -> int:
        """The only one."""
        return ordinal.number()

    def set_current_device(self, device: int) -> None:
        """There is only one."""

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        """As of the GPU."""
        return self._capability

    def get_current_target(self) -> Any:
        """What a kernel would be compiled for."""
        from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found]

        return GPUTarget("cuda", self._capability[0] * 10 + self._capability[1], 32)

    def get_active_torch_device(self) -> Any:
        """Where the tensors are."""
        return ordinal.device()

    def get_device_interface(self) -> Any:
        """What has streams and events."""
        return torch.cuda

    def get_empty_cache_for_benchmark(self) -> Any:
        """What is cleared before each run of a kernel that is timed."""
        return torch.empty(1 << 26, dtype=torch.int, device="cuda")

    def clear_cache(self, cache: Any) -> None:
        """As the real one."""
        cache.zero_()

    def get_benchmarker(self) -> Callable[..., Any]:
        """What autotuned kernels are timed by: each takes as long as the others."""

        def bench(kernel: Callable[[], Any], *, quantiles: Any = None, **options: Any) -> Any:
            kernel()
            cache = self.get_empty_cache_for_benchmark()
            kernel()
            del cache
            return [1.0] * len(quantiles) if quantiles else 1.0

        return bench
