"""Kernels for tensors of float32 on an OpenCL device: fill, add, sub, mul, div, relu, sum and mm.

Each function writes into a tensor that has the right shape already. It returns False, with nothing
done, for what it does not serve: then the operator runs on the host. That is other dtypes, a neg
bit, an input that lies partly in the output, more than six dimensions that cannot be joined, and
all on a device whose compiler builds no kernels.

Work is queued on the current stream, and nothing is waited for.
"""

from __future__ import annotations

import math
import struct
import threading
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from bfc.copying.layout import MAX_DIMS, MAX_ITEMS, expanded_strides
from bfc.drivers.opencl import platform as _opencl
from bfc_torch_opencl import arithmetic
from bfc_torch_opencl.arithmetic import are_apart, joined
from bfc_torch_opencl.places import Place, note_refusal, span_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bfc.suballocators.opencl import OpenCLSubAllocator

    Numbers: TypeAlias = torch.Tensor | float
    Dims: TypeAlias = list[tuple[int, ...]]

#: How many items a thread of a CPU takes at least, and how many a thread of a GPU adds up.
CPU_GRAIN, GPU_GRAIN = 8192, 64
GPU_THREADS, GPU_GROUPS = 256, 1024
#: Above this, a number of Python is not rounded to a float as PyTorch rounds it.
EXACT = 1 << 53

#: The structs of `arithmetic`. The last 0q pads one to a multiple of 8 bytes, as C does.
RUN = struct.Struct("@3q2I3f0q")
STRIDES = struct.Struct("@18q6Ii0q")
REDUCTION = struct.Struct("@20q12I3I2i0q")
PRODUCT = struct.Struct("@9q3I0q")

#: The bytes of the struct Sum of `arithmetic`.
SUM_BYTES = 8

#: What a kernel takes: memory (None), and structs of so many bytes.
ARGUMENTS = {
    "run": (None, None, None, RUN.size),
    "strided": (None, None, None, RUN.size, STRIDES.size),
    "sum": (None, None, None, REDUCTION.size),
    "parts": (None, None, REDUCTION.size),
    "product": (None, None, None, PRODUCT.size),
}


# -- a thread's kernels ----------------------------------------------------------------------------


class Kernels:
    """The kernels of one device, for one thread: a kernel object holds its arguments."""

    def __init__(self, source: OpenCLSubAllocator) -> None:
        from bfc.copying import opencl_stream

        self.known = opencl_stream.context_of(source.context, source.cl_device)
        self.on_cpu = self.known.on_cpu
        self.most_on_cpu = 2 * int(source.cl_device.max_compute_units)
        self.is_refused = False
        self._kernels: dict[str, Any] = {}
        self._enqueue = _opencl.load().enqueue_nd_range_kernel
        try:
            self._program = self.known.program(
                "arithmetic", lambda: arithmetic.text_of(in_single=not self.known.has_double)
            )
        except opencl_stream.CompilerRefusedError as error:
            note_refusal(error)
            self.is_refused = True

    def _make(self, name: str) -> Any:
        found = self._kernels[name] = _opencl.load().Kernel(self._program, name)
        sizes = ARGUMENTS[name.rpartition("_")[2]]
        found.set_arg_types([size and f"V{size}" for size in sizes])
        return found

    def launch(self, queue: Any, name: str, items: int, work: int, *arguments: Any) -> None:
        """`work` is how much an item costs, as a number of floats."""
        kernel = self._kernels.get(name) or self._make(name)
        if self.on_cpu:
            most = min(items, self.most_on_cpu)
            groups, threads = max(1, min(most, items * work // CPU_GRAIN)), 1
        else:
            groups, threads = min(-(-items // GPU_THREADS), GPU_GROUPS), GPU_THREADS
        with _opencl.in_words():
            kernel.set_args(*arguments)
            self._enqueue(queue, kernel, (groups * threads,), (threads,))


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.kernels: dict[OpenCLSubAllocator, Kernels] = {}


_of_thread = _OfThread()


def _kernels_of(place: Place) -> Kernels | None:
    found = _of_thread.kernels.get(place.source)
    if found is None:
        found = _of_thread.kernels[place.source] = Kernels(place.source)
    return None if found.is_refused else found


# -- what can be served ----------------------------------------------------------------------------


def _is_served(*tensors: torch.Tensor) -> bool:
    """Whether all are float32 on the device of the first, without a neg bit."""
    device = tensors[0].get_device()
    for tensor in tensors:
        if (
            tensor.dtype is not torch.float32
            or tensor.get_device() != device
            or tensor.is_neg()
            or tensor.data_ptr() & 3
        ):
            return False
    return True


def _number(given: object) -> float | None:
    """Rounds a number to float32. None for other types, and for ints that it may not hold."""
    if isinstance(given, torch.Tensor):
        given = given.item()
    if isinstance(given, int) and not -EXACT <= given <= EXACT:
        return None
    if not isinstance(given, (int, float)):
        return None
    try:
        return float(struct.unpack("f", struct.pack("f", given))[0])
    except OverflowError:
        return math.copysign(math.inf, given)


def _are_disjoint(one: torch.Tensor, other: torch.Tensor) -> bool:
    first, second = one.data_ptr(), other.data_ptr()
    ends = first + 4 * span_of(one), second + 4 * span_of(other)
    return bool(ends[0] <= second or ends[1] <= first)


def _at(place: Place, tensor: torch.Tensor) -> tuple[Any, int]:
    """OpenCL's buffer, and how many floats in it lie before the tensor."""
    memory, offset = place.source.locate(tensor.data_ptr())
    return memory, offset >> 2


def _padded(numbers: Sequence[int], filling: int) -> tuple[int, ...]:
    return (*numbers, *(filling,) * (MAX_DIMS - len(numbers)))


# -- item by item ----------------------------------------------------------------------------------


def fill(out: torch.Tensor, value: float, place: Place) -> bool:
    """Sets every item to `value`. If the items lie without gaps, they may have any dtype, and no
    kernel is needed."""
    if out.is_neg() or out.is_conj():
        return False
    if out.numel() == 0:
        return True
    size = out.element_size()
    if not out.is_contiguous():
        dims = joined(out.shape, out.stride())
        if len(dims) > 1 or (dims and dims[0][1] != 1):
            number = _number(value)
            return number is not None and _itemwise("keep", out, number, 0.0, 0.0, place)
    pattern = bytes(torch.full((1,), value, dtype=out.dtype).view(torch.uint8).numpy())
    memory, offset = place.source.locate(out.data_ptr())
    if offset % size:
        return False
    with _opencl.in_words():
        _opencl.load().enqueue_fill_buffer(
            place.queue(), memory, pattern, offset, out.numel() * size
        )  # fmt: skip
    return True


def binary(
    name: str, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, alpha: float, place: Place
) -> bool:
    """out = a + alpha * b ("add"), a - alpha * b ("sub"), a * b ("mul") or a / b ("div"). A tensor
    of the host with no dimension is a number."""
    first = a if a.dim() or a.device.type != "cpu" else _number(a)
    second = b if b.dim() or b.device.type != "cpu" else _number(b)
    scale = 1.0
    if name == "mul":
        operation = "multiply"
    elif name == "div":
        operation = "divide"
    elif name in ("add", "sub"):
        given = _number(alpha)
        if given is None:
            return False
        scale = given if name == "add" else -given
        operation = {1.0: "add", -1.0: "subtract"}.get(scale, "add_scaled")
    else:
        return False
    if first is None or second is None:
        return False
    return _itemwise(operation, out, first, second, scale, place)


def relu(out: torch.Tensor, a: torch.Tensor, place: Place) -> bool:
    """Zero in place of what is below it. A NaN stays a NaN, and -0.0 stays as it is."""
    return _itemwise("clamp", out, a, 0.0, 0.0, place)


def _itemwise(
    operation: str, out: torch.Tensor, a: Numbers, b: Numbers, scale: float, place: Place
) -> bool:
    """Computes from two sides, each a tensor or a number."""
    items = out.numel()
    sides = [side for side in (a, b) if isinstance(side, torch.Tensor)]
    if not _is_served(out, *sides) or items > MAX_ITEMS:
        return False
    if items == 0:
        return True
    kernels = _kernels_of(place)
    strides = _strides_of(out, a, b)
    if kernels is None or strides is None:
        return False
    to, start = _at(place, out)
    memories, starts, numbers, values = [to], [start], [], 0
    for bit, side in enumerate((a, b)):
        is_tensor = isinstance(side, torch.Tensor)
        memory, first = _at(place, side) if is_tensor else (to, start)
        memories.append(memory)
        starts.append(first)
        numbers.append(0.0 if is_tensor else side)
        values |= (not is_tensor) << bit
    run = RUN.pack(*starts, items, values, *numbers, scale)
    if strides:
        kernels.launch(place.queue(), f"{operation}_strided", items, 2, *memories, run, strides)
    else:
        kernels.launch(place.queue(), f"{operation}_run", items, 1, *memories, run)
    return True


def _strides_of(out: torch.Tensor, *sides: Numbers) -> bytes | None:
    """The struct for a kernel with strides. Empty where every side is one run of items; None where
    the sides cannot be served, for their dimensions or for where they overlap."""
    items = out.numel()
    tensors = [side for side in sides if isinstance(side, torch.Tensor)]
    if out.is_contiguous() and all(
        side.numel() == items and side.is_contiguous() for side in tensors
    ):
        start, nbytes = out.data_ptr(), 4 * items
        distances = [abs(side.data_ptr() - start) for side in tensors]
        return b"" if all(not far or far >= nbytes for far in distances) else None
    nothing = (0,) * out.dim()
    strides = [
        expanded_strides(side.shape, side.stride(), out.shape)
        if isinstance(side, torch.Tensor)
        else nothing
        for side in sides
    ]
    dims = joined(out.shape, out.stride(), *strides)
    if len(dims) > MAX_DIMS or not are_apart(dims):
        return None
    for which, side in enumerate(sides, 2):
        if isinstance(side, torch.Tensor) and not _are_disjoint(out, side):
            is_same = all(dim[1] == dim[which] for dim in dims)
            if side.data_ptr() != out.data_ptr() or not is_same:
                return None
    if not dims or (
        len(dims) == 1
        and all(
            dims[0][which] == 1
            for which, side in enumerate((out, *sides), 1)
            if isinstance(side, torch.Tensor)
        )
    ):
        return b""
    shape, *steps = zip(*dims, strict=True)
    numbers = [number for side in steps for number in _padded(side, 0)]
    return STRIDES.pack(*numbers, *_padded(shape, 1), len(dims))


# -- sums and products -----------------------------------------------------------------------------


def total(out: torch.Tensor, a: torch.Tensor, dims: Sequence[int], place: Place) -> bool:
    """out = the sums of `a` over some dimensions; over all, if none is named."""
    items, outputs = a.numel(), out.numel()
    if not _is_served(out, a) or items > MAX_ITEMS:
        return False
    if outputs == 0:
        return True
    if items == 0:
        return fill(out, 0.0, place)
    over = {dim % a.dim() for dim in dims if a.dim()} or set(range(a.dim()))
    kept = [dim for dim in range(a.dim()) if dim not in over]
    to = out.stride()
    if out.dim() > len(kept):
        to = tuple([to[dim] for dim in kept])
    shape, steps = a.shape, a.stride()
    outer = joined([shape[dim] for dim in kept], to, [steps[dim] for dim in kept])
    inner = joined([shape[dim] for dim in over], [steps[dim] for dim in over]) or [(1, 0)]
    kernels = _kernels_of(place)
    if (
        kernels is None
        or max(len(outer), len(inner)) > MAX_DIMS
        or not are_apart(outer)
        or not _are_disjoint(out, a)
    ):
        return False
    _launch_sum(kernels, place, out, a, outer, inner)
    return True


def _launch_sum(
    kernels: Kernels, place: Place, out: torch.Tensor, a: torch.Tensor, outer: Dims, inner: Dims
) -> None:
    outputs, inputs = out.numel(), a.numel() // out.numel()
    parts = _parts_of(kernels, outputs, inputs)
    to, start = _at(place, out)
    source, first = _at(place, a)
    kept = list(zip(*outer, strict=True)) or [(), (), ()]
    over = list(zip(*inner, strict=True))
    way = REDUCTION.pack(
        start, first, *_padded(kept[1], 0), *_padded(kept[2], 0), *_padded(over[1], 0),
        *_padded(kept[0], 1), *_padded(over[0], 1), outputs, inputs, parts, len(outer), len(inner),
    )  # fmt: skip
    queue = place.queue()
    if parts == 1:
        kernels.launch(queue, "sum", outputs, inputs, to, source, to, way)
        return
    cl = _opencl.load()
    nbytes = SUM_BYTES * outputs * parts
    with _opencl.in_words():
        between = cl.Buffer(place.source.context, cl.mem_flags.READ_WRITE, nbytes)
    try:
        kernels.launch(queue, "sum", outputs * parts, inputs // parts, to, source, between, way)
        kernels.launch(queue, "sum_of_parts", outputs, parts, to, between, way)
    finally:
        between.release()  # OpenCL keeps what its queued commands use


def _parts_of(kernels: Kernels, outputs: int, inputs: int) -> int:
    """Into how many parts each sum is cut, so that few large ones occupy the device."""
    threads, grain = GPU_THREADS * GPU_GROUPS, GPU_GRAIN
    if kernels.on_cpu:
        threads, grain = kernels.most_on_cpu, CPU_GRAIN
    return max(1, min(threads // outputs, inputs // grain))


def mm(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, place: Place) -> bool:
    """out = a @ b, of two dimensions each and with any strides."""
    rows, inner = a.shape
    columns = b.shape[1]
    if not _is_served(out, a, b) or max(rows * columns, a.numel(), b.numel()) > MAX_ITEMS:
        return False
    if rows * columns == 0:
        return True
    if inner == 0:
        return fill(out, 0.0, place)
    kernels = _kernels_of(place)
    if kernels is None or not are_apart(joined(out.shape, out.stride())):
        return False
    if not (_are_disjoint(out, a) and _are_disjoint(out, b)):
        return False
    (to, start), (left, a_start), (right, b_start) = (_at(place, side) for side in (out, a, b))
    way = PRODUCT.pack(
        start, a_start, b_start, *out.stride(), *a.stride(), *b.stride(), rows, columns, inner
    )
    at_once = arithmetic.COLUMNS if kernels.on_cpu else 1
    items = rows * -(-columns // at_once)
    kernels.launch(place.queue(), "product", items, inner * at_once, to, left, right, way)
    return True
