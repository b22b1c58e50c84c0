"""What kernels make beside their results, and gradients that fake tensors would compute otherwise:
each by the sizes that PyTorch's source gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as functional

import bfc
from bfc.pytorch.extension import torch_version
from bfc_tools.predicting.releases import release_of

#: CCCL 3 aligns twice what a scan and a selection describe.
ALIGNED = 256 * (release_of(torch_version(torch)).cccl >= 3)


def sizes(run: Any) -> list[int]:
    """The allocations in their order."""
    trace = run.trace
    return [int(size) for op, size in zip(trace.op, trace.size, strict=True) if op == 0]


def assumed(run: Any) -> dict[str, Any]:
    return {one["what"]: one["value"] for one in run.assumptions}


def tensor(*shape: int, dtype: Any = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="cuda")


def one_hot(indices: torch.Tensor) -> torch.Tensor:
    return functional.one_hot(indices, 4)


@pytest.mark.filterwarnings("ignore:.torch.jit.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.*:FutureWarning")
def test_one_hot_writes_ones_into_zeros() -> None:
    """For subclasses PyTorch compares all numbers with all, and converts the answers."""
    with bfc.predict("a100") as run:
        functional.one_hot(tensor(512, dtype=torch.int64), 64)
        functional.one_hot(torch.full((512,), 7, device="cuda"))
        torch.jit.script(one_hot)(tensor(512, dtype=torch.int64))
    given, number = 512 * 8, 8
    assert sizes(run)[:5] == [given, 64 * given, given, number, 8 * given]


@pytest.mark.parametrize("dim", [0, 1])
def test_the_gradient_of_a_running_product_is_a_quotient(dim: int) -> None:
    with bfc.predict("a100") as run:
        x = tensor(256, 64).requires_grad_()
        y = x.cumprod(dim)
        y.backward(torch.empty_like(y))
    each, mask = 256 * 64 * 4, 256 * 64
    partial = [size for size in sizes(run)[5:] if size == each]
    assert sizes(run)[:6] == [each, each, each, each, mask, 1]
    assert len(partial) == 4  # flipped, summed up, flipped, divided
    assert assumed(run) == {"the gradient of a product: elements that are zero": 0}


def test_the_gradient_of_a_product_is_a_quotient() -> None:
    with bfc.predict("a100") as run:
        x = tensor(256, 64).requires_grad_()
        torch.prod(x, dim=1).backward(tensor(256))
        x.prod().backward()
        x.detach().prod(1, keepdim=True)
    each = 256 * 64 * 4
    assert sizes(run).count(each) == 1 + 2 + 2
    assert not any(size % each and size > 2 * each for size in sizes(run))


def test_a_grid_of_an_image_is_a_product() -> None:
    """With a workspace of cuBLAS, and the places of all pixels beside it."""
    with bfc.predict("a100") as run:
        functional.affine_grid(tensor(8, 2, 3), [8, 3, 64, 64], align_corners=False)
    assert {8 * 64 * 64 * 3 * 4, 8 * 64 * 64 * 2 * 4, 8_519_680} < set(sizes(run))


@pytest.mark.parametrize("dims", [2, 3])
def test_a_reflection_reads_row_by_row(dims: int) -> None:
    """As `padding_mode="reflect"` has it; a border that repeats is read as it lies."""
    last = [torch.channels_last, torch.channels_last_3d][dims - 2]
    shape, edges = [2, 8, *[16] * dims], [1] * (2 * dims)
    with bfc.predict("a100") as run:
        x = torch.empty(shape, device="cuda", memory_format=last).requires_grad_()
        for mode in ("reflect", "replicate"):
            y = functional.pad(x, edges, mode=mode)
            torch.autograd.grad(y, x, torch.empty_like(y, memory_format=last))
    whole, padded = 2 * 8 * 16**dims * 4, 2 * 8 * 18**dims * 4
    reflected, repeated = [padded, whole, padded, whole, padded], [padded, padded, whole]
    assert sizes(run)[1:] == reflected + repeated


@pytest.mark.parametrize("p", [1.0, 2.0])
def test_distances_have_a_gradient_for_each_pair(p: float) -> None:
    """Unless there are many in two norms, which are a product of matrices."""
    with bfc.predict("a100") as run:
        x, y = tensor(20, 32).requires_grad_(), tensor(16, 32)
        functional.pdist(x, p).sum().backward()
        torch.cdist(x, y, p).sum().backward()
    assert {20 * 16 * 32 * 4, 20 * 19 * 32 * 4} < set(sizes(run))


def test_a_mean_of_what_is_scattered_counts() -> None:
    with bfc.predict("a100") as run:
        index, source = tensor(1000, 64, dtype=torch.int64), tensor(1000, 64)
        tensor(100, 64).scatter_reduce_(0, index, source, "mean")
        tensor(100, 64).scatter_reduce_(0, index, source, "sum")
    into, ones = 100 * 64 * 4, 1000 * 64 * 4
    assert sizes(run) == [2 * ones, ones, into, ones, into, into // 4, into]


def test_what_is_not_zero_is_counted_in_a_mask() -> None:
    with bfc.predict("a100") as run:
        tensor(256, 64).count_nonzero(1)
    mask = 256 * 64
    assert sizes(run) == [4 * mask, mask, 256 * 8, 8 * mask]


def test_the_median_of_all_is_found_by_sorting() -> None:
    with bfc.predict("a100") as run:
        x = tensor(256, 64)
        x.median()
        values, indices = x.median(1, keepdim=True)
        assert values.shape == indices.shape == (256, 1)
    assert sizes(run)[1:3] == [256 * 64 * 4, 256 * 64 * 8]
    assert sizes(run)[-2:] == [256 * 4, 256 * 8]


def test_an_order_at_random_is_a_sort_by_random_keys() -> None:
    with bfc.predict("a100") as run:
        torch.randperm(1000, device="cuda")
        torch.randperm(100_000, device="cuda")
    found = sizes(run)
    assert found[:6] == [8000, 8, 8000, 4000, 4000, 1]  # as an H100 has it
    assert found[6:11] == [800_000, 8, 800_000, 800_000, 800_000]


def test_a_power_of_a_number_has_the_number_on_the_device() -> None:
    """As an H100 has it: the table of frequencies of a rotary embedding, say."""
    with bfc.predict("h100") as run:
        places = tensor(64)
        10000.0**places
        1.0**places
    assert sizes(run) == [256, 256, 8, 256]


def test_a_distribution_reduces_all_that_it_asks() -> None:
    """It asks `torch._is_all_true`, which was counted as if it needed nothing but its result."""
    with bfc.predict("h100") as run:
        torch.distributions.Normal(tensor(8192, 20), torch.ones(8192, 20, device="cuda"))
    asked = [163_840, 1, 20, 4]  # as an H100 has it
    assert sizes(run)[2:] == asked * 2


def test_elements_that_differ_take_what_is_asked_for() -> None:
    with bfc.predict("a100") as run:
        x = tensor(1000)
        assert x.unique().shape == (1000,)
        few = sizes(run)
        found, places, counts = x.unique(return_inverse=True, return_counts=True)
        assert found.shape == places.shape == counts.shape == (1000,)
    assert few == [4000, 4000, 1, 4000, 8, 767 + ALIGNED]  # given, sorted, found
    assert sizes(run)[len(few) :].count(8000) == 2 + 2 + 1  # range, order; inverse, sums; counts


def test_elements_that_are_drawn_differ_less() -> None:
    """As an H100 has it: a hundred numbers among ten thousand."""
    with bfc.predict("h100") as run:
        drawn = torch.randint(100, (10_000,), device="cuda")
        assert drawn.unique().shape == (100,)
        before = len(sizes(run))
        torch.isin(drawn, torch.arange(50, device="cuda"))
        torch.isin(drawn, torch.arange(5, device="cuda"))
        assert torch.isin(drawn, 3).shape == (10_000,)
        assert torch.isin(3, drawn, assume_unique=True, invert=True).shape == ()
    each, both, of_50 = 80_000, 1200, [400, 1, 400, 8, 767 + ALIGNED]
    assert sizes(run)[before : before + 30] == [
        *(400, 10_000, each, each, each, 180_223, each, each, 1023, each, 8, 767 + ALIGNED),
        *of_50, *(both, both, both, both, 150, 149, 150, 10_000),
        *(40, 10_000, 50_000, 10_000, 10_000),
    ]  # fmt: skip


def test_the_most_frequent_number_of_a_long_row_is_found_by_sorting() -> None:
    """It takes 1,739,391 bytes on an H100; it was once taken for a kernel that needs nothing."""
    with bfc.predict("h100") as run:
        torch.randint(50, (20, 5000), device="cuda").mode(-1)
    each = [40_000, 99_071, 21_507, 400, 400, 1535, 767, 84_751]
    assert sizes(run) == [800_000, 160, 160, 800_000, *each * 20]
    with bfc.predict("h100") as run:
        tensor(300, 100).mode(0)
        tensor(0, 100).mode(1)
    assert sizes(run)[:4] == [120_000, 400, 800, 120_000]


def test_a_mask_that_scatters_has_a_gradient_of_what_it_selects() -> None:
    """It takes 1,920,064 bytes on an H100."""
    with bfc.predict("h100") as run:
        x, source = tensor(1000, 64).requires_grad_(), tensor(1000, 64).requires_grad_()
        mask = torch.arange(64, device="cuda") % 2 == 0
        y = x.masked_scatter(mask, source)
        before = len(sizes(run))
        y.backward(tensor(1000, 64))
    each = 256_000
    assert sizes(run)[before:][:8] == [
        *(each, each, 64_000, 4, 21_503, 2 * each, 767 + ALIGNED, each // 2),
    ]
    assert sizes(run)[-2:] == [each // 2, each]


def test_what_a_mask_selects_is_scattered_into_zeros() -> None:
    with bfc.predict("h100") as run:
        x = tensor(1000).requires_grad_()
        torch.masked_select(x, torch.arange(1000, device="cuda") % 2 == 0).sum().backward()
    assert sizes(run)[-3:] == [4000, 8000, 1023 + ALIGNED]


def test_what_is_taken_is_put_into_zeros() -> None:
    """520,000 bytes on an H100; 776,000 were predicted."""
    with bfc.predict("h100") as run:
        x, index = tensor(1000, 64).requires_grad_(), tensor(500, dtype=torch.int64)
        y = x.take(index)
        before = len(sizes(run))
        y.backward(tensor(500))
    assert sizes(run)[before:] == [2000, 256_000]


def test_rows_of_conjugates_are_copied() -> None:
    """3,670,016 bytes on an H100 where a factor is turned round."""
    with bfc.predict("h100") as run:
        shape = 256, 256
        x, y = (tensor(*shape, dtype=torch.complex64).requires_grad_() for _ in range(2))
        z = x @ y.t()
        before = len(sizes(run))
        z.backward(tensor(*shape, dtype=torch.complex64))
    each = 256 * 256 * 8
    assert [one for one in sizes(run)[before:] if one == each] == [each] * 5  # one of conjugates


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_pairs_of_indices_may_all_differ() -> None:
    """Also where each index was drawn among few."""
    with bfc.predict("h100"):
        places = torch.randint(10, (2, 100), device="cuda")
        made = torch.sparse_coo_tensor(places, tensor(100), (10, 10)).coalesce()
        assert made.values().shape == (100,)


@pytest.mark.parametrize("in_place", [True, False])
def test_the_gradient_of_a_view_that_was_changed_is_copied(in_place: bool) -> None:
    """As by an activation behind InstanceNorm, on an H100 with PyTorch 2.11: a subclass's gradient
    is viewed."""
    with bfc.predict("h100") as run:
        norm, x = torch.nn.InstanceNorm2d(16).cuda(), tensor(2, 16, 32, 32).requires_grad_()
        y = functional.leaky_relu(norm(x), inplace=in_place)
        gradient = tensor(2, 16, 32, 32)
        before = len(sizes(run))
        y.backward(gradient)
    each = 131_072
    copies = [each, each, each] if in_place else []  # for the view, its base, and the activation
    assert sizes(run)[before:][: len(copies) + 2] == [*copies, each, each]


def test_a_gradient_that_was_copied_is_freed() -> None:
    """At once: a network in three dimensions needs 1,435,471,872 bytes on an H100, and not
    79,691,776 more."""
    with bfc.predict("h100") as run:
        x = tensor(2, 16, 32, 32).requires_grad_()
        y = functional.leaky_relu_(torch.nn.InstanceNorm2d(16).cuda()(x)) * 3
        before = run.trace.op.size
        y.backward(tensor(2, 16, 32, 32))
    assert run.trace.op[before : before + 5].tolist() == [0, 0, 0, 1, 0]


def test_deviations_are_checked() -> None:
    with bfc.predict("h100") as run:
        torch.normal(tensor(1000), tensor(1000))
        torch.normal(0.0, tensor(1000))
    assert sizes(run) == [4000, 4000, *(4, 1, 4000, 4, 1), 4000, *(4, 1, 4000, 4, 1)]


def test_rows_that_differ_are_at_most_all() -> None:
    with bfc.predict("a100") as run:
        x = tensor(100, 3)
        found, places = torch.unique(x, dim=0, return_inverse=True)
        assert found.shape == (100, 3)
        assert places.shape == (100,)
        again, counts = torch.unique_consecutive(x.t(), dim=1, return_counts=True)
        assert again.shape == (3, 100)
        assert counts.shape == (100,)
    assert assumed(run) == {"unique: all rows": 100}


def test_a_transform_back_copies_what_it_is_given() -> None:
    with bfc.predict("a100") as run:
        torch.fft.irfft(tensor(16, 129, dtype=torch.complex64))
    assert sizes(run) == [16 * 129 * 8, 16 * 256 * 4, 16 * 129 * 8]


def test_repeats_are_summed_up() -> None:
    with bfc.predict("a100") as run:
        tensor(100, 64).repeat_interleave(tensor(100, dtype=torch.int64), 0, output_size=300)
    assert sizes(run)[2] == 800
    assert sizes(run)[-2:] == [300 * 8, 300 * 64 * 4]


def test_numbers_of_a_dirichlet_are_those_of_a_gamma_before() -> None:
    with bfc.predict("a100") as run:
        given = tensor(100, 8).requires_grad_()
        found = torch.distributions.Dirichlet(given, validate_args=False).rsample()
        found.sum().backward()
    assert sizes(run)[:3] == [100 * 8 * 4] * 3
    assert given.grad is not None


@pytest.mark.parametrize("loss", [functional.mse_loss, functional.smooth_l1_loss])
def test_a_mean_of_differences_keeps_the_memory_of_all(loss: Any) -> None:
    """As an H100 allocates: the result is as large as the input, and so is what is summed up."""
    each = 1024 * 64 * 4
    with bfc.predict("h100") as run:
        given, target = tensor(1024, 64), tensor(1024, 64)
        held = torch.cuda.memory_allocated()
        mean = loss(given, target)
        assert mean.shape == ()
        assert torch.cuda.memory_allocated() - held == each
        del mean
        assert loss(given, target, reduction="none").shape == given.shape
    found = sizes(run)[2:]
    assert found.count(each) == 3


def test_what_is_deterministic_is_sorted() -> None:
    """As an H100 has it with PyTorch 2.11: rows for an index, and the gradient of each."""
    torch.use_deterministic_algorithms(True)
    try:
        with bfc.predict("h100") as run:
            rows = tensor(500, 64).requires_grad_()
            rows.index_select(0, tensor(9000, dtype=torch.int64)).backward(tensor(9000, 64))
    finally:
        torch.use_deterministic_algorithms(False)
    n, sort = 72_000, 151_039
    order = [n, n, n, n, n, 8, sort]
    found = sizes(run)
    assert found[:4] == [128_000, n, 2_304_000, 4]
    assert found[4:] == [2_304_000, 128_000, 2_304_000, 8, 1, 8, 1, *order]


def test_bags_have_a_gradient_of_sorted_indices() -> None:
    """It was once taken for a kernel that needs nothing."""
    with bfc.predict("h100") as run:
        table, words = tensor(100, 16).requires_grad_(), tensor(64, 60, dtype=torch.int64)
        functional.embedding_bag(words, table).backward(tensor(64, 16))
    assert 79_359 in sizes(run)
    assert sizes(run)[-2:] == [3872, 30_976]


def test_columns_are_made_as_large_as_what_they_are_made_of() -> None:
    """And then resized, as on an H100: what is larger stays. It takes 3,241,472 bytes."""
    image, columns = 131_072, 1_036_800
    with bfc.predict("h100") as run:
        x = tensor(4, 8, 32, 32).requires_grad_()
        functional.unfold(x, 3).backward(tensor(4, 72, 900))
    assert sizes(run) == [image, image, columns, columns, columns]
    assert run.peak_allocated == 3_241_472
    with bfc.predict("h100") as run:
        functional.fold(tensor(4, 72, 900), (32, 32), 3)
    assert sizes(run) == [columns, columns]


@pytest.mark.parametrize("name", ["max", "min", "median"])
def test_the_gradient_of_the_greatest_number_changes_a_mask(name: str) -> None:
    """For subclasses of tensors it makes another: 40 MB of 560 for 40,000,000 numbers."""
    with bfc.predict("h100") as run:
        x = tensor(1000).requires_grad_()
        getattr(x, name)().backward()
    assert sizes(run)[-7:] == [1000, 1, 1000, 8, 8000, 4, 4000]


def test_the_mean_of_a_binary_cross_entropy_is_computed_apart() -> None:
    with bfc.predict("h100") as run:
        functional.binary_cross_entropy(tensor(2000, 2001), tensor(2000, 2001))
    n = 16_008_000
    assert sizes(run) == [n, n, n, 4, 1956, 4]


def test_tensors_that_are_compared_take_a_mask() -> None:
    """24,000 bytes on an H100 for numbers that are nearly alike."""
    with bfc.predict("h100") as run:
        one, other = tensor(1000), tensor(1000)
        assert torch.equal(one, other)
        assert sum(sizes(run)) == 9001
        torch.cuda.reset_peak_memory_stats()
        assert torch.allclose(one, other)
    assert run.peak_allocated >= 24_000


@pytest.mark.parametrize("compare", [torch.equal, torch.allclose])
def test_tensors_of_two_devices_are_not_compared(compare: Any) -> None:
    with bfc.predict("h100"):
        assert compare(torch.ones(3), torch.ones(3))
        with pytest.raises(RuntimeError, match="found at least two devices, cuda:0 and cpu!"):
            compare(torch.ones(3, device="cuda"), torch.ones(3))


def test_batch_norm_makes_the_gradient_of_the_input_last() -> None:
    with bfc.predict("h100") as run:
        layer, x = torch.nn.BatchNorm1d(64, device="cuda"), tensor(70_000, 64).requires_grad_()
        layer(x).backward(tensor(70_000, 64))
    assert sizes(run)[-7:] == [256, 256, 256, 256, 65_536, 8, 17_920_000]


def test_a_repeated_row_is_as_often_there_as_was_said() -> None:
    """207,200 bytes on an H100, where 103,200 were predicted."""
    with bfc.predict("h100") as run:
        rows = tensor(100, 64).requires_grad_()
        found = rows.repeat_interleave(torch.full((100,), 3, device="cuda"), 0)
        found.backward(torch.ones_like(found))
    assert found.shape == (300, 64)
    assert run.peak_allocated == 207_360  # in blocks of 512


def test_windows_have_the_numbers_of_their_dimension() -> None:
    with bfc.predict("h100") as run:
        x = tensor(100, 300).requires_grad_()
        x.unfold(1, 10, 5).backward(tensor(100, 59, 10))
    assert sizes(run) == [120_000, 236_000, 120_000, 2400]


def test_a_number_alone_is_unfolded() -> None:
    with bfc.predict("h100"):
        number = tensor(1)[0].requires_grad_()
        number.unfold(0, 1, 1).sum().backward()
    assert number.grad.shape == ()


def test_a_replaced_function_keeps_its_name() -> None:
    with bfc.predict("h100"):
        assert torch.prod.__name__ == "prod"


def test_a_copy_of_the_images_is_held_until_the_bias_is_summed() -> None:
    """As an H100 has it, of a text whose words lie one after the other."""
    with bfc.predict("h100") as run:
        words, weight = tensor(64, 200, 300), tensor(256, 300, 5)
        gradient = tensor(64, 256, 196)
        options = [1], [0], [1], False, [0], 1, [False, True, True]
        torch.ops.aten.convolution_backward(gradient, words.mT, weight, [256], *options)
    trace = run.trace
    size_of = dict(zip(trace.id[trace.op == 0], trace.size[trace.op == 0], strict=True))
    events = [(op, size_of[name]) for op, name in zip(trace.op, trace.id, strict=True)]
    assert events.index((0, 256 * 4)) < events.index((1, 64 * 200 * 300 * 4))
