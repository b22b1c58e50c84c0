"""PyTorch's own samples of its operators give the same on opencl as on the CPU: values, dtype,
shape and strides, and what a view shares with its base.

Each sample is tried as a function, in place, with out=, and for its gradients, as far as the
operator has these. What the CPU refuses is refused on opencl, too.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db

CREATION = "arange eye full full_like linspace new_full ones_like scalar_tensor zeros_like"
VIEWS = (
    "as_strided diagonal expand imag movedim narrow permute real select split squeeze transpose "
    "unfold unsqueeze view view_as_complex view_as_real"
)
COPIES = "cat clone contiguous fill flip repeat resolve_conj resolve_neg roll stack to tril"
INDEXING = (
    "__getitem__ gather index_add index_copy index_put index_select masked_fill masked_scatter "
    "masked_select nonzero scatter scatter_add take where"
)
ARITHMETIC = (
    "abs add bmm clamp conj cumsum div eq exp matmul mean mm mul neg nn.functional.relu pow sort "
    "sub sum"
)
NAMES = " ".join([CREATION, VIEWS, COPIES, INDEXING, ARITHMETIC]).split()
DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int64, torch.bool, torch.complex64),
]

#: What is not equal to the last bit: sums in a kernel of ours, which go in another order, and a
#: division that PyTorch's vectors and its single numbers round differently.
ROUNDED = {(name, torch.float32) for name in ["bmm", "matmul", "mean", "mm", "sum"]}
ROUNDED.add(("div", torch.complex64))
#: Operator and variant to the reason why it is not tried.
SKIPPED = {
    ("tril", "out, transposed"): "PyTorch 2.13 writes past the end of a transposed out= on the CPU"
}

#: Those that are told where to make a tensor, and by nothing else than their `device`.
PLACED = {"arange", "eye", "full", "linspace", "scalar_tensor"}
OPERATORS = {(op.name, op.variant_test_name): op for op in op_db if op.name in NAMES}


class Twins:
    """Twins on opencl of tensors of the host: with the same storage, strides and bits."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.Tensor] = {}

    def of(self, here: torch.Tensor) -> torch.Tensor:
        storage = here.untyped_storage()
        if storage._cdata not in self._storages:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            self._storages[storage._cdata] = whole.to("opencl")
        whole = self._storages[storage._cdata]
        there = torch.empty(0, dtype=here.dtype, device="opencl").set_(
            whole.untyped_storage(), here.storage_offset(), here.size(), here.stride()
        )
        if here.is_conj():
            there = there.conj()
        if here.is_neg():
            there = torch._neg_view(there)
        return there.requires_grad_(here.requires_grad)

    def of_all(self, given: Any) -> Any:
        """The same of all tensors in lists, tuples and dicts, and of the name of the device."""
        if isinstance(given, torch.Tensor):
            return self.of(given)
        if isinstance(given, (list, tuple)):
            made = [self.of_all(each) for each in given]
            return type(given)(*made) if hasattr(given, "_fields") else type(given)(made)
        if isinstance(given, dict):
            return {name: self.of_all(each) for name, each in given.items()}
        return torch.device("opencl") if given in ("cpu", torch.device("cpu")) else given


def copied(given: Any) -> Any:
    """With tensors of their own, for an operator that writes into them."""
    if isinstance(given, torch.Tensor):
        return given.detach().clone()
    return given


def tensors_in(given: Any) -> list[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        return [given]
    if isinstance(given, (list, tuple)):
        return [tensor for each in given for tensor in tensors_in(each)]
    return []


def assert_same(here: Any, there: Any, rounded: bool) -> None:
    pairs = list(zip(tensors_in(here), tensors_in(there), strict=True))
    if not pairs:
        assert here == there
    for one, other in pairs:
        assert other.device.type == "opencl", "it is not on the device"
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert one.stride() == other.stride(), f"strides {one.stride()} and {other.stride()}"
        assert (one.is_conj(), one.is_neg()) == (other.is_conj(), other.is_neg())
        limits = {"rtol": 1e-5, "atol": 1e-5} if rounded else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(
            other.detach().cpu().resolve_conj().resolve_neg(),
            one.detach().resolve_conj().resolve_neg(),
            equal_nan=True,
            **limits,
        )


def assert_shared(here: Any, base: torch.Tensor, there: Any, other_base: torch.Tensor) -> None:
    """What shares its base's memory on the CPU does so on opencl, at the same place."""
    for one, other in zip(tensors_in(here), tensors_in(there), strict=True):
        is_view = one.untyped_storage()._cdata == base.untyped_storage()._cdata
        same = other.untyped_storage()._cdata == other_base.untyped_storage()._cdata
        assert is_view == same, "it is a view on one device, and a copy on the other"
        if is_view:
            assert one.storage_offset() == other.storage_offset()


Attempt = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def as_function(op: Any) -> Attempt:
    return lambda given, args, kwargs: op(given, *args, **kwargs)


def in_place(op: Any) -> Attempt:
    return lambda given, args, kwargs: op.inplace_variant(copied(given), *args, **kwargs)


def with_out(op: Any, strided: bool) -> Attempt:
    """Into a tensor that is transposed, or one without items, which gets its size."""

    def attempt(given: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = op(given, *args, **kwargs)
        fresh = [
            each.new_empty(each.shape[::-1]).fill_(3).permute(*range(each.dim())[::-1])
            if strided
            else each.new_empty(0)
            for each in tensors_in(found)
        ]
        out = fresh[0] if isinstance(found, torch.Tensor) else tuple(fresh)
        op(given, *args, **kwargs, out=out)
        return out

    return attempt


def backward(op: Any) -> Attempt:
    """The gradients of all inputs."""

    def attempt(given: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = [each for each in tensors_in([given, *args]) if each.requires_grad]
        found = op(given, *args, **kwargs)
        if op.output_process_fn_grad is not None:
            found = op.output_process_fn_grad(found)
        outputs = [each for each in tensors_in(found) if each.requires_grad]
        weights = [
            torch.linspace(-1, 2, each.numel()).view(each.shape).to(each) for each in outputs
        ]
        return [
            torch.zeros_like(each) if gradient is None else gradient
            for gradient, each in zip(
                torch.autograd.grad(outputs, inputs, weights, allow_unused=True),
                inputs,
                strict=True,
            )
        ]

    return attempt


def variants(op: Any, dtype: torch.dtype) -> Iterator[tuple[str, Attempt]]:
    yield "function", as_function(op)
    if op.inplace_variant is not None:
        yield "in place", in_place(op)
    if op.supports_out:
        yield "out, empty", with_out(op, False)
        yield "out, transposed", with_out(op, True)
    if dtype == torch.float32 and op.supports_autograd:
        yield "gradient", backward(op)


def compare(op: Any, sample: Any, attempt: Attempt, rounded: bool) -> bool:
    """Whether the CPU serves it."""
    if op.name in PLACED:
        sample.kwargs["device"] = "cpu"
    given, args, kwargs = Twins().of_all((sample.input, sample.args, sample.kwargs))
    try:
        here = attempt(sample.input, sample.args, sample.kwargs)
    except Exception as refusal:
        with pytest.raises(type(refusal)):
            attempt(given, args, kwargs)
        return False
    there = attempt(given, args, kwargs)
    assert_same(here, there, rounded)
    if isinstance(given, torch.Tensor):
        assert_shared(here, sample.input, there, given)
        if not given.requires_grad:
            assert_same(sample.input, given, rounded)
    return True


def dtypes_of(op: Any) -> list[torch.dtype]:
    return [dtype for dtype in DTYPES if dtype in op.supported_dtypes("cpu")]


CASES = [
    pytest.param(op, dtype, id=f"{'.'.join(filter(None, name))}-{str(dtype)[6:]}")
    for name, op in sorted(OPERATORS.items())
    for dtype in dtypes_of(op)
]


@pytest.fixture(scope="module")
def counts() -> Iterator[collections.Counter[str]]:
    """How the samples ended. At least 95 % of them pass."""
    found: collections.Counter[str] = collections.Counter()
    yield found
    print(f"\n{len(NAMES)} operators, {found.total()} samples: {dict(found.most_common())}")
    assert found["passed"] >= 0.95 * (found.total() - found["refused by both"])


@pytest.mark.parametrize(("op", "dtype"), CASES)
@pytest.mark.filterwarnings("ignore")
def test_samples_give_what_the_cpu_gives(
    opencl: torch.device, counts: collections.Counter[str], op: Any, dtype: torch.dtype
) -> None:
    is_rounded = (op.name, dtype) in ROUNDED
    failed = []
    for variant, attempt in variants(op, dtype):
        samples = op.sample_inputs("cpu", dtype, requires_grad=variant == "gradient")
        for number, sample in enumerate(samples):
            if (op.name, variant) in SKIPPED:
                counts[f"skipped: {SKIPPED[op.name, variant]}"] += 1
                continue
            try:
                is_served = compare(op, sample, attempt, is_rounded)
                counts["passed" if is_served else "refused by both"] += 1
            except Exception as error:
                counts["failed"] += 1
                what = f"{type(error).__name__}: {str(error)[:300]}"
                failed.append(f"{variant}, sample {number}: {what}")
    assert failed == []


def test_the_list_is_of_operators() -> None:
    assert {name for name, _ in OPERATORS} == set(NAMES)
    assert {name for name, _ in ROUNDED} | {name for name, _ in SKIPPED} <= set(NAMES)
