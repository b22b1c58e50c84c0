"""Tensors of known numbers: those that are filled with one, rows, and the places of elements.

So a loop ends that waits until all sequences of a batch are done, a mask of ones is seen to mask
nothing, and a program that goes through the experts of a layer comes to each of them. What is known
belongs to a storage; whatever else writes to that, or to a view of it, ends it.
"""

from __future__ import annotations

import contextlib
import math
import operator
import struct
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from bfc_tools.predicting.conditions import Conditions
from bfc_tools.predicting.even_choices import CHOSEN_FROM, FEW, Even, EvenChoices
from bfc_tools.predicting.even_choices import NAMES as CHOICES
from bfc_tools.predicting.real_values import COPIES, RealValues
from bfc_tools.predicting.rules.operators import file, numbers

Number = bool | int | float

#: Which argument an operator fills its result with; or with what it does.
FILLED = {"full": 1, "full_like": 1, "new_full": 2, "scalar_tensor": 0, "fill_": 1, "copy_": 1}
ALWAYS = {
    **dict.fromkeys(("ones", "ones_like", "new_ones"), 1),
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros", "zero_"), 0),
}
#: Operators whose result has the number of their first argument, or of each tensor of a list.
KEPT = frozenset(
    (
        *("_to_copy", "clone", "index", "index_select", "gather", "repeat", "flip", "cat", "stack"),
        *("max", "min", "amax", "amin", "any", "all", "mean"),
    )
)
ALONE: dict[str, Callable[[Any], Any]] = {
    "bitwise_not": lambda a: not a if isinstance(a, bool) else ~a,
    "logical_not": operator.not_,
    "neg": operator.neg,
    "abs": abs,
}
TOGETHER: dict[str, Callable[[Any, Any], Any]] = {
    "bitwise_and": operator.and_,
    "bitwise_or": operator.or_,
    "bitwise_xor": operator.xor,
    "__and__": operator.and_,
    "__or__": operator.or_,
    "logical_and": lambda a, b: bool(a) and bool(b),
    "logical_or": lambda a, b: bool(a) or bool(b),
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "add": operator.add,
    "sub": operator.sub,
    "rsub": lambda a, b: b - a,
    "mul": operator.mul,
    "div": operator.truediv,
    "maximum": max,
    "minimum": min,
}
#: Operators that may count choices.
COUNTED = frozenset(("sum", "histc"))
#: Which of the lowest and the highest element a reduction to one returns.
ENDS = {"min": 0, "amin": 0, "max": 1, "amax": 1}
#: Operators on whole numbers whose result lies between what the ends of their arguments give.
BETWEEN_ENDS = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floor_divide": operator.floordiv,
}
#: What the reductions of no elements are.
OF_NOTHING: dict[str, Number] = {"all": True, "any": False, "sum": 0}
#: As `struct` calls the numbers with a point.
FORMATS = {torch.float64: "d", torch.float32: "f", torch.float16: "e"}
#: With this number on one side the other side does not matter.
DECIDES: dict[str, Number] = {
    **dict.fromkeys(("bitwise_and", "__and__", "logical_and", "mul"), 0),
    **dict.fromkeys(("bitwise_or", "__or__", "logical_or"), True),
}
#: Where in its range a single number lies that is drawn evenly: near the end, so that what is
#: unlikely does not happen, and below it, so that it can choose among several.
DRAWN = 1 - 2**-11
#: So many whole numbers of a file are read for what is computed of them, as the highest of labels.
MOST_READ = 1 << 22
#: Operators whose result has numbers that follow from where they lie.
IN_ORDER = frozenset(("arange", "nonzero"))
#: How the numbers of operators are followed.
_FOLLOWED = {
    "the result is filled with an argument": FILLED,
    "the result is filled with 0 or 1": ALWAYS,
    "the result has the number of the argument": KEPT,
    "a number is computed": ALONE,
    "two numbers are computed": TOGETHER,
    "the result has numbers that follow from their places": IN_ORDER,
    "the result lies between what the ends of the arguments give": BETWEEN_ENDS,
    "choices are counted": ("histc",),
    "the result follows": ("remainder", "sum", "where", "uniform_", "index_put_", "index_fill_"),
}
_NAMES = {name for names in _FOLLOWED.values() for name in names}
for how, names in [*_FOLLOWED.items(), ("those that are drawn, or chosen, are counted", CHOICES)]:
    numbers(
        how,
        *(f"aten::{name}" for name in names),
        source=file("ATen/native/native_functions.yaml", read="2.15.0"),
        seen="PyTorch on a CPU, in the tests",
    )
#: Operators whose result has as many elements that are not zero as all arguments together.
ADDED_UP = frozenset(("_to_copy", "clone", "cat", "bitwise_or", "__or__", "logical_or"))


def follows(name: str) -> str | None:
    """The name by which an operator is followed, without the mark of work in place; or None."""
    name = name.removeprefix("aten::")
    if name in _NAMES or name in CHOICES:
        return name
    return name.removesuffix("_") if name.removesuffix("_") in (*ALONE, *TOGETHER) else None


class KnownValues:
    """The numbers that storages are filled with."""

    def __init__(self, told: Callable[[str, object], object] = lambda what, value: None) -> None:
        self._told = told  # what was made up
        #: Of each storage the number, or a function that has one for each place in it.
        self._values: dict[int, tuple[Number | Callable[[int], Number], torch.dtype]] = {}
        #: How many elements of each storage are not zero at most, where it was zeros.
        self._most: dict[int, int] = {}
        #: The lowest and the highest number of each storage, whose others lie between them.
        self._ends: dict[int, tuple[Number, Number, torch.dtype]] = {}
        #: Storages with as many elements as a mask selects.
        self._selected: set[int] = set()
        self._watches: dict[int, object] = {}
        self._writes = True  # whether what is written changes anything
        self.choices = EvenChoices(self.get)
        #: What is answered where nothing is known.
        self.conditions = Conditions(told)
        #: What stands in files and arrays.
        self.stored = RealValues()

    def __bool__(self) -> bool:
        return bool(self._values or self._most or self._ends or self.choices or self.stored)

    def ends(self, tensor: Any) -> tuple[Number, Number] | None:
        """The lowest and the highest element of a tensor; of numbers that were drawn evenly those
        that are to be expected. None if unknown."""
        number = self.get(tensor)
        if number is not None:
            return number, number
        if not isinstance(tensor, FakeTensor) or tensor.layout is not torch.strided:
            return None
        count, storage = int(tensor.numel()), tensor.untyped_storage()
        real = self.real(tensor) if count else None
        if real is not None:
            with _disable_current_modes():
                numbers = real.numpy()  # where PyTorch knows the lowest of few kinds only
            return numbers.min().item(), numbers.max().item()
        if storage._cdata in self._ends:
            low, high, dtype = self._ends[storage._cdata]
            apart = zip(tensor.shape, tensor.stride(), strict=True)
            seen = math.prod(int(size) for size, stride in apart if stride)  # others are repeated
            whole = seen * tensor.element_size() >= storage.nbytes()  # not a part of it
            return (low, high) if whole and dtype == tensor.dtype else None
        drawn = self.choices.get(tensor)
        if not (isinstance(drawn, Even) and drawn.whole and count):
            return None
        margin = int((drawn.high - drawn.low) / (count + 1))
        return int(drawn.low) + margin, int(drawn.high) - 1 - margin

    def most(self, tensor: Any) -> int:
        """How many elements of a tensor are not zero, at most."""
        count = int(tensor.numel())
        if not isinstance(tensor, FakeTensor) or tensor.layout is not torch.strided:
            return count
        if self.get(tensor) == 0:
            return 0
        real = self.real(tensor)
        if real is not None:
            with _disable_current_modes():
                return int(real.count_nonzero())
        return min(count, self._most.get(tensor.untyped_storage()._cdata, count))

    def get(self, tensor: Any) -> Number | None:
        """The number that a tensor is filled with, or that is given itself; None if unknown."""
        if isinstance(tensor, (bool, int, float)):
            return tensor
        if type(tensor) in (torch.Tensor, torch.nn.Parameter):  # one that is made of a number
            return _number_of(tensor)
        if not isinstance(tensor, FakeTensor) or tensor.layout is not torch.strided:
            return None
        if tensor.constant is not None:
            return _number_of(tensor.constant)
        if tensor.numel() == 1 and self.stored:
            stored = self.stored.get(tensor)
            if stored is not None:
                return _number_of(stored)
        value, dtype = self._values.get(tensor.untyped_storage()._cdata, (None, None))
        if dtype != tensor.dtype:  # its bits are read as another number
            return None
        if callable(value):
            return value(tensor.storage_offset()) if tensor.numel() == 1 else None
        return value

    def real(self, tensor: Any) -> Any:
        """A tensor on the host with the numbers of one that has few whole ones, all known; or
        None."""
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            return None
        if tensor.is_floating_point() or tensor.is_complex() or tensor.numel() > MOST_READ:
            return None
        if not isinstance(tensor, FakeTensor):  # one that no operator has seen yet
            return tensor if type(tensor) is torch.Tensor and tensor.device.type == "cpu" else None
        stored = self.stored.get(tensor) if tensor.constant is None else None
        if stored is not None or tensor.numel() > FEW:
            return stored
        if tensor.constant is not None:
            return tensor.constant
        value, dtype = self._values.get(tensor.untyped_storage()._cdata, (None, None))
        if value is None or dtype != tensor.dtype:
            return None
        shape, strides = tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride()))
        with _disable_current_modes():
            if not callable(value):
                return torch.full(shape, value, dtype=dtype, device="cpu")
            places = torch.zeros(shape, dtype=torch.int64, device="cpu")
            for dim, stride in enumerate(strides):
                steps = torch.arange(shape[dim], device="cpu") * stride
                places += steps.reshape(-1, *[1] * (len(shape) - dim - 1))
            places += int(tensor.storage_offset())
            found = [value(at) for at in places.flatten().tolist()]
            return torch.tensor(found, dtype=dtype, device="cpu").reshape(shape)

    def compute(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Notes the few whole numbers of what an operator makes of known ones: on the GPU, too,
        programs have lengths and sizes of images there, and read them."""
        if type(result) is not FakeTensor or result.is_floating_point() or result.is_complex():
            return
        if not result.is_contiguous() or not 0 < result.numel() <= FEW:
            return
        storage = result.untyped_storage()
        if storage.nbytes() != result.numel() * result.element_size():
            return  # a part of another tensor, as `_unsafe_view` makes one
        given = {}
        for one in tree_leaves((args, kwargs)):
            if isinstance(one, torch.Tensor):
                given[id(one)] = self.real(one)
                if given[id(one)] is None:
                    return
        if not given:
            return
        on_host = {"device": "cpu"} if kwargs.get("device") is not None else {}
        with _disable_current_modes(), contextlib.suppress(Exception):
            args, kwargs = tree_map(lambda one: given.get(id(one), one), (args, kwargs))
            made = func(*args, **{**kwargs, **on_host})
            if made.shape == result.shape and made.dtype == result.dtype:
                numbers = made.flatten().tolist()
                value = numbers[0] if len({*numbers}) == 1 else numbers.__getitem__
                self._keep(storage, value, result.dtype)

    def array(self, tensor: Any) -> Any:
        """A tensor with values that stands for one, of numbers of any kind; or None."""
        if getattr(tensor, "constant", None) is not None:
            return tensor.constant
        stored = self.stored.get(tensor)
        return self.real(tensor) if stored is None else stored

    def numbers(self, tensor: Any) -> list[Any] | None:
        """The numbers of a tensor, as `tolist` has them; or None."""
        real = self.array(tensor)
        if real is not None:
            with _disable_current_modes():
                found: list[Any] = real.tolist()
            return found
        if tensor.dim() != 1:
            return None
        alike = self.get(tensor)
        if alike is not None:
            return [alike] * int(tensor.numel())
        value, _ = self._values.get(tensor.untyped_storage()._cdata, (None, None))
        if not callable(value):
            return None
        values = [self.get(one) for one in tensor.unbind()]
        return None if None in values else values

    def is_selected(self, tensor: Any) -> bool:
        """Whether a mask decides how many elements a tensor has."""
        strided = isinstance(tensor, FakeTensor) and tensor.layout is torch.strided
        return strided and tensor.untyped_storage()._cdata in self._selected

    def note(self, tensor: Any, value: Number) -> None:
        """Notes that a new tensor is filled with a number."""
        self._keep(tensor.untyped_storage(), value, tensor.dtype)

    def note_numbers(self, tensor: Any, numbers: list[int]) -> None:
        """Notes the numbers of a new tensor of whole ones, in the order of its memory."""
        self.note(tensor, numbers[0] if len({*numbers}) == 1 else numbers.__getitem__)  # type: ignore

    def note_counts(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        """Notes how many there are of each choice, if an operator has counted that."""
        counts = self.choices.counts(name, args, kwargs, result) if self.choices else None
        if counts is not None:
            chosen = sum(counts)
            self._told(f"counts of choices: even, where one may have all {chosen}", max(counts))
            self.note_numbers(result, counts)

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Within it what operators write to stays as it is."""
        before, self._writes = self._writes, False
        try:
            yield
        finally:
            self._writes = before

    def forget(self, value: Any) -> None:
        """Notes that a tensor, or each tensor of a list, was written to."""
        if not self._writes:
            return
        if isinstance(value, FakeTensor):
            if value.layout is torch.strided:
                self._drop(value.untyped_storage()._cdata)
                self.choices.drop(value.untyped_storage()._cdata)
        elif type(value) in (list, tuple):
            for one in value:
                self.forget(one)

    def learn(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        """Notes what the result of an operator is filled with, if that is known."""
        most = self._most_set(name, args)
        ends = self._ends_of(name, args, kwargs, result)
        chosen = self.choices.learned(name, args, kwargs, result) if name in CHOICES else None
        self._learn_number(name, args, kwargs, result)
        self.choices.note(result, chosen)
        if name in COUNTED:
            self.note_counts(name, args, kwargs, result)
        if name in COPIES:
            self.stored.copied(name, args, result)
        if self._is_made_of_selected(name, args):
            storage = result.untyped_storage()
            self._watch(storage)
            self._selected.add(storage._cdata)
        if most is not None and most < result.numel():
            storage = result.untyped_storage()
            self._watch(storage)
            self._most[storage._cdata] = most
        if ends is not None:
            storage = result.untyped_storage()
            self._watch(storage)
            self._ends[storage._cdata] = (*ends, result.dtype)

    def _is_made_of_selected(self, name: str, args: Any) -> bool:
        """Whether a mask decides how many elements the result of an operator has."""
        if name == "index":
            masks = [one for one in args[1] if one is not None]
            return any(
                self._may_select_one(one) if one.dtype == torch.bool else self.is_selected(one)
                for one in masks
            )
        if name == "nonzero":
            return self._may_select_one(args[0])
        return name in ("clone", "_to_copy") and self.is_selected(args[0])

    def _may_select_one(self, mask: Any) -> bool:
        real = self.real(mask)
        if real is None:
            return True
        with _disable_current_modes():
            return int(real.count_nonzero()) == 1

    def _ends_of(
        self, name: str, args: Any, kwargs: Any, result: Any
    ) -> tuple[Number, Number] | None:
        """The lowest and the highest number of a result that is no known number."""
        if not isinstance(result, FakeTensor) or not result.numel() or result.is_floating_point():
            return None
        if name == "arange" and all(isinstance(one, int) for one in args):
            begin, step = (args[0] if len(args) > 1 else 0), (args[2] if len(args) > 2 else 1)
            last = begin + (result.numel() - 1) * step
            return min(begin, last), max(begin, last)
        if name in CHOSEN_FROM:
            given = args[0] if type(args[0]) in (list, tuple) else args[:1]
            found = [one for one in map(self.ends, given) if one is not None]
            if not found or len(found) < len(given) or self._are_drawn(given):
                return None
            return min(low for low, _ in found), max(high for _, high in found)
        scaled = kwargs.get("alpha", 1) != 1
        return self._ends_of_two(name, *args) if len(args) == 2 and not scaled else None

    def _are_drawn(self, given: Any) -> bool:
        """Whether tensors were drawn alike, and are no rows: then so is what is made of them."""
        drawn = {self.choices.get(one) for one in given}
        rows = all(one.untyped_storage()._cdata in self._ends for one in given)
        return len(drawn) == 1 and None not in drawn and not rows

    def _ends_of_two(self, name: str, one: Any, other: Any) -> tuple[Number, Number] | None:
        if name == "remainder" and isinstance(other, int) and other > 0:
            ends = self.ends(one)
            whole = ends is not None and ends[0] >= 0
            return (0, min(ends[1], other - 1)) if whole else None  # type: ignore[index]
        compute = BETWEEN_ENDS.get(name)
        first, second = self.ends(one), self.ends(other)
        if compute is None or first is None or second is None:
            return None
        if name == "floor_divide" and second[0] <= 0:
            return None
        numbers = [compute(a, b) for a in first for b in second]
        return min(numbers), max(numbers)

    def _most_set(self, name: str, args: Any) -> int | None:
        """How many elements of the result are not zero at most; None if that may be all."""
        if name == "index_fill_":  # PyTorch 2.15 writes `mask[places] = 1` so
            tensor, dim, index = args[:3]
            places = int(index.numel()) * int(tensor.numel()) // max(int(tensor.shape[dim]), 1)
            return self._and_so_many(tensor, places)
        if name == "index_put_":  # places of zeros are set
            tensor, indices = args[:2]
            if None in indices or any(one.dtype == torch.bool for one in indices):
                return None
            places = math.prod(torch.broadcast_shapes(*(one.shape for one in indices)))
            return self._and_so_many(tensor, places * math.prod(tensor.shape[len(indices) :]))
        if name not in ADDED_UP or not self._most:
            return None
        given = args[0] if type(args[0]) in (list, tuple) else args
        tensors = [one for one in given if isinstance(one, FakeTensor)]
        shapes = {one.shape for one in tensors}
        if name != "cat" and (len(shapes) > 1 or len(tensors) < len(given)):
            return None
        return sum(map(self.most, tensors))

    def _and_so_many(self, tensor: Any, places: int) -> int | None:
        before = self.most(tensor)
        return None if before == tensor.numel() else before + places

    def _learn_number(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        first = result
        if type(result) in (list, tuple) and result:
            first = result[0]
            self.forget(result[1:])  # places of a maximum, which are written with `out`
        if not isinstance(first, FakeTensor) or first.layout is not torch.strided:
            return
        if name in IN_ORDER:
            self._put_in_order(name, args, first)
            return
        try:
            value = _as_element(self._value(name, args, kwargs, first), first.dtype)
        except (ArithmeticError, TypeError, ValueError):  # too large, or not defined
            value = None
        storage = first.untyped_storage()
        if value is None or storage.nbytes() != first.numel() * first.element_size():
            self._drop(storage._cdata)  # unknown, or only a part was written
        else:
            self._keep(storage, value, first.dtype)

    def _value(self, name: str, args: Any, kwargs: Any, result: Any) -> Number | None:
        if name in ALWAYS:
            return ALWAYS[name]
        if name in FILLED:
            at = FILLED[name]
            return self.get(args[at] if at < len(args) else kwargs.get("fill_value"))
        if args and isinstance(args[0], FakeTensor) and not args[0].numel():
            return OF_NOTHING.get(name)
        if name == "uniform_":
            low, high = (*args[1:], 0.0, 1.0)[:2] if len(args) != 2 else (args[1], 1.0)
            return low + (high - low) * DRAWN if result.numel() == 1 else None
        if name in ENDS and result.numel() == 1 and args[0].numel() > 1:
            ends = self.ends(args[0])
            return None if ends is None else ends[ENDS[name]]
        if not args or not (self._values or name == "_to_copy"):
            return None
        if name in TOGETHER:
            return self._together(name, args, kwargs, result.dtype)
        if name == "where":
            return self._chosen(args)
        given = args[0] if type(args[0]) in (list, tuple) else args[:1]
        values = {self.get(one) for one in given}
        value = values.pop() if len(values) == 1 else None
        if value is None or name in KEPT:
            return value
        if name == "sum":
            total = value * (args[0].numel() // max(int(result.numel()), 1))
            return total if _as_element(total, result.dtype) == total else None  # it is rounded
        return ALONE[name](value) if name in ALONE else None

    def _together(self, name: str, args: Any, kwargs: Any, dtype: torch.dtype) -> Number | None:
        if len(args) != 2 or kwargs:  # alpha, or how a quotient is rounded
            return None
        one, other = map(self.get, args)
        if one is None or other is None:
            decides = DECIDES.get(name)
            if decides is None or (decides and dtype != torch.bool):  # `6 | True` is 7
                return None
            return decides if decides in (one, other) else None
        for number in args:  # PyTorch rounds a number first, each operator in its own way
            for tensor in args:
                if isinstance(number, float) and isinstance(tensor, FakeTensor):
                    kind = tensor.dtype if tensor.dtype.is_floating_point else torch.float32
                    if _as_element(number, kind) != number:
                        return None
        return TOGETHER[name](one, other)  # type: ignore[no-any-return]

    def _chosen(self, args: Any) -> Number | None:
        if len(args) != 3:
            return None
        condition, one, other = map(self.get, args)
        if condition is not None:
            return one if condition else other
        return one if one == other else None

    def _put_in_order(self, name: str, args: Any, result: Any) -> None:
        count, given = len(result), [one for one in args if isinstance(one, (bool, int, float))]
        if name == "nonzero":  # of as many as there are: all
            shape = tuple(args[0].shape)
            self._keep(result.untyped_storage(), lambda at: _place(at, shape, count), result.dtype)
        elif len(given) == len(args) and not result.dtype.is_floating_point:
            begin = given[0] if len(given) > 1 else 0
            step = given[2] if len(given) > 2 else 1
            self._keep(result.untyped_storage(), lambda at: begin + at * step, result.dtype)

    def _keep(self, storage: Any, value: Any, dtype: torch.dtype) -> None:
        self._watch(storage)
        self._values[storage._cdata] = value, dtype
        self.stored.drop(storage._cdata)
        self._most.pop(storage._cdata, None)
        self._ends.pop(storage._cdata, None)

    def _watch(self, storage: Any) -> None:
        key = storage._cdata
        if key not in self._watches:
            self._watches[key] = weakref.ref(storage, lambda _: self._drop(key))

    def _drop(self, key: int) -> None:
        self._values.pop(key, None)
        self._most.pop(key, None)
        self._ends.pop(key, None)
        self._selected.discard(key)
        self._watches.pop(key, None)
        self.stored.drop(key)


def _number_of(tensor: Any) -> Number | None:
    """What a tensor with values holds, if that is one number."""
    if tensor.numel() != 1 or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return None
    with _disable_current_modes():
        value = tensor.item()
    return value if isinstance(value, (bool, int, float)) else None  # and no complex number


def _place(at: int, shape: tuple[int, ...], count: int) -> int:
    """A number of the result of `nonzero`, whose dimensions lie one behind the other."""
    dimension, element = divmod(at, count)
    return element // math.prod(shape[dimension + 1 :]) % shape[dimension]


def _as_element(value: Number | None, dtype: torch.dtype) -> Number | None:
    """What a tensor holds that is filled with a number; None if that is not plain.

    What wraps around or is no number is None. `OverflowError` says that it is too large.
    """
    if value is None or value != value or dtype.is_complex:
        return None
    if dtype == torch.bool:
        return bool(value)
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        return int(value) if limits.min <= int(value) <= limits.max else None
    value = float(value)
    if math.isinf(value):
        return value
    if dtype in FORMATS:
        rounded: float = struct.unpack(FORMATS[dtype], struct.pack(FORMATS[dtype], value))[0]
        return rounded
    exact = dtype == torch.bfloat16 and not any(struct.pack("<f", value)[:2])
    return value if exact and struct.unpack("<f", struct.pack("<f", value))[0] == value else None
