"""What a program reads of a tensor that has no values. Each answer is noted as an assumption."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bfc.libraries import torch
from bfc_tools.predicting.rules.interface import Call, on_cuda
from bfc_tools.predicting.rules.operators import answer, composition, file, kernel
from bfc_tools.predicting.rules.tensors import argument, on_host, operator, type_name

MEMORY = file("ATen/native/Memory.cpp", read="2.6.0")
SEEN = "what is made up is told as an assumption"

#: The bytes of an index.
INDEX = 8


@answer(
    "aten::_local_scalar_dense",
    source=file("ATen/native/cuda/CUDAScalar.cu", read="2.6.0"),
    seen=SEEN,
)
def item(call: Call, run: Callable[[], Any]) -> Any:
    """`.item()`, `float(t)`, `bool(t)`: the value where it is known, else 1, 1.0, or what lets the
    program go on: False, mostly."""
    tensor = call.args[0]
    if getattr(tensor, "constant", None) is not None:
        return run()
    known = call.value_of(tensor)
    if known is not None:
        return known
    kind = tensor.dtype
    value: object = 1.0 if kind.is_floating_point else 1
    if kind == torch.bool:
        value = call.condition()
    call.assume(".item()", value, tensor.storage_offset())
    return value


#: So many numbers of an order are computed, as an epoch of a data set has it.
MOST_OF_AN_ORDER = 1 << 24


@kernel(
    "aten::linspace",
    "aten::arange",
    "aten::randint",
    "aten::randperm",
    source=file("ATen/native/RangeFactories.cpp", read="2.6.0"),
)
def numbers(call: Call) -> Any:
    """Numbers that are known on the host: rates of layers are made of rows, and what a data set
    draws there says how long its items are, and in which order they come."""
    import torch._subclasses.fake_tensor as fake_tensor

    made = call.func(*call.args, **call.kwargs)
    most = MOST_OF_AN_ORDER if operator(call) == "randperm" else fake_tensor.CONSTANT_NUMEL_LIMIT
    if on_host(made) and made.numel() <= most:
        _compute(call, made)
    return made


@kernel("aten::random_", source=file("ATen/native/Distributions.cpp", read="2.6.0"), seen=SEEN)
def drawn(call: Call) -> Any:
    """A number that is drawn on the host, as the seed of an order."""
    tensor = call.func(*call.args, **call.kwargs)
    if on_host(tensor) and tensor.numel() == 1 and tensor.untyped_storage().nbytes() <= INDEX:
        _compute(call, tensor)
    return tensor


def _compute(call: Call, made: Any) -> None:
    """What was made has the numbers that the operator makes of real tensors, if it is given none
    that is fake."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._python_dispatch import _disable_current_modes

    given, into = call.args, made if call.func._schema.is_mutable else None
    if any(isinstance(one, FakeTensor) and one is not into for one in given):
        return
    with _disable_current_modes():
        if into is not None:
            given = (torch.empty(tuple(made.shape), dtype=made.dtype, device="cpu"), *given[1:])
        made.constant = call.func(*given, **call.kwargs)
    made.fake_mode.fake_tensor_converter.add_constant_storage_mapping(made)


@answer(
    "aten::equal",
    "aten::allclose",
    source=(
        file("ATen/native/cuda/Equal.cpp", read="2.6.0"),
        file("ATen/native/TensorCompare.cpp", read="2.6.0"),
    ),
    seen=SEEN,
)
def equal(call: Call, run: Callable[[], Any]) -> bool:
    """Yes, unless shapes tell. All elements are compared first (cuda/Equal.cpp,
    TensorCompare.cpp)."""
    one, other, *tolerance = call.args
    alone = operator(call) == "allclose" and 0 in (one.dim(), other.dim())  # a number may be there
    if on_cuda(one) != on_cuda(other) and not alone:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{one.device} and {other.device}! (when checking arguments of torch.{operator(call)})"
        )
    if operator(call) == "equal" and one.shape != other.shape:
        return False
    if on_cuda(one) and on_cuda(other):
        with call.recording:
            if operator(call) == "equal":
                alike = one.eq(other)
            else:
                alike = torch.isclose(one, other, *tolerance, **call.kwargs)
            found = alike.all()
            del found, alike
    call.assume("torch.equal", True)
    return True


@answer(
    "aten::_use_cudnn_ctc_loss",
    "aten::_use_miopen_ctc_loss",
    source=file("ATen/native/LossCTC.cpp", read="2.6.0"),
)
def ctc_loss(call: Call, run: Callable[..., Any]) -> bool:
    """PyTorch's own kernel: cuDNN's is for lengths and targets on the host."""
    return False


@answer("aten::_pin_memory", "aten::pin_memory", source=MEMORY)
def pin_memory(call: Call, run: Callable[[], Any]) -> Any:
    return call.args[0]


@answer("aten::is_pinned", source=MEMORY)
def is_pinned(call: Call, run: Callable[[], Any]) -> bool:
    """Yes: how host memory is held makes no difference here, and DDP insists on it."""
    return True


# -- results whose size depends on values ---------------------------------------------------------


@kernel("aten::nonzero", source=file("ATen/native/cuda/Nonzero.cu", read="2.6.0"), seen=SEEN)
def nonzero(call: Call) -> Any:
    """The places of what is not zero: at most all, or as many as were set in zeros; where choices
    decide, as many as there are if they are even."""
    tensor = call.args[0]
    most = call.most_of(tensor) or tensor.numel()  # of no place at all little could be predicted
    chosen = "all elements" if most == tensor.numel() else "all that were set"
    places = call.choices.places(tensor) if call.choices else None
    if places is not None:
        most = min(most, places)
        chosen = "as many as if choices were even, and up to all elements"
    call.assume(f"a mask, or nonzero: {chosen}", most)
    shape = (tensor.dim(), most)
    return torch.empty(shape, dtype=torch.int64, device=tensor.device).t()


@composition(
    "aten::masked_select",
    source=file("ATen/native/cuda/IndexKernel.cpp", "masked_select_out_cuda_impl", read="2.6.0"),
)
def masked_select(tensor: Any, mask: Any, *, out: Any = None) -> Any:
    """The mask becomes an index (ATen/native/cuda/IndexKernel.cpp, masked_select_out_cuda_impl)."""
    pair = torch.broadcast_tensors(tensor, mask)
    flat = [one.unsqueeze(0) if not one.shape else one for one in pair]
    if out is None:
        return torch.ops.aten.index.Tensor(flat[0], [flat[1]])
    return torch.ops.aten.index.Tensor_out(flat[0], [flat[1]], out=out)


MASKS = ("bool", "uint8")


@answer(
    "aten::index",
    "aten::index_put",
    "aten::index_put_",
    "aten::_index_put_impl_",
    source=file("ATen/native/IndexingUtils.h", "expandTensors", read="2.15.0"),
    seen=SEEN,
)
def masks(call: Call, run: Callable[..., Any]) -> Any:
    """A mask as an index becomes the places of what it selects, at most all
    (ATen/native/IndexingUtils.h, expandTensors)."""
    given = call.args[1]
    if not any(index is not None and type_name(index) in MASKS for index in given):
        return run()
    if _fills(call):
        mask = given[0].reshape(*given[0].shape, *[1] * (call.args[0].dim() - given[0].dim()))
        with call.recording:
            return torch.ops.aten.masked_fill_.Tensor(call.args[0], mask, call.args[2].reshape(()))
    indices: list[Any] = []
    for index in given:
        if index is None or type_name(index) not in MASKS:
            indices.append(index)
        else:
            with call.recording:
                indices += torch.ops.aten.nonzero(index).unbind(1)
    return run((call.args[0], indices, *call.args[2:]))


def _fills(call: Call) -> bool:
    """Whether one number of the host is written where a mask says (TensorAdvancedIndexing.cpp,
    canDispatchToMaskedFill): that needs no places."""
    if operator(call) != "index_put_" or argument(call, "accumulate", False):
        return False
    (mask, *others), value = call.args[1], call.args[2]
    alone = not others and on_host(mask) == on_host(call.args[0])
    return alone and type_name(mask) == "bool" and value.numel() == 1 and on_host(value)


@answer("aten::bincount", source=file("ATen/native/cuda/SummaryOps.cu", read="2.6.0"), seen=SEEN)
def bincount(call: Call, run: Callable[..., Any]) -> Any:
    """How often each number occurs: as many numbers as there are elements, or as are asked for;
    where choices decide, as many as there are, and evenly."""
    tensor = call.args[0]
    least = call.named().get("minlength", 0)
    below = call.choices.below(tensor) if call.choices else None
    if below is not None:
        count = max(int(least), below)
    else:
        count = max(int(least), 1 if least else tensor.numel())
        call.assume("bincount: different numbers", count)
    weights = call.named().get("weights")
    dtype = torch.int64 if weights is None else torch.float64
    counts = torch.empty(count, dtype=dtype, device=tensor.device)
    recorder: Any = call.recording
    recorder.known.note_counts("bincount", call.args, call.kwargs, counts)
    return counts


@answer(
    "aten::repeat_interleave",
    source=(
        file("ATen/native/Repeat.cpp", read="2.6.0"),
        file("ATen/native/cuda/Repeat.cu", read="2.6.0"),
    ),
    seen=SEEN,
)
def repeat_interleave(call: Call, run: Callable[..., Any]) -> Any:
    """How often each element is repeated is not known: once, if `output_size` does not say it."""
    repeats = call.args[0]
    if call.func._overloadname != "Tensor":
        return run()
    size = call.named().get("output_size")
    if size is None:
        each = call.value_of(repeats)
        times = call.numbers_of(repeats) if each is None else None
        if each is not None:
            size = repeats.numel() * int(each)  # type: ignore[call-overload]
        else:
            size = repeats.numel() if times is None else sum(times)
        if each is None and times is None:
            call.assume("repeat_interleave: each once", size)
    with call.recording:  # where each begins (ATen/native/Repeat.h, repeat_interleave_common)
        ends = repeats.contiguous().cumsum(0)
        valid = repeats >= 0
        all_valid = valid.all()
        del all_valid, valid
        made = torch.empty(int(size), dtype=torch.int64, device=repeats.device)
        del ends
    return made
