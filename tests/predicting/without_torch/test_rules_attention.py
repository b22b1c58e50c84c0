"""Which kernel attention takes, and what the kernel takes beside its results."""

from __future__ import annotations

from typing import Any

import pytest
from rule_calls import Shape, call, of

from bfc_tools.predicting import devices
from bfc_tools.predicting.releases import RELEASES, release_of
from bfc_tools.predicting.rules import attention
from bfc_tools.predicting.rules.sdpa_choice import Attention, Backend, choose

FLASH, EFFICIENT, MATH, CUDNN = Backend.FLASH, Backend.EFFICIENT, Backend.MATH, Backend.CUDNN


def asked(
    head: int = 64,
    dtype: str = "bfloat16",
    *,
    queries: int = 128,
    keys: int = 128,
    heads: int = 8,
    key_heads: int = 8,
    mask: Any = None,
    dropout: float = 0.0,
    causal: bool = False,
    gqa: bool = False,
    gradient: bool = True,
) -> Attention:
    query = Shape((2, heads, queries, head), dtype)
    key = Shape((2, key_heads, keys, head), dtype)
    return Attention(query, key, key, mask, dropout, causal, gqa, gradient)


MASK = Shape((2, 8, 128, 128), "bfloat16")
ROWS = Shape((8, 128, 64), "bfloat16")
WITHOUT_BATCH = Attention(ROWS, ROWS, ROWS, None, 0.0, False, False, True)


def test_the_table_of_releases_has_no_gap() -> None:
    """Versions that were not in it were given the newest in silence."""
    minors = [one.version[1] for one in RELEASES]
    assert minors == list(range(minors[0], minors[-1] + 1))
    assert [one.cudnn for one in RELEASES] == sorted(one.cudnn for one in RELEASES)
    assert release_of((2, 14, 1)).cudnn == 92400
    assert release_of((2, 15, 0)).cudnn == 92600


@pytest.mark.parametrize(
    ("gpu", "torch", "made", "backend"),
    [
        # by the type and the GPU
        ("a100", (2, 13), asked(), FLASH),
        ("a100", (2, 13), asked(dtype="float32"), EFFICIENT),
        ("a100", (2, 13), asked(dtype="float64"), MATH),
        ("t4", (2, 13), asked(dtype="float16"), EFFICIENT),
        ("t4", (2, 13), asked(), MATH),  # no bfloat16 before 8.0
        ("rtx5090", (2, 13), asked(), FLASH),
        # cuDNN first, where the release brings one that is new enough
        ("h100", (2, 13), asked(), CUDNN),
        ("b200", (2, 14), asked(), CUDNN),
        ("h100", (2, 10), asked(), FLASH),
        ("h100", (2, 13), asked(dtype="float32"), EFFICIENT),
        ("h100", (2, 13), asked(keys=1, queries=1), FLASH),
        ("h100", (2, 13), asked(dropout=0.1), FLASH),  # cuDNN knows sixteenths
        ("h100", (2, 13), asked(dropout=0.125), CUDNN),
        ("h100", (2, 13), asked(mask=MASK), CUDNN),
        ("h100", (2, 13), asked(head=256), FLASH),
        ("h100", (2, 11), asked(head=256), CUDNN),  # with a mask, too
        ("h100", (2, 11), asked(head=256, mask=MASK), CUDNN),
        ("h100", (2, 14), asked(head=256), CUDNN),
        ("h100", (2, 14), asked(head=160), FLASH),  # no gradient of such heads
        ("h100", (2, 14), asked(head=160, gradient=False), CUDNN),
        # by the head
        ("a100", (2, 13), asked(head=36), FLASH),  # padded to 40
        ("a100", (2, 13), asked(head=264), EFFICIENT),
        ("a100", (2, 13), asked(head=260), MATH),
        ("rtx4090", (2, 13), asked(head=200), EFFICIENT),
        ("rtx4090", (2, 13), asked(head=200, gradient=False), FLASH),
        ("rtx4090", (2, 13), asked(head=256), FLASH),
        ("rtx4090", (2, 13), asked(head=256, dropout=0.5), EFFICIENT),
        # by the rest
        ("a100", (2, 13), asked(mask=MASK), EFFICIENT),
        ("a100", (2, 13), asked(causal=True), FLASH),
        ("a100", (2, 13), asked(causal=True, keys=64), EFFICIENT),
        ("a100", (2, 13), asked(key_heads=2, gqa=True), FLASH),
        ("a100", (2, 13), asked(key_heads=2), MATH),
        ("a100", (2, 13), asked(key_heads=2, gqa=True, dtype="float32"), MATH),
        ("a100", (2, 13), asked(keys=0), MATH),
        # since 2.14, the efficient kernel shares heads, and one head is that of all queries
        ("a100", (2, 14), asked(key_heads=2, gqa=True, dtype="float32"), EFFICIENT),
        ("a100", (2, 14), asked(key_heads=2, gqa=True, mask=MASK), EFFICIENT),
        ("a100", (2, 14), asked(key_heads=2), MATH),
        ("a100", (2, 14), asked(key_heads=1), FLASH),
        ("a100", (2, 13), asked(key_heads=1), MATH),
        # and what has no batch gets one
        ("a100", (2, 14), WITHOUT_BATCH, FLASH),
        ("a100", (2, 13), WITHOUT_BATCH, MATH),
    ],
)
def test_the_gpu_chooses(
    gpu: str, torch: tuple[int, int], made: Attention, backend: Backend
) -> None:
    assert choose(made, devices.find(gpu), release_of(torch)) == backend


def test_what_the_program_switched_off_is_not_taken() -> None:
    gpu = devices.find("a100")
    assert choose(asked(), gpu, release_of((2, 13)), lambda one: one != FLASH) == EFFICIENT
    assert choose(asked(), gpu, release_of((2, 13)), lambda one: one == MATH) == MATH
    assert (
        choose(asked(dtype="float64"), gpu, release_of((2, 13)), lambda one: one == FLASH) is None
    )


def test_the_environment_takes_cudnn_off_the_first_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert choose(asked(), devices.find("h100"), release_of((2, 13))) == FLASH


def test_heads_with_gaps_are_not_taken() -> None:
    gapped = Shape((2, 8, 128, 64), "bfloat16", (8 * 128 * 128, 128 * 128, 128, 2))
    made = Attention(gapped, gapped, gapped, None, 0.0, False, False, True)
    assert choose(made, devices.find("a100"), release_of((2, 13))) == MATH


FLASH_FORWARD = "_scaled_dot_product_flash_attention(query, key, value, dropout_p=0.0)"


@pytest.mark.parametrize(
    ("batch", "queries", "keys", "splits"),
    [(8, 1024, 1024, 1), (1, 1, 4096, 8), (1, 64, 512, 2), (1, 1, 128, 1)],
)
def test_few_tasks_split_the_keys(batch: int, queries: int, keys: int, splits: int) -> None:
    assert attention.splits(batch, 16, queries, keys, 64, 108) == splits


def test_splits_have_sums_and_outputs_of_their_own() -> None:
    query, key = Shape((1, 16, 1, 64), "bfloat16"), Shape((1, 16, 4096, 64), "bfloat16")
    made = call(FLASH_FORWARD, query, key, key, 0.0)
    assert of(made) == [0, 8 * 16 * 4, 8 * 16 * 64 * 4]
    assert of(call(FLASH_FORWARD, query, key, key, 0.1)) == [0]


class Transposable(Shape):
    """A tensor of which the kernels see the sequence first."""

    def transpose(self, first: int, second: int) -> Shape:
        shape, strides = list(self.shape), list(self.stride())
        shape[first], shape[second] = shape[second], shape[first]
        strides[first], strides[second] = strides[second], strides[first]
        return Shape(tuple(shape), self.dtype, tuple(strides))


def rows_first(shape: tuple[int, int, int, int], dtype: str = "bfloat16") -> Transposable:
    """A tensor of heads that lie side by side for each element of the sequence."""
    _, heads, rows, head = shape
    return Transposable(shape, dtype, (heads * rows * head, head, heads * head, 1))


FLASH_BACKWARD = "_scaled_dot_product_flash_attention_backward(grad_out, query, key, value, out)"


def test_flash_sums_the_gradient_of_queries_in_32_bits() -> None:
    one = rows_first((2, 8, 200, 72))
    made = call(FLASH_BACKWARD, *[one] * 5)
    rows = 2 * 8 * 256
    assert of(made) == [0, rows * 4, rows * 96 * 4]


def test_a_gradient_of_other_strides_is_copied() -> None:
    one, other = rows_first((2, 8, 256, 64)), Transposable((2, 8, 256, 64), "bfloat16")
    assert of(call(FLASH_BACKWARD, other, *[one] * 4))[:2] == [2 * 8 * 256 * 64 * 2, 0]


def test_shared_keys_have_a_gradient_for_each_head() -> None:
    one, shared = rows_first((2, 8, 256, 64)), rows_first((2, 2, 256, 64))
    found = of(call(FLASH_BACKWARD, one, one, shared, shared, one))
    assert found[-2:] == [2 * 256 * 8 * 64 * 2] * 2


EFFICIENT_FORWARD = "_scaled_dot_product_efficient_attention(query, key, value)"
EFFICIENT_BACKWARD = (
    "_scaled_dot_product_efficient_attention_backward"
    "(grad_out_, query, key, value, attn_bias, out, logsumexp, dropout_p)"
)


def test_large_heads_need_an_output_in_32_bits() -> None:
    for head, dtype, nbytes in (
        (128, "float16", None),
        (256, "float16", 1),
        (256, "float32", None),
    ):
        one = Shape((2, 8, 64, head), dtype)
        expected = [0] if nbytes is None else [0, 2 * 8 * 64 * head * 4]
        assert of(call(EFFICIENT_FORWARD, one, one, one)) == expected


def test_the_efficient_backward_pass_has_accumulators() -> None:
    one = rows_first((2, 8, 256, 64), "float32")
    made = call(EFFICIENT_BACKWARD, one, one, one, one, None, one, None, 0.0)
    blocks = 256 // 64
    rows = 2 * 8 * 256
    product, sums = rows * 64 * 4, rows * 4
    accumulators = 2 * 8 * blocks * (4 + 64 * 64) * 4
    # in the order in which an H200 has it with PyTorch 2.11
    assert of(made)[1:] == [product, sums, sums, -sums, -product, accumulators, -sums]


def test_the_efficient_backward_pass_has_gradients_of_each_head_where_they_share_keys() -> None:
    query, key = rows_first((2, 8, 256, 64), "float32"), rows_first((2, 2, 256, 64), "float32")
    made = call(EFFICIENT_BACKWARD, query, query, key, key, None, query, None, 0.0)
    of_each_head = 2 * 8 * 256 * 64 * 4
    assert of(made)[6:8] == [of_each_head, of_each_head]


@pytest.mark.parametrize(
    ("gpu", "half", "head", "block"),
    [
        ("a100", True, 64, (64, 64)),
        ("a100", True, 128, (128, 128)),
        ("rtx4090", True, 96, (128, 64)),
        ("rtx4090", True, 128, (64, 64)),
        ("a100", False, 128, (128, 64)),
        ("t4", True, 128, (64, 64)),
        ("a100", True, 256, (128, 64)),
    ],
)
def test_the_first_kernel_that_fits_is_taken(
    gpu: str, half: bool, head: int, block: tuple[int, int]
) -> None:
    found = attention.backward_block(devices.find(gpu), half, head, False)
    assert (found.queries, found.keys) == block


def test_cudnn_sums_the_gradients_of_shared_heads_apart() -> None:
    """As on an H200: 2 sequences of 1024, 16 heads of 64, and 4 of keys and values."""
    signature = "_scaled_dot_product_cudnn_attention_backward(grad_out, query, key, value)"
    query, keys = Shape((2, 16, 1024, 64), "bfloat16"), Shape((2, 4, 1024, 64), "bfloat16")
    assert of(call(signature, query, query, query, query, gpu="h200")) == [0, 8519936]
    assert of(call(signature, query, query, keys, keys, gpu="h200")) == [0, 16908544]
