"""Inductor's own plan of a program's buffers, which it makes without a GPU.

Inductor lowers a graph, fuses what it can, and writes a program in Python that allocates each
buffer, launches a kernel of Triton or calls an operator, and lets the buffer go. All of that needs
what it asks of a device, and no device. The program is run on fake tensors; its kernels are not
compiled. What it would measure on a GPU to choose by is left as it is without.
"""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from bfc.libraries import torch

#: The file of the programs that Inductor writes, as their frames name it.
IN_INDUCTOR = "<inductor>"
#: Of options: what would be measured on a GPU, or keeps memory apart.
LEFT_OUT = {
    "triton.cudagraphs": "CUDA graphs: what their pools keep is not counted",
    "max_autotune": "max_autotune: no kernel is tuned, nor what tuning takes counted",
    "max_autotune_gemm": "max_autotune_gemm: no kernel is tuned, nor what tuning takes counted",
    "max_autotune_pointwise": "",
    "coordinate_descent_tuning": "",
}
#: Switched off where Inductor has them: what it keeps on disk, and other processes.
_OFF = {
    "fx_graph_cache": False,
    "fx_graph_remote_cache": False,
    "autotune_local_cache": False,
    "compile_threads": 1,
    "benchmark_harness": False,
    "fallback_random": False,
    "cpp_wrapper": False,
}


@contextlib.contextmanager
def without_a_gpu(recorder: Any) -> Iterator[None]:
    """Inductor plans for the GPU that is predicted."""
    import torch._inductor.compile_fx
    from torch._dynamo.device_interface import CudaInterface
    from torch._functorch import config as functorch
    from torch._inductor import config, graph, scheduler
    from torch._inductor.fx_passes import fuse_attention, joint_graph, pad_mm

    folder = joint_graph.UniformValueConstantFolder
    known = config.get_config_copy()
    off = {name: value for name, value in _OFF.items() if name in known}
    kept = {"force_non_lazy_backward_lowering": True, "enable_autograd_cache": False}
    kept = {name: value for name, value in kept.items() if hasattr(functorch, name)}
    properties = staticmethod(torch.cuda.get_device_properties)
    attention = "_scaled_dot_product_attention"

    def run(plan: Any) -> Any:
        return _program_of(plan, recorder)

    def padded(match: Any, one: Any, two: Any, op: Any, input: Any = None) -> bool:
        if pad_mm.can_pad(one, two, op, input):
            recorder.note("Inductor's padding of matrices", "none, which it would measure on a GPU")
        return False

    with (
        config.patch(off),
        functorch.patch(**kept),
        patch.object(CudaInterface, "get_device_properties", properties),
        patch.object(scheduler, "has_triton", lambda *args: True),
        patch.object(pad_mm, "has_triton", lambda *args: True),
        patch.object(pad_mm, "should_pad", padded),
        patch.object(folder, "run", _folded(folder.run)),
        patch.object(fuse_attention, attention, torch.nn.functional.scaled_dot_product_attention),
        patch.object(graph.GraphLowering, "_compile_to_module", run),
        contextlib.ExitStack() as stack,
    ):
        count = "get_num_model_outputs"
        if hasattr(torch._inductor.compile_fx, count):
            found = _outputs_of_the_program(getattr(torch._inductor.compile_fx, count))
            stack.enter_context(patch.object(torch._inductor.compile_fx, count, found))
        yield


def _outputs_of_the_program(build: Callable[[Any], int]) -> Callable[[Any], int]:
    """What a graph returns to the program, and does not keep for the backward pass. Inductor would
    count the outputs of Dynamo's graph, which there is none of; of others it may widen rows."""

    def count(graph: Any) -> int:
        context = torch._guards.TracingContext.try_get()
        metadata = None if context is None else context.fw_metadata
        return build(graph) if metadata is None else int(metadata.num_outputs)

    return count


def asked(mode: str | None, options: dict[str, Any] | None) -> dict[str, Any]:
    """The settings of Inductor that a mode and options stand for. Raises RuntimeError as
    `torch.compile` does where there is no such mode or option."""
    wrapped = torch._TorchCompileInductorWrapper(mode, options, None)
    return dict(wrapped.config)


def left_out(settings: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The settings that a prediction follows, and what is said of the others."""
    follows = {name: value for name, value in settings.items() if name not in LEFT_OUT}
    words = [LEFT_OUT[name] for name, value in settings.items() if value and LEFT_OUT.get(name)]
    return follows, words


def on_the_host() -> Any:
    """A mode in which all is made on the host: constants are, which would be on the GPU."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Host(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = dict(kwargs or {})
            if kwargs.get("device") is not None:
                kwargs["device"] = "cpu"
            return func(*args, **kwargs)

    return Host()


@contextlib.contextmanager
def constants_on_the_host() -> Iterator[None]:
    """What is computed of constants while a graph is made, is computed on the host."""
    from torch.fx.experimental import proxy_tensor

    name = "unset_fake_temporarily"
    unset = getattr(proxy_tensor, name)

    @contextlib.contextmanager
    def and_on_the_host() -> Iterator[None]:
        with unset(), on_the_host():
            yield

    with patch.object(proxy_tensor, name, and_on_the_host):
        yield


def _folded(build: Callable[..., Any]) -> Callable[..., Any]:
    """Constants are folded on the host."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with on_the_host():
            return build(*args, **kwargs)

    return run


# -- the program that Inductor writes -------------------------------------------------------------


class _Kernel:
    """A kernel that is not compiled: it writes into buffers that the program has made."""

    def run(self, *args: Any, **kwargs: Any) -> None:
        """A launch."""

    __call__ = run


class _Compiler:
    """Stands for `AsyncCompile`: every kernel is one that is not compiled."""

    def __getattr__(self, name: str) -> Callable[..., _Kernel]:
        return lambda *args, **kwargs: _Kernel()

    def wait(self, scope: Any) -> None:
        """There is nothing to wait for."""


#: What the program imports, and has no use for here.
_IMPORTED = {
    "torch._inductor.async_compile": SimpleNamespace(AsyncCompile=_Compiler),
    "triton": SimpleNamespace(language=SimpleNamespace()),
    "triton.language": SimpleNamespace(),
    "torch._inductor.runtime.triton_heuristics": SimpleNamespace(
        start_graph=lambda *args: None, end_graph=lambda *args: None
    ),
}


def _import(name: str, *others: Any) -> Any:
    """As `import`: of what the program has no use for, something else."""
    found = _IMPORTED.get(name)
    if found is None:
        return builtins.__import__(name, *others)
    names = others[2] if len(others) > 2 else ()
    return found if names else _IMPORTED[name.partition(".")[0]]


def _empty(kind: str) -> Callable[..., Any]:
    def empty(size: Any, stride: Any, dtype: Any) -> Any:
        return torch.empty_strided(size, stride, dtype=dtype, device=kind)

    return empty


def _reinterpret(tensor: Any, size: Any, stride: Any, more: int) -> Any:
    return tensor.as_strided(size, stride, tensor.storage_offset() + more)


def _program_of(plan: Any, recorder: Any) -> Any:
    """The program that a lowered graph becomes, as a module: `call` runs it."""
    code, _ = plan.codegen()
    guards = torch._C._dynamo.guards
    nothing = {"assert_size_stride": lambda *args: None, "assert_alignment": lambda *args: None}
    table = nothing | {
        "_empty_strided_cpu": _empty("cpu"),
        "_empty_strided_cpu_pinned": _empty("cpu"),
        "_empty_strided_cuda": _empty("cuda"),
        "_reinterpret_tensor": _reinterpret,
        "copy_if_misaligned": lambda tensor: tensor,
    }
    names: dict[str, Any] = {
        "__name__": "inductor's program",
        "__builtins__": vars(builtins) | {"__import__": _import},
        **plan.constants,
        **plan.torchbind_constants,
    }
    with contextlib.ExitStack() as stack:
        for name, function in table.items():
            if hasattr(guards, name):
                stack.enter_context(patch.object(guards, name, function))
        exec(compile(code.value, IN_INDUCTOR, "exec"), names)
    plan.cache_key, plan.cache_path, plan.cache_linemap = "", "", []
    return SimpleNamespace(**{name: names[name] for name in ("call", "runner") if name in names})
