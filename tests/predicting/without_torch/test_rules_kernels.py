"""What normalisation, operators on lists, sorting, choosing and sampling take."""

from __future__ import annotations

import pytest
from rule_calls import Shape, call, of, shapes

from bfc_tools.predicting.rules import cub
from bfc_tools.predicting.rules.tensors import div_up

LAYER_NORM = (
    "native_layer_norm_backward(grad_out, input, normalized_shape, mean, rstd, weight, bias)"
)


def layer_norm(rows: int, columns: int, gpu: str = "a100") -> list[int]:
    tensor, weight = Shape((rows, columns)), Shape((columns,))
    arguments = (tensor, tensor, [columns], None, None, weight, weight)
    return of(call(LAYER_NORM, *arguments, result=(tensor, weight, weight), gpu=gpu))


def test_weights_of_many_short_rows_are_summed_in_blocks() -> None:
    blocks = 32768 // (256 // 32)
    found = layer_norm(1 << 18, 256)
    assert found[:3] == [0, blocks * 256 * 4, blocks * 256 * 4]
    assert len(found) == 3 + 2 * 4  # and each of the two sums has partial results


def test_weights_of_few_or_long_rows_are_not() -> None:
    assert layer_norm(1 << 16, 256) == [0]
    assert layer_norm(1 << 18, 1728) == [0]  # as many columns as fill 54 of 108 multiprocessors
    assert layer_norm(1 << 18, 1700)[1] > 0


GROUP_NORM = "native_group_norm(input, weight, bias, N, C, HxW, group, eps)"
GROUP_BACKWARD = "native_group_norm_backward(g, input, mean, rstd, weight, N, C, HxW, group)"


def test_group_norm_has_a_factor_for_each_channel() -> None:
    image = Shape((4, 64, 32, 32))
    weight = Shape((64,))
    assert of(call(GROUP_NORM, image, weight, None, 4, 64, 1024, 8, 1e-5)) == [0, 1024, 1024]
    assert of(call(GROUP_NORM, image, None, None, 4, 64, 1024, 8, 1e-5)) == [0]  # as by vmap
    found = of(call(GROUP_BACKWARD, image, image, None, None, weight, 4, 64, 1024, 8))
    assert found == [0, 1024, 1024, 128, 128, 1024, -128, -128]


BATCH_NORM = "native_batch_norm(input, weight, bias, running_mean, running_var, training)"


def batch_norm(tensor: Shape, weight: Shape) -> list[int]:
    return of(call(BATCH_NORM, tensor, weight, weight, weight, weight, True))


def test_batch_norm_of_channels_last_halves_shares_channels_between_blocks() -> None:
    last = Shape((64, 64, 56, 56), "bfloat16", (64 * 56 * 56, 1, 64 * 56, 64))
    partial = 4 * 64 * 128 * 4
    assert batch_norm(last, Shape((64,), "bfloat16")) == [0, partial, 8, -8, -partial]


def test_batch_norm_needs_nothing_where_cudnn_or_a_channel_s_own_block_works() -> None:
    images = Shape((64, 64, 56, 56))
    assert batch_norm(images, Shape((64,))) == [0]
    last = Shape((64, 64, 56, 56), "float32", (64 * 56 * 56, 1, 64 * 56, 64))
    assert batch_norm(last, Shape((64,))) == [0]
    assert batch_norm(Shape((4, 64, 8, 8), "bfloat16"), Shape((64,), "bfloat16")) == [0]


def test_norms_of_a_list_have_a_number_for_each_chunk() -> None:
    tensors = shapes([(65537,), (10,), (1000, 1000)])
    assert of(call("_foreach_norm(self, ord)", tensors, 2)) == [3 * 16 * 4, 0]
    mixed = [*tensors, Shape((4,), "float16")]
    assert of(call("_foreach_norm(self, ord)", mixed, 2)) == [0]


@pytest.mark.parametrize("backward", [False, True])
def test_pixels_are_put_in_order_for_an_adaptive_pool(backward: bool) -> None:
    """Images whose channels lie side by side: 89 MiB for 64 of them."""
    strides, small = (64 * 56 * 56, 1, 64 * 56, 64), (64 * 49, 1, 64 * 7, 64)
    image, pooled = Shape((1, 64, 56, 56), strides=strides), Shape((1, 64, 7, 7), strides=small)
    places = Shape((1, 64, 7, 7), "int64", small)
    if backward:
        name = "adaptive_max_pool2d_backward(grad_output, self, indices)"
        made = call(name, pooled, image, places, result=image)
    else:
        made = call("adaptive_max_pool2d(self, output_size)", image, 7, result=(pooled, places))
    assert of(made) == [0, 12_544, 25_088, 802_816]


SORT = "sort(self, dim=-1, descending=False)"


def test_short_rows_are_sorted_in_place() -> None:
    """The indices of each row are copied from those of one."""
    assert of(call(SORT, Shape((1000, 4096)), -1)) == [0, 4096 * 8]


def test_one_long_row_is_sorted_by_cub() -> None:
    size = cub.radix_sort(100_000, 4, 8, 32, (8, 0))
    assert of(call(SORT, Shape((100_000,)), -1)) == [0, 800_000, size, -size]


def test_some_long_rows_are_sorted_together() -> None:
    found = of(call(SORT, Shape((4, 5000)), -1))
    assert found[:4] == [0, 160_000, 160_000, 80_000]
    assert found[5] == -found[4]
    assert found[6] == -80_000


def test_many_long_rows_are_segments() -> None:
    found = of(call(SORT, Shape((200, 5000)), -1))
    assert found[1] == 8_000_000
    assert found[2] == cub.aliased(4_000_000, 8_000_000)


def test_a_scan_of_booleans_copies_them() -> None:
    found = of(
        call("cumsum(self, dim)", Shape((64, 64), "bool"), 0, result=Shape((64, 64), "int64"))
    )
    assert found == [0, 64 * 64 * 8]


def test_a_scan_of_one_row_is_cub_s() -> None:
    row = Shape((1 << 20,))
    size = cub.scan(1 << 20, 4, 3)
    assert of(call("cumsum(self, dim)", row, 0, result=row)) == [0, size, -size]


def test_what_is_not_zero_is_counted_and_then_written() -> None:
    """As on an H200: the sum, and behind the result the places."""
    made = call("nonzero(self)", Shape((1000, 20)), gpu="h200", torch=(2, 11))
    assert of(made) == [4, 21503, -21503, 0, 1023, -1023]
    turned = call("nonzero(self)", Shape((1000, 20), "bool", (1, 1000)), gpu="h200", torch=(2, 11))
    assert of(turned)[0] == 20000
    assert of(call("nonzero(self)", Shape(()), gpu="h200", torch=(2, 11))) == [4, 1, -1, 0]


DRAW = "multinomial(self, num_samples, replacement)"


def test_sampling_one_is_a_race() -> None:
    rows = Shape((8, 1000))
    found = of(call(DRAW, rows, 1, False, result=Shape((8, 1), "int64")))
    assert found == [0, 4, 1, 4, 1, 1, -1, -4, -1, -4, 32, 8, 1, -8, -32, 1, -1, 32_000]
    assert of(call(DRAW, rows, 1, True, result=Shape((8, 1), "int64"))) == found
    several = of(call(DRAW, rows, 5, False, result=Shape((8, 5), "int64")))
    assert several == [*found, 8 * 5 * 4]


def test_sampling_with_replacement_searches_in_sums() -> None:
    found = of(call(DRAW, Shape((8, 1000)), 5, True, result=Shape((8, 5), "int64")))
    assert found == [0, 32_000, 32_000, 32_000]


TOPK = "topk(self, k, dim)"


def chosen(*shape: int) -> tuple[Shape, Shape]:
    return Shape(shape), Shape(shape, "int64")


def test_topk_copies_what_is_not_in_order() -> None:
    assert of(call(TOPK, Shape((8, 1000)), 5, -1, result=chosen(8, 5))) == [0]
    turned = Shape((1000, 8), strides=(1, 1000))
    assert of(call(TOPK, turned, 5, 0, result=chosen(5, 8))) == [0, 32_000, -32_000]


def test_long_rows_are_given_several_blocks() -> None:
    assert of(call(TOPK, Shape((20, 19999)), 5, -1, result=chosen(20, 5))) == [0]
    found = of(call(TOPK, Shape((20, 50_000)), 5, -1, result=chosen(20, 5)))
    items = div_up(20 * 50_000, 108 * 6 * 256)
    blocks = 20 * div_up(50_000, items * 256)
    counts = blocks * 512, 20 * 1024  # and a sum for each of 256 digits
    assert found[1:8] == [80, 160, 160, *counts, blocks * 4, blocks * 4]
    assert sum(found) == 0
    drawn = of(call(DRAW, Shape((20, 50_000)), 5, False, result=chosen(20, 5)[1]))
    assert drawn[-len(found) + 1 :] == found[1:]


SOFTMAX_BACKWARD = "_softmax_backward_data(grad_output, output, dim, input_dtype)"


def test_the_gradient_of_a_softmax_is_multiplied_first() -> None:
    scores, spread = Shape((4, 64, 64)), Shape((4, 64, 64), strides=(0, 0, 0))
    assert of(call(SOFTMAX_BACKWARD, scores, scores, -1, "float32")) == [0, 65536]
    logs = SOFTMAX_BACKWARD.replace("_softmax", "_log_softmax")
    assert of(call(logs, scores, scores, -1, "float32")) == [0]
    assert of(call(logs, spread, scores, -1, "float32")) == [0, 65536]


def test_a_loss_has_one_for_each_element_first() -> None:
    given, one = Shape((1000, 1000)), Shape(())
    name = "mse_loss(self, target, reduction=1)"
    found = of(call(name, given, Shape((1, 1000)), 1, result=one))
    assert found[:2] == [0, 4_000_000]
    assert found[2:4] == [-found[5], -found[4]]  # the partial results of its mean
    assert of(call(name, given, given, 0, result=given)) == [0]
    huber = of(call(name.replace("mse", "huber"), given, given, 1, result=one))
    assert huber[:2] == [4_000_000, 0]


def test_two_dimensions_are_rolled_one_after_the_other() -> None:
    name = "roll(self, shifts, dims=None)"
    image = Shape((2, 8, 8, 3))
    assert of(call(name, image, [1], [1])) == [0]
    assert of(call(name, image, [1, 1], [1, 2])) == [1536, 0]
    turned = Shape((2, 3, 8, 8), strides=(192, 1, 24, 3))
    assert of(call(name, turned, [1, 1], [2, 3])) == [1536, 1536, -1536, 0]


def test_what_the_host_gets_is_converted_on_the_device() -> None:
    half, host = Shape((64, 64), "bfloat16"), Shape((64, 64), place="cpu")
    name = "_to_copy(self)"
    assert of(call(name, half, result=host)) == [0, 64 * 64 * 4]
    assert of(call(name, Shape((64, 64)), result=host)) == [0]
    turned = Shape((64, 64), strides=(1, 64))
    assert of(call(name, turned, result=host)) == [0, 64 * 64 * 4]
    assert of(call(name, turned, result=Shape((64, 64), "float32", (1, 64), "cpu"))) == [0]
    assert of(call(name, host, result=half)) == [0]
    assert of(call("copy_(self, src)", host, half)) == [0, 64 * 64 * 4]


def test_rows_that_lie_apart_are_copied_before_they_are_normalised() -> None:
    moved = Shape((2, 8, 8, 64), strides=(64 * 64, 8, 1, 64))
    name = "native_layer_norm(input, normalized_shape, weight, bias, eps)"
    assert of(call(name, moved, [64], None, None, 1e-5)) == [2 * 64 * 64 * 4, 0]
    weight = Shape((64,))
    arguments = (moved, moved, [64], None, None, weight, weight)
    result = (Shape((2, 8, 8, 64)), weight, weight)
    assert of(call(LAYER_NORM, *arguments, result=result)) == [2 * 64 * 64 * 4, 0, 2 * 64 * 64 * 4]
