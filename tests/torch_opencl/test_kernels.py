"""The kernels for float32 give what PyTorch gives on the CPU, or leave all as it was."""

from __future__ import annotations

import functools
import math
import random
import threading
import warnings
from dataclasses import dataclass
from typing import Any

import pyopencl as cl
import pytest
import torch
from torch_twins import DTYPES, SPECIAL, Twins, are_same, random_shape, that_broadcasts

from bfc.copying import opencl_stream
from bfc.integrations import torch_opencl
from bfc_torch_opencl import kernels, places

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

FLOAT = torch.float32
OPERATIONS = {"add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div}


@dataclass
class DefaultStream:
    """A place on the default stream of the device's own pool."""

    pool: Any

    @property
    def source(self) -> Any:
        return self.pool.sub_allocator

    def queue(self) -> cl.CommandQueue:
        return self.source.queue


@pytest.fixture
def place(opencl: torch.device, monkeypatch: pytest.MonkeyPatch) -> DefaultStream:
    """A place whose kernels are new to this thread."""
    monkeypatch.setattr(kernels._of_thread, "kernels", {})
    return DefaultStream(torch.opencl.pool())


@functools.cache
def without_double(context: cl.Context, device: cl.Device) -> opencl_stream.Context:
    known = opencl_stream.Context(context, device)
    known.has_double = False
    return known


@pytest.fixture(params=["double", "single"])
def precise(request: Any, place: DefaultStream, monkeypatch: pytest.MonkeyPatch) -> DefaultStream:
    """A place that adds up in double precision, and one on a device that has none."""
    if request.param == "single":
        monkeypatch.setattr(opencl_stream, "context_of", without_double)
    used = kernels._kernels_of(place)
    assert used is not None
    assert used.known.has_double == (request.param == "double")
    return place


@pytest.fixture
def no_compiler(place: DefaultStream, monkeypatch: pytest.MonkeyPatch) -> DefaultStream:
    def refuse(*_given: object) -> None:
        raise opencl_stream.CompilerRefusedError("the compiler knows no such processor")

    monkeypatch.setattr(opencl_stream.Context, "program", refuse)
    monkeypatch.setattr(places, "_has_warned", False)
    return place


def noise(twins: Twins, seed: int) -> Twins:
    """Gives twins normally distributed numbers."""
    twins.whole.copy_(torch.randn(twins.whole.shape, generator=torch.Generator().manual_seed(seed)))
    twins.device_whole.copy_(twins.whole)
    return twins


# -- item by item ----------------------------------------------------------------------------------


def operand(out: Twins, dice: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """The output itself, a number, or another tensor that broadcasts to it."""
    kind = dice.random()
    if kind < 0.15:
        return out.here, out.there
    if kind < 0.3:
        number = torch.tensor(dice.choice([2.5, 1e-3, *SPECIAL]), dtype=torch.float64)
        return number, number
    twins = Twins(that_broadcasts(tuple(out.here.shape), dice), FLOAT, dice)
    twins.season(dice)
    return twins.here, twins.there


def one_of(name: str, a: torch.Tensor, b: torch.Tensor, alpha: float) -> list[torch.Tensor]:
    """What may come out. Of a scaled sum the CPU rounds the product in some loops, and in others it
    does not."""
    a, b = a.to(FLOAT), b.to(FLOAT)
    if name not in ("add", "sub"):
        return [OPERATIONS[name](a, b)]
    scale = torch.tensor(alpha if name == "add" else -alpha)
    exact = (a.double() + scale.double() * b.double()).float()
    return [a + scale * b, exact]


def is_one_of(found: torch.Tensor, wanted: list[torch.Tensor]) -> bool:
    found = found.cpu()
    shaped = [one.expand(found.shape) for one in wanted]
    bits = [one.contiguous().view(torch.int32) for one in (found, *shaped)]
    same = [one == bits[0] for one in bits[1:]]
    same += [one.isnan() & found.isnan() for one in shaped[:1]]
    return bool(torch.stack(same).any(0).all())


@pytest.mark.parametrize("seed", range(150))
def test_two_sides_give_what_they_give_on_the_cpu(seed: int, place: DefaultStream) -> None:
    print(f"repeat: pytest -k 'two_sides and [{seed}]'")
    dice = random.Random(seed)
    for name in OPERATIONS:
        out = Twins(random_shape(dice, 5), FLOAT, dice)
        (a, there), (b, other) = operand(out, dice), operand(out, dice)
        alpha = dice.choice([1, 1, -1, 0.3, 2])
        wanted = one_of(name, a, b, alpha)
        assert kernels.binary(name, out.there, there, other, alpha, place)
        assert is_one_of(out.there, wanted)
        out.here.copy_(out.there)
        assert out.are_same(), "what lies in the gaps was written"


@pytest.mark.parametrize("seed", range(60))
def test_one_side_gives_what_it_gives_on_the_cpu(seed: int, place: DefaultStream) -> None:
    print(f"repeat: pytest -k 'one_side and [{seed}]'")
    dice = random.Random(seed)
    out = Twins(random_shape(dice, 5), FLOAT, dice)
    out.season(dice)
    assert kernels.relu(out.there, out.there, place)
    out.here.relu_()
    assert out.are_same()
    value = dice.choice([0.1, *SPECIAL])
    assert kernels.fill(out.there, value, place)
    out.here.fill_(value)
    assert out.are_same()


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_tensors_without_gaps_are_filled_whatever_they_hold(
    dtype: torch.dtype, place: DefaultStream
) -> None:
    value = 1 if dtype == torch.bool else 3
    there = torch.zeros(4, 5, dtype=dtype).to("opencl")
    assert kernels.fill(there[1:3], value, place)
    here = torch.zeros(4, 5, dtype=dtype)
    here[1:3] = value
    assert are_same(there, here)


def test_numbers_are_rounded_as_pytorch_rounds_them(place: DefaultStream) -> None:
    there = torch.zeros(3, device="opencl")
    for number in (1e300, -1e300, 2**53, 1 / 3):
        assert kernels.binary("add", there, there, torch.tensor(number), 1, place)
        assert are_same(there, torch.zeros(3) + number)
        there.zero_()
    assert not kernels.binary("add", there, there, torch.tensor(2**53 + 1), 1, place)
    assert not kernels.binary("add", there, there, torch.tensor(1j), 1, place)


# -- sums and products -----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_sums_are_as_good_as_in_double_precision(seed: int, precise: DefaultStream) -> None:
    print(f"repeat: pytest -k 'sums and {seed}-'")
    dice = random.Random(seed)
    for _ in range(4):
        shape = random_shape(dice, 5)
        a = noise(Twins(shape, FLOAT, dice), seed)
        dims = dice.sample(range(len(shape)), dice.randint(0, len(shape)))
        keep = dice.random() < 0.5
        wanted = torch.sum(a.here.double(), dims, keepdim=keep)
        out = Twins(tuple(wanted.shape), FLOAT, dice)
        named = [dim - dice.choice([0, len(shape)]) for dim in dims]
        assert kernels.total(out.there, a.there, named, precise)
        scale = torch.sum(a.here.double().abs(), dims, keepdim=keep)
        assert ((out.there.cpu().double() - wanted).abs() <= 1.2e-7 * scale).all()
        out.here.copy_(out.there)
        assert out.are_same()


@pytest.mark.parametrize("dims", [[], [0], [1], [0, 1]])
def test_long_sums_are_cut_into_parts(dims: list[int], precise: DefaultStream) -> None:
    here = torch.randn(3, 200_003, generator=torch.Generator().manual_seed(1))
    wanted = here.double().sum(dims) if dims else here.double().sum()
    there = torch.empty(wanted.shape, device="opencl")
    assert kernels.total(there, here.to("opencl"), dims, precise)
    assert torch.allclose(there.cpu().double(), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan])
def test_sums_of_what_is_not_finite(special: float, precise: DefaultStream) -> None:
    here = torch.tensor([[1.0, special, 2.0], [3.0, 4.0, -special]])
    there = torch.empty(2, device="opencl")
    assert kernels.total(there, here.to("opencl"), [1], precise)
    assert are_same(there, here.sum(1))
    product = torch.empty(2, 2, device="opencl")
    assert kernels.mm(product, here.to("opencl"), here.t().to("opencl"), precise)
    assert are_same(product, here @ here.t())


def test_a_sum_of_nothing_is_zero(place: DefaultStream) -> None:
    there = torch.ones(3, device="opencl")
    assert kernels.total(there, torch.empty(3, 0, device="opencl"), [1], place)
    assert there.cpu().tolist() == [0, 0, 0]
    assert kernels.mm(
        product := torch.ones(2, 2, device="opencl"),
        torch.empty(2, 0, device="opencl"),
        torch.empty(0, 2, device="opencl"),
        place,
    )
    assert product.cpu().tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize("seed", range(60))
def test_products_are_as_good_as_in_double_precision(seed: int, precise: DefaultStream) -> None:
    print(f"repeat: pytest -k 'products and {seed}-'")
    dice = random.Random(seed)
    rows, inner, columns = (dice.choice([1, 2, 3, 7, 8, 9, 16, 33]) for _ in range(3))
    a, b = (noise(Twins(shape, FLOAT, dice), seed) for shape in ((rows, inner), (inner, columns)))
    out = Twins((rows, columns), FLOAT, dice)
    assert kernels.mm(out.there, a.there, b.there, precise)
    scale = a.here.double().abs() @ b.here.double().abs()
    found = out.there.cpu().double()
    assert ((found - a.here.double() @ b.here.double()).abs() <= 1.2e-7 * scale).all()
    out.here.copy_(out.there)
    assert out.are_same()


# -- what is not served ----------------------------------------------------------------------------


def refusals(there: torch.Tensor, other: torch.Tensor, place: DefaultStream) -> list[bool]:
    return [
        kernels.binary("add", there, there, other, 1, place),
        kernels.binary("mul", there, other, there, 1, place),
        kernels.relu(there, other, place),
    ]


def test_other_tensors_are_not_served(place: DefaultStream) -> None:
    there = torch.zeros(6, device="opencl")
    half = torch.ones(6, dtype=torch.float16, device="opencl")
    for other in (half, torch._neg_view(there + 1), torch.ones(6)):
        assert refusals(there, other, place) == [False] * 3
    many = torch.zeros((2,) * 8, device="opencl")
    mixed = many.permute(7, 0, 6, 1, 5, 2, 4, 3)
    assert not kernels.binary("add", many, many, mixed + 1, 1, place)
    assert not there.cpu().any()
    assert not many.cpu().any()


def test_an_input_that_lies_partly_in_the_output_is_not_served(place: DefaultStream) -> None:
    whole = torch.arange(20.0, device="opencl")
    assert refusals(whole[1:], whole[:-1], place) == [False] * 3
    square = torch.arange(16.0, device="opencl").view(4, 4)
    assert refusals(square, square.t(), place) == [False] * 3
    assert not kernels.mm(square, square, square, place)
    assert not kernels.total(square[0], square, [0], place)
    assert not kernels.fill(whole.as_strided((3, 3), (1, 1)), 0.0, place)
    assert whole.cpu().equal(torch.arange(20.0))
    assert square.cpu().flatten().equal(torch.arange(16.0))


def test_without_a_compiler_nothing_is_served_and_one_warning_says_so(
    no_compiler: DefaultStream,
) -> None:
    there = torch.zeros(4, 4).to("opencl")
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for _ in range(3):
            assert refusals(there, there, no_compiler) == [False] * 3
            assert not kernels.total(there[0], there, [0], no_compiler)
            assert not kernels.mm(there.clone(), there, there, no_compiler)
            assert not kernels.fill(there.t()[1:, 1:], 1.0, no_compiler)
    assert len([one for one in heard if "on the host" in str(one.message)]) == 1
    assert not there.cpu().any()


def test_threads_have_kernels_of_their_own(place: DefaultStream) -> None:
    """Arguments are set in a kernel: two threads that shared one would mix theirs."""
    found: dict[int, bool] = {}

    def add(number: int) -> None:
        there = torch.zeros(100, device="opencl")
        for _ in range(200):
            assert kernels.binary("add", there, there, torch.tensor(number), 1, place)
        found[number] = bool((there.cpu() == 200 * number).all())

    threads = [threading.Thread(target=add, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(4), True)


# -- as operators ----------------------------------------------------------------------------------


def test_the_operators_run_on_the_device(opencl: torch.device) -> None:
    a, b = torch.randn(5, 4), torch.randn(4)
    there, other = a.to(opencl), b.to(opencl)
    before = torch_opencl.fallbacks()
    results = [
        (there + other, a + b),
        (there.add(other, alpha=2), a.add(b, alpha=2)),
        (there - other, a - b),
        (1 - there, 1 - a),
        (there * 0.5, a * 0.5),
        (there / other, a / b),
        (there.relu(), a.relu()),
        (torch.full_like(there, 2.5), torch.full_like(a, 2.5)),
    ]
    sums = [(there.sum(0), a.sum(0)), (there.sum(), a.sum()), (there @ there.t(), a @ a.t())]
    assert torch_opencl.fallbacks() == before
    assert all(are_same(found, wanted) for found, wanted in results)
    assert all(torch.allclose(found.cpu(), wanted, atol=1e-6) for found, wanted in sums)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_what_is_filled_is_the_cpus(dtype: torch.dtype, opencl: torch.device) -> None:
    before = torch_opencl.fallbacks()
    for value in (0, 1, 3, 0.5, True, 2**53 + 1 if dtype == torch.int64 else 2):
        here = torch.empty(3, 4, dtype=dtype)
        there = torch.empty(3, 4, dtype=dtype, device=opencl)
        assert are_same(there.fill_(value), here.fill_(value)), value
        assert are_same(there.t()[1:].zero_(), here.t()[1:].zero_())
        assert are_same(there, here)
    assert torch_opencl.fallbacks() == before
