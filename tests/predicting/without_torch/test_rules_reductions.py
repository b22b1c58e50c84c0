"""The partial results of reductions, as recordings of strangers' runs hold them."""

from __future__ import annotations

import pytest
from rule_calls import Shape, call, of

from bfc_tools.predicting import devices
from bfc_tools.predicting.rules import reductions
from bfc_tools.predicting.rules.reductions import Kernel, dimensions, partial_results

SUM = "sum(self, dim=None, keepdim=False, dtype=None)"


@pytest.mark.parametrize(
    ("gpu", "shape", "strides", "reduced", "partial", "nbytes"),
    [
        ("a100", (4, 256, 1024), (262144, 1024, 1), (0, 1), 4, 8388608),
        ("a100", (4, 512, 1024), (524288, 1024, 1), (0, 1), 4, 16777216),
        ("a100", (32, 256, 768), (196608, 768, 1), (0, 1), 4, 50331648),
        ("h100", (4, 256, 1280), (327680, 1280, 1), (0, 1), 4, 10485760),
        ("h100", (512, 10000), (1, 512), (1,), 16, 164626432),  # a maximum with its index
        ("h100", (512, 10000), (1, 512), (1,), 4, 41156608),
        ("h100", (8192, 10000), (1, 8192), (1,), 16, 553648128),
        ("a100", (4, 128, 1024), (131072, 1024, 1), (0, 1), 4, 0),
    ],
)
def test_the_sizes_that_were_recorded(
    gpu: str,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    reduced: tuple[int, ...],
    partial: int,
    nbytes: int,
) -> None:
    """The shapes are those of the layers that were recorded: gains of a norm, and logits."""
    dims = dimensions(shape, strides, reduced)
    assert partial_results(dims, Kernel(partial), devices.find(gpu))[0] == nbytes


def test_dimensions_are_merged_in_the_order_of_strides() -> None:
    merged = dimensions((2, 3, 4, 5), (60, 20, 5, 1), (0, 1))
    assert [(one.size, one.stride, one.reduced) for one in merged] == [
        (6, 20, True),
        (20, 1, False),
    ]
    transposed = dimensions((5, 4), (1, 5), (1,))
    assert [(one.size, one.stride) for one in transposed] == [(4, 5), (5, 1)]


def test_a_whole_sum_has_a_number_and_a_semaphore_for_each_block() -> None:
    made = call(SUM, Shape((1 << 24,)), result=Shape(()))
    # a block of 512 threads takes 4 of 2**24 elements at once: 4 blocks on each of 108 SMs
    assert of(made) == [0, 4 * 432, 4, -4, -4 * 432]


def test_a_small_sum_has_nothing() -> None:
    assert of(call(SUM, Shape((32, 32)), result=Shape(()))) == [0]
    assert of(call(SUM, Shape(()), result=Shape(()))) == [0]
    assert of(call(SUM, Shape((0, 4)), result=Shape(()))) == [0]


def test_booleans_are_copied_as_integers_before_they_are_counted() -> None:
    made = call(SUM, Shape((1000,), "bool"), result=Shape((), "int64"))
    assert of(made) == [0, 8000]


def test_halves_are_converted_on_the_way() -> None:
    made = call(SUM, Shape((1000,), "float16"), result=Shape((), "float32"))
    assert of(made) == [0]


def test_a_copy_keeps_the_order_of_dimensions() -> None:
    copy = reductions._Copy(Shape((3, 4), "bool", (1, 3)), Shape((), "int64"))
    assert copy.stride() == (1, 3)


def test_a_tensor_beyond_two_gib_is_summed_in_parts() -> None:
    rows, columns = 1 << 18, 4096  # 4 GiB, of which 32 bits can index one half
    made = call(SUM, Shape((rows, columns)), [0], result=Shape((columns,)))
    allocated = [size for size in of(made) if size > 4096]
    assert len(allocated) == 2
    assert len(set(allocated)) == 1


def test_halves_beyond_two_gib_are_added_up_in_a_buffer() -> None:
    made = call(SUM, Shape((1 << 19, 4096), "float16"), [0], result=Shape((4096,), "float16"))
    assert of(made)[1] == 4 * 4096


def test_the_greater_of_two_tensors_is_no_reduction() -> None:
    two = Shape((1 << 24,))
    assert of(call("max(self, other)", two, two, result=two)) == [0]


MAX = "max(self, dim, keepdim=False)"


def test_a_maximum_with_its_place_holds_pairs() -> None:
    tensor = Shape((512, 10000), strides=(1, 512))
    result = (Shape((512,)), Shape((512,), "int64"))
    assert of(call(MAX, tensor, 1, result=result, gpu="h100"))[1] == 164626432


@pytest.mark.parametrize(
    ("name", "dtype", "partial"),
    [
        ("sum", "float16", 4),
        ("sum", "float64", 8),
        ("sum", "int64", 8),
        ("amax", "float16", 2),
        ("any", "bool", 1),
        ("all", "float32", 4),
        ("var", "float32", 16),
        ("linalg_vector_norm", "bfloat16", 4),
    ],
)
def test_partial_results_have_the_type_that_is_added_up_in(
    name: str, dtype: str, partial: int
) -> None:
    kernel = reductions.kernel_of(name, Shape((4,), dtype), False)
    assert kernel.partial == partial
