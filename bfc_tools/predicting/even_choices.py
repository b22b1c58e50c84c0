"""Numbers that were drawn evenly, or chosen among so many: tokens, experts, classes, noise.

Which they are only a GPU knows. How many of them equal one number, or lie below it, can be said as
if each were as likely as the others: so a router sends each of its experts a like share of the
tokens, and a mask that hides tokens at random hides as many as it was told to.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from bfc_tools.predicting.rules.tensors import even_parts

#: Operators whose result has elements of their first argument, or of each tensor of a list.
CHOSEN_FROM = frozenset(
    (
        *("_to_copy", "clone", "index", "index_select", "gather", "repeat", "flip", "cat", "stack"),
        "roll",
    )
)
#: Operators with a result that says where along a dimension something lies: its place among the
#: results, that of the dimension among the arguments, and the dimension if none is given.
PLACES: dict[str, tuple[int, int, int | None]] = {
    "topk": (1, 2, -1),
    "sort": (1, 1, -1),
    **dict.fromkeys(("max", "min"), (1, 1, None)),
    **dict.fromkeys(("argmax", "argmin"), (0, 1, None)),
}
COMPARED = frozenset(("eq", "ne", "lt", "le", "gt", "ge"))
#: What is true the other way round.
TURNED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}
#: Operators that draw numbers from a range.
DRAWN = frozenset(("rand", "rand_like", "uniform_", "randint", "randint_like", "random_"))
FROM_SHARES = frozenset(("bernoulli", "bernoulli_", "multinomial", "scatter", "scatter_"))
#: Operators that write a number where a mask says.
FILLED = frozenset(("masked_fill", "masked_fill_"))
#: Of so many numbers of a range, evenly spaced, each is compared with those of another.
SAMPLES = 256
#: Tensors of so many numbers, or fewer, may say what is to be done with others.
FEW = 1024
NAMES = frozenset(
    (
        *(*CHOSEN_FROM, *PLACES, *COMPARED, *DRAWN, *FROM_SHARES, *FILLED),
        *("arange", "remainder", "fill_", "copy_"),
        *("bitwise_not", "logical_not", "bitwise_and", "__and__", "logical_and"),
    )
)


@dataclass(frozen=True)
class Even:
    """Numbers of which each is as likely as the others, from `low` to below `high`."""

    low: float
    high: float
    whole: bool  # or with a point
    alone: bool = False  # whether each was drawn for itself

    def share(self, compared: str, number: float) -> float:
        """How many of them compare so with a number, of 1.0: an eighth equals 3 of up to 8."""
        if compared == "ne":
            return 1.0 - self.share("eq", number)
        if compared == "gt":
            return 1.0 - self.share("le", number)
        if compared == "ge":
            return 1.0 - self.share("lt", number)
        if compared == "eq":
            inside = self.whole and self.low <= number < self.high and number == int(number)
            return 1.0 / (self.high - self.low) if inside else 0.0
        if not math.isfinite(number):
            return float(number > 0)
        if self.whole:
            number = math.floor(number) + 1 if compared == "le" else math.ceil(number)
        return min(max((number - self.low) / (self.high - self.low), 0.0), 1.0)

    def share_of_range(self, compared: str, other: Even) -> float:
        """The same of numbers that are compared with those of another range, each with each."""
        step = (other.high - other.low) / SAMPLES
        if other.whole and other.high - other.low <= SAMPLES:
            numbers = [float(one) for one in range(int(other.low), int(other.high))]
        else:
            numbers = [other.low + step * (at + 0.5) for at in range(SAMPLES)]
        return sum(self.share(compared, one) for one in numbers) / len(numbers)

    def different(self, count: int) -> int:
        """How many numbers differ among `count` of them, that were drawn each for itself."""
        if not (self.whole and self.alone):
            return count
        among = self.high - self.low
        return math.ceil(-among * math.expm1(count * math.log1p(-1.0 / among))) if among > 1 else 1


class Between(float):
    """The share of numbers that lie between two, of those that were drawn evenly."""

    numbers: Even
    low: float
    high: float

    @classmethod
    def of(cls, numbers: Even, low: float, high: float) -> Between:
        """From `low` to below `high`."""
        made = cls(max(numbers.share("lt", high) - numbers.share("lt", low), 0.0))
        made.numbers, made.low, made.high = numbers, low, high
        return made

    def places(self, count: int) -> int:
        """How many of `count` numbers that are. Of ranges side by side it is as many as of all."""
        first, last = (
            round(self.numbers.share("lt", one) * count) for one in (self.low, self.high)
        )
        return max(last - first, 0)


class OfWhole(float):
    """The share of all elements of a tensor of which a part was written."""


class OfOthers(float):
    """The share of elements that have a number which is neither 0 nor 1."""


Known = Even | float  # a float is the share of elements that are not zero


class EvenChoices:
    """Of each storage how its numbers were drawn, or how many of them are not zero.

    Parameters
    ----------
    number_of : callable
        Given a tensor or a number, it returns the number that it is filled with, or None.
    """

    def __init__(self, number_of: Callable[[Any], float | None]) -> None:
        self._number_of = number_of
        self._known: dict[int, tuple[Known, torch.dtype]] = {}
        self._watches: dict[int, object] = {}

    def __bool__(self) -> bool:
        return bool(self._known)

    def get(self, tensor: Any) -> Known | None:
        """What is known of a tensor."""
        if not isinstance(tensor, FakeTensor) or tensor.layout is not torch.strided:
            return None
        known, dtype = self._known.get(tensor.untyped_storage()._cdata, (None, None))
        return known if dtype == tensor.dtype else None

    def share(self, tensor: Any) -> float | None:
        """How many elements of a tensor are not zero, of 1.0; None if unknown."""
        known = self.get(tensor)
        return known.share("ne", 0) if isinstance(known, Even) else known

    def places(self, tensor: Any) -> int | None:
        """How many elements of a tensor are not zero; at least one, where ranges do not say how
        many lie in each. None if unknown."""
        share, count = self.share(tensor), int(tensor.numel())
        if share is None or share >= 1.0:
            return None
        return share.places(count) if isinstance(share, Between) else max(round(share * count), 1)

    def different(self, tensor: Any) -> int:
        """How many elements of a tensor differ, at most: all, if it is not known better."""
        known, count = self.get(tensor), int(tensor.numel())
        return known.different(count) if isinstance(known, Even) else count

    def counts(self, name: str, args: Any, kwargs: Any, result: Any) -> list[int] | None:
        """How many there are of each choice, if an operator counts that; None if it does not."""
        if not isinstance(result, FakeTensor) or result.is_floating_point():
            return None
        total, count = int(args[0].numel()), int(result.numel())
        if not 1 < count <= FEW:
            return None
        if name == "sum":
            share = self.share(args[0])
            unlike = share is None or isinstance(share, (OfWhole, OfOthers))
            return None if unlike else even_parts(round(share * total), count)  # type: ignore
        chosen = self.get(args[0])
        if not isinstance(chosen, Even) or not chosen.whole or chosen.low < 0:
            return None
        low, high = int(chosen.low), int(chosen.high)
        if name == "histc":
            bins, least, most = (*args[1:], *kwargs.values(), 0, 0)[:3]
            if (least, bins) != (low, high - low) or most not in (high, high - 1):
                return None
            low, high = 0, bins
        if high > count:
            return None
        return [0] * low + even_parts(total, high - low) + [0] * (count - high)

    def below(self, tensor: Any) -> int | None:
        """A number that all of a tensor's, which are whole, are below; None if unknown."""
        known = self.get(tensor)
        return int(known.high) if isinstance(known, Even) and known.whole else None

    def drop(self, key: int) -> None:
        """Forgets a storage."""
        self._known.pop(key, None)
        self._watches.pop(key, None)

    def learned(self, name: str, args: Any, kwargs: Any, result: Any) -> list[Known | None] | None:
        """What is known of each result of an operator, before it is noted; None: of nothing."""
        several = isinstance(result, (list, tuple))
        if name in PLACES and several == (PLACES[name][0] > 0):
            return self._placed(name, args, kwargs)
        return None if several else [self._of_one(name, args, result)]

    def note(self, results: Any, learned: Sequence[Known | None] | None) -> None:
        """Notes what is known of results."""
        results = results if isinstance(results, (list, tuple)) else [results]
        for tensor, known in zip_longest(results, learned or ()):
            if isinstance(tensor, FakeTensor) and tensor.layout is torch.strided:
                self.drop(tensor.untyped_storage()._cdata)
                if known is not None:
                    self._keep(tensor, known)

    def note_classes(self, tensor: Any, count: int) -> None:
        """Notes that a tensor has numbers of so many classes, each as likely as the others."""
        self.note(tensor, [Even(0, count, whole=True)])

    def _keep(self, tensor: Any, known: Known) -> None:
        storage = tensor.untyped_storage()
        part = storage.nbytes() != tensor.numel() * tensor.element_size()
        if part and not isinstance(known, OfWhole):
            return  # only a part was written
        key = storage._cdata
        self._watches[key] = weakref.ref(storage, lambda _: self.drop(key))
        self._known[key] = known, tensor.dtype

    def _placed(self, name: str, args: Any, kwargs: Any) -> list[Known | None]:
        place, at, otherwise = PLACES[name]
        dim = kwargs.get("dim", args[at] if len(args) > at else otherwise)
        tensor = args[0]
        among = tensor.shape[dim] if type(dim) is int and tensor.dim() else tensor.numel()
        places: list[Known | None] = [None] * (place + 1)
        if among:
            places[place] = Even(0, among, whole=True)
        return places

    def _of_one(self, name: str, args: Any, result: Any) -> Known | None:
        if name in DRAWN:
            return _range(name, args)
        if name in COMPARED and len(args) == 2:
            return self._compared(name, *args)
        if name in ("arange", "remainder"):
            return self._of_range(name, args, result)
        if name in ("fill_", "copy_"):
            return self._of_part(args[0], args[1])
        if name in FILLED:
            share, into, number = self.share(args[1]), *map(self._number_of, (args[0], args[2]))
            if into != 0 or not number or args[0].shape != args[1].shape:
                return None
            return share if share is None or number == 1 else OfOthers(share)
        if name in CHOSEN_FROM and args:
            given = args[0] if type(args[0]) in (list, tuple) else args[:1]
            found = {self.get(one) for one in given}
            known = found.pop() if len(found) == 1 else None
            rounded = isinstance(known, Even) and not known.whole and not result.is_floating_point()
            return None if rounded else known
        if name in FROM_SHARES:
            return self._from_shares(name, args, result)
        shares = [self.share(one) for one in args]
        if not shares or None in shares:
            return None
        if name in ("bitwise_not", "logical_not"):
            return 1.0 - shares[0] if result.dtype == torch.bool else None  # type: ignore[operator]
        both = name in ("bitwise_and", "__and__", "logical_and") and result.dtype == torch.bool
        ranges = [one for one in shares if isinstance(one, Between)]
        if both and len(ranges) == 2 and ranges[0].numbers == ranges[1].numbers:
            low, high = max(one.low for one in ranges), min(one.high for one in ranges)
            return Between.of(ranges[0].numbers, low, high)
        return math.prod(shares) if both else None  # type: ignore[arg-type]

    def _of_range(self, name: str, args: Any, result: Any) -> Known | None:
        """Whole numbers one after the other, and what is left if they are divided."""
        if result.is_floating_point() or not all(isinstance(one, int) for one in args[1:]):
            return None
        if name == "arange":
            begin = args[0] if len(args) > 1 else 0
            if not result.numel() or len(args) > 2 or not isinstance(begin, int):
                return None
            return Even(begin, begin + result.numel(), whole=True)
        known = self.get(args[0])
        if not (isinstance(known, Even) and known.whole and known.low >= 0 < args[1]):
            return None
        return Even(0, min(known.high, args[1]), whole=True, alone=known.alone)

    def _of_part(self, part: Any, value: Any) -> Known | None:
        """Zeros of which a part is filled with another number."""
        size = part.untyped_storage().nbytes() // max(part.element_size(), 1)
        if self._number_of(part) != 0 or not self._number_of(value) or part.numel() >= size:
            return None
        return OfWhole(part.numel() / size)

    def _compared(self, name: str, one: Any, other: Any) -> float | None:
        first, second = self.get(one), self.get(other)
        if isinstance(second, Even) and not isinstance(first, Even):
            name, one, other, first, second = TURNED.get(name, name), other, one, second, first
        if isinstance(first, float) and self._number_of(other) == 0 and name in ("eq", "ne"):
            return float(first if name == "ne" else 1.0 - first)
        if not isinstance(first, Even):
            return None
        number = self._number_of(other)
        if number is not None:
            limits = _limits(name, number, first) if first.whole else None
            return first.share(name, number) if limits is None else Between.of(first, *limits)
        if name not in ("eq", "ne"):
            ranges = isinstance(second, Even) and first.whole and second.whole
            return first.share_of_range(name, second) if ranges else None  # type: ignore[arg-type]
        if not first.whole:
            return None
        other_range = isinstance(second, Even) and second == first
        if other_range or (isinstance(other, FakeTensor) and not other.dtype.is_floating_point):
            return first.share(name, first.low)  # with one of its numbers
        return None

    def _from_shares(self, name: str, args: Any, result: Any) -> Known | None:
        if name.startswith("bernoulli"):
            chance = self._number_of(args[1] if len(args) > 1 else args[0])
            return None if chance is None else min(max(float(chance), 0.0), 1.0)
        if name == "multinomial":
            return Even(0, args[0].shape[-1], whole=True)
        into, _, index, value = args[:4]
        filled = self._number_of(into) == 0 and bool(self._number_of(value))
        if not filled or not into.numel():
            return None
        share = index.numel() / into.numel()
        return share if self._number_of(value) == 1 else OfOthers(share)


def _limits(compared: str, number: float, numbers: Even) -> tuple[float, float] | None:
    """Between which whole numbers those lie that compare so; None if they lie on both sides."""
    if compared in ("eq", "ne") or not math.isfinite(number):
        return None
    border = math.ceil(number) if compared in ("lt", "ge") else math.floor(number) + 1
    return (numbers.low, border) if compared in ("lt", "le") else (border, numbers.high)


def _range(name: str, args: Any) -> Even | None:
    numbers = [one for one in args if isinstance(one, (int, float)) and not isinstance(one, bool)]
    if name in ("rand", "rand_like", "uniform_"):
        low, high = numbers if len(numbers) == 2 else (0.0, 1.0)
        return Even(low, high, whole=False, alone=True) if high > low else None
    if name == "random_" and not numbers:
        return None
    low, high = (0, *numbers)[-2:]
    return Even(low, high, whole=True, alone=True) if high > low else None
