"""What indexing takes, and CUB's temporary storage."""

from __future__ import annotations

from typing import Any

import pytest
from rule_calls import Shape, call, of

from bfc_tools.predicting import devices
from bfc_tools.predicting.rules import cub
from bfc_tools.predicting.rules.tensors import div_up


@pytest.mark.parametrize(
    ("count", "nbytes"),
    [(2048, 1), (2304, 1), (4096, 72191), (8192, 138751)],
)
def test_the_radix_sorts_that_were_recorded(count: int, nbytes: int) -> None:
    """Pairs of 8 bytes and 8, whose keys have 14 bits, on an A100."""
    assert cub.radix_sort(count, 8, 8, 14, (8, 0)) == nbytes


def test_a_sort_of_one_pass_needs_no_second_buffer() -> None:
    assert cub.radix_sort(100_000, 8, 8, 8, (8, 0)) < 100_000
    assert cub.radix_sort(100_000, 8, 8, 9, (8, 0)) > 1_600_000


def test_a_sort_of_keys_alone_needs_less() -> None:
    pairs, keys = (cub.radix_sort(1 << 20, 4, value, 32, (9, 0)) for value in (8, 0))
    assert pairs - keys == pytest.approx(8 << 20, rel=0.01)


def test_a_scan_has_a_descriptor_for_each_tile() -> None:
    assert cub.tiles(1_000_000, 128, 15, 4) == div_up(1_000_000, 1920)
    assert cub.scan(1_000_000, 4, 2) == cub.aliased((521 + 32) * 8)


H200 = devices.find("h200")
#: What an H200 took with PyTorch 2.11 for so many elements: a cumulative sum of 32 bits, the sum of
#: a mask, and the places of what it selects.
TAKEN = {
    1000: (1023, 1, 1023),
    4096: (1023, 1, 1023),
    8192: (1023, 21503, 1023),
    81920: (1279, 21503, 1023),
    200_000: (1791, 21503, 1279),
    1_048_576: (5375, 21503, 2815),
}


@pytest.mark.parametrize("count", TAKEN)
def test_temporary_storage_is_as_an_h200_took_it(count: int) -> None:
    found = (
        cub.scan(count, 4, 3),
        cub.total(count, 4, H200),
        cub.select_flagged(count, 3, H200.cc),
    )
    assert found == TAKEN[count]


@pytest.mark.parametrize(
    ("count", "first", "offsets"), [(640, 1279, 1279), (6144, 1279, 1279), (81920, 1535, 2559)]
)
def test_segments_are_found_as_on_an_h200(count: int, first: int, offsets: int) -> None:
    """The gradient of an embedding of so many indices."""
    assert cub.unique_by_key(count, 8, 3, H200.cc) == first
    assert cub.scan(count, 8, 3) == offsets


def test_tiles_are_those_of_the_generation() -> None:
    """From the tables of CUB: a million keys by tiles of 320, 1792, 4480 and 3840."""
    sizes = [cub.unique_by_key(1 << 20, 8, 2, cc) for cc in ((8, 9), (8, 0), (9, 0), (10, 0))]
    tiles = [div_up(1 << 20, size) for size in (320, 1792, 4480, 3840)]
    assert sizes == [cub.aliased((number + 32) * 16) for number in tiles]
    assert cub.select_flagged(6400, 2, (8, 6)) == cub.aliased((10 + 32) * 8)


PUT = "_index_put_impl_(self, indices, values, accumulate=False, unsafe=False)"


def test_the_gradient_of_an_index_sorts_the_rows() -> None:
    """The order that recordings hold."""
    weight, index, rows = Shape((10000, 512)), Shape((32, 256), "int64"), Shape((32, 256, 512))
    n = 8 * 8192
    made = call(PUT, weight, [index], rows, True, True, result=weight)
    assert of(made) == [0, n, n, -n, n, n, n, 138751, -138751, -n, -n, -n, -n]


def test_an_index_from_the_host_is_computed_there() -> None:
    weight, rows = Shape((10000, 512)), Shape((64, 512))
    index = Shape((64,), "int64", place="cpu")
    made = call(PUT, weight, [index], rows, True, True, result=weight)
    assert of(made) == [0, 512, 512, 512, 512, 1, -1, -512, -512, -512, -512]


def test_two_indices_are_one_index() -> None:
    logits, one = Shape((64, 1000)), Shape((64,), "int64")
    made = call(PUT, logits, [one, one], Shape((64,)), True, True, result=logits)
    n = 512
    assert of(made) == [0, n, n, -n, n, n, -n, -n, n, n, n, 1, -1, -n, -n, -n, -n]


def test_a_number_is_written_out_for_each_place() -> None:
    tensor, index = Shape((100, 8)), Shape((16,), "int64")
    made = call(PUT, tensor, [index], Shape(()), True, True, result=tensor)
    assert 16 * 8 * 4 in of(made)


def test_a_program_s_own_call_checks_the_range() -> None:
    tensor, index = Shape((100, 8)), Shape((16,), "int64")
    made = call("index_put_(self, indices, values, accumulate=False)", tensor, [index])
    made.args = (tensor, [index], Shape((16, 8)), True)
    assert of(made)[:9] == [0, 8, 1, -1, -8, 8, 1, -1, -8]


def test_what_does_not_add_up_is_not_sorted() -> None:
    tensor, host = Shape((100, 8)), Shape((16,), "int64", place="cpu")
    assert of(call(PUT, tensor, [host], Shape((16, 8)))) == [0, 128]
    assert of(call(PUT, tensor, [Shape((16,), "int64")], Shape((16, 8)))) == [0]
    index = call("index(self, indices)", tensor, [None, host])
    assert of(index) == [128, 0]  # as an H100 has it


def deterministic(signature: str, *args: Any, **kwargs: Any) -> list[int]:
    """What an H100 takes with PyTorch 2.11 after `torch.use_deterministic_algorithms`."""
    made = call(signature, *args, gpu="h100", torch=(2, 11), **kwargs)
    made.deterministic = True
    return of(made)


def checks(*between: int) -> list[int]:
    """The highest and the lowest index, and whether they are in range."""
    return [8, *between, 1, -1, -8] * 2


#: 9000 indices up to 500, which are put in order.
N, SORT = 72_000, 151_039
IN_ORDER = [N, N, -N, N, N, N, 8, -8, SORT, -SORT, -N, -N, -N, -N]


@pytest.mark.parametrize("name", ["index_add", "index_add_"])
def test_sums_of_rows_are_sorted_if_they_are_to_be_deterministic(name: str) -> None:
    """As an H100 has them, which has the rows times alpha, too."""
    tensor, index, rows = Shape((500, 64)), Shape((9000,), "int64"), Shape((9000, 64))
    found = deterministic(f"{name}(self, dim, index, source)", tensor, 0, index, rows)
    assert found == [0, 2_304_000, *checks(), *IN_ORDER]


def test_an_order_of_many_is_as_a_gpu_has_it() -> None:
    tensor, index, values = Shape((1000,)), Shape((300_000,), "int64"), Shape((300_000,))
    found = deterministic("scatter_add(self, dim, index, src)", tensor, 0, index, values)
    n, sort = 2_400_000, 4_872_191
    check = checks(296, 4, -4, -296)
    assert found == [0, *check, n, n, -n, n, n, n, 8, -8, sort, -sort, -n, -n, -n, -n]
    put = "index_put_(self, indices, values, accumulate=False)"
    assert deterministic(put, tensor, [index], values) == found


def test_numbers_of_each_dimension_are_put_in_order() -> None:
    """Of an index of two dimensions; a reduction that no order changes is none of these."""
    tensor, index, values = Shape((500, 64)), Shape((900, 64), "int64"), Shape((900, 64))
    n, sort = 460_800, 939_519
    found = deterministic("scatter_add(self, dim, index, src)", tensor, 0, index, values)
    first = [512, 8, -8, *checks(), n, n, -n]
    second = [*checks(n, -n), n, n, -n, -n]
    assert found == [0, *first, *second, n, n, n, 8, -8, sort, -sort, -n, -n, -n, -n]
    reduced = "scatter_reduce(self, dim, index, src, reduce)"
    assert deterministic(reduced, tensor, 0, index, values, "amax") == [0]
    assert deterministic("scatter(self, dim, index, value)", tensor, 0, index, 1.0) == [0]


def test_an_index_that_is_spread_over_rows_is_one_of_rows() -> None:
    index = Shape((9000, 64), "int64", strides=(1, 0))
    args = Shape((500, 64)), 0, index, Shape((9000, 64))
    found = deterministic("scatter_add(self, dim, index, src)", *args)
    assert found == [0, *checks(), *IN_ORDER]


def test_rows_between_two_indices_are_brought_behind_them() -> None:
    """The gradient of `x[i, :, j]` copies `x`; 2,560,000 bytes on an H100."""
    tensor, one = Shape((100, 64, 100)), Shape((50,), "int64")
    values = Shape((50, 64))
    made = call(PUT, tensor, [one, None, one], values, True, True, result=tensor)
    n = 400
    linear = [n, n, -n, n, n, -n, -n]
    assert of(made) == [0, *linear, 2_560_000, n, n, n, 1, -1, -n, -n, -n, -2_560_000, -n]


def test_indices_of_32_bits_or_other_strides_are_copied() -> None:
    tensor, short = Shape((1000, 64)), Shape((5000,), "int32")
    assert of(call("index(self, indices)", tensor, [short])) == [40_000, 0]
    rows, columns = Shape((50, 1), "int64"), Shape((60,), "int64")
    assert of(call("index(self, indices)", tensor, [rows, columns])) == [24_000, 24_000, 0]
    assert of(call("index(self, indices)", tensor, [columns, columns])) == [0]


def test_a_scan_in_a_fixed_order_keeps_a_sum_of_each_block() -> None:
    given = Shape((300_000,))
    assert deterministic("cumsum(self, dim)", given, 0, result=given) == [0, 148, -148]
    assert deterministic("cumprod(self, dim)", given, 0, result=given) == [0, 2047, -2047]
    assert of(call("logcumsumexp(self, dim)", given, 0, result=given, torch=(2, 11)))[1] == 2047


BAGS = (
    "_embedding_bag_dense_backward(grad, indices, offset2bag, bag_size, maximum_indices, "
    "num_weights, scale_grad_by_freq, mode)"
)


@pytest.mark.parametrize("by_frequency", [False, True])
def test_indices_of_bags_are_sorted_by_all_bits(by_frequency: bool) -> None:
    """3840 indices of 100 rows of 16 on an H100 with PyTorch 2.11."""
    indices, none = Shape((3840,), "int64"), Shape((64,), "int64")
    args = Shape((64, 16)), indices, none, none, none, 100, by_frequency, 0
    found = of(call(BAGS, *args, gpu="h100", torch=(2, 11)))
    n = 30_720
    counted = [n, 1279, -1279, 1279, -1279] * by_frequency
    assert found[: found.index(0)] == [n, n, n, 79_359, -79_359, -n, *counted]
    assert found[-2:] == [3872, 30_976]


BACKWARD = (
    "embedding_dense_backward(grad_output, indices, num_weights, padding_idx, scale_grad_by_freq)"
)


def test_the_gradient_of_an_embedding_needs_nothing_for_few_indices() -> None:
    made = call(BACKWARD, Shape((3, 1024, 64)), Shape((3, 1024), "int64"), 1000, -1, False)
    assert of(made) == [0]


def test_the_gradient_of_an_embedding_is_read_row_by_row() -> None:
    gradient = Shape((8, 128, 64), strides=(8192, 1, 128))
    made = call(BACKWARD, gradient, Shape((8, 128), "int64"), 1000, -1, False)
    assert of(made) == [8 * 128 * 64 * 4, 0]


def test_the_gradient_of_an_embedding_sums_segments_of_many() -> None:
    made = call(BACKWARD, Shape((8, 1024, 64)), Shape((8, 1024), "int64"), 1000, -1, False)
    found = of(made)
    where = found.index(0)
    n = 8192 * 8
    sort = cub.radix_sort(8192, 8, 8, 64, (8, 0))
    assert found[:where] == [n, n, n, sort, -sort, -n]
    # firsts of as many as there may be, as many segments as there are rows; a part for each ten
    # indices, and one for each segment
    segments, parts = 1000 * 8, 8192 // 10 + 1000
    large = [size for size in found[where:] if abs(size) >= segments]
    assert cub.scan(8192, 8, 3) < segments
    assert large == [n, n, -n, segments, segments, parts * 8, parts * 64 * 4]


def test_the_gradient_of_an_embedding_is_as_a_gpu_has_it() -> None:
    """4096 indices of 20,000 rows of 512, on an H200 with PyTorch 2.11: many rows."""
    made = call(BACKWARD, Shape((128, 32, 512)), Shape((128, 32), "int64"), 20_000, -1, False)
    assert [size for size in of(made) if size > 0][-2:] == [36040, 9226240]


def test_few_rows_of_many_indices_are_summed_at_once() -> None:
    """As an H100 did it with PyTorch 2.11, of letters whose places and gradients lay apart."""
    letters = Shape((128, 100), "int64", strides=(101, 1))

    def parts_of(kind: str = "float32", **more: Any) -> list[int]:
        gradient = Shape((128, 100, 128), kind, strides=(128, 128 * 128, 1))
        made = call(BACKWARD, gradient, letters, 96, -1, False, gpu="h100", **more)
        return [size for size in of(made) if size >= 0]

    n = 12_800
    copied, sort = [8 * n, 4 * n * 128], [8 * n, 8 * n, 8 * n, 224_767]
    segments = [8 * n, 8, 8 * n, 1279, 768, 768, 1279, 8, 11_008]
    assert parts_of(torch=(2, 11)) == [*copied, *sort, 0, *segments, 11_008]
    assert parts_of("bfloat16", torch=(2, 11))[-2:] == [11_008, 96 * 128 * 4]
    assert parts_of(torch=(2, 10))[-1] == 11_008 // 8 * 128 * 4


def test_indices_that_lie_apart_are_copied() -> None:
    apart = Shape((16, 128), "int64", strides=(0, 1))
    weight = Shape((512, 768))
    assert of(call("embedding(weight, indices)", weight, apart)) == [16 * 128 * 8, 0]
    for alike in (Shape((16, 128), "int64"), Shape((1, 128), "int64", strides=(7, 1))):
        assert of(call("embedding(weight, indices)", weight, alike)) == [0]
    assert of(call(BACKWARD, Shape((16, 128, 8)), apart, 512, -1, False)) == [16 * 128 * 8, 0]


def test_a_number_from_the_host_lies_on_the_device_first() -> None:
    condition, number = Shape((16,), "bool"), Shape((), place="cpu")
    assert of(call("where(condition, self, other)", condition, Shape((16,)), number)) == [4, 0]
