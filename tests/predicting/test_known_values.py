"""What a program reads of tensors that are filled with one number is that number, and no guess."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch import nn

import bfc


def guesses(run: Any) -> list[str]:
    return [one["what"] for one in run.assumptions]


def test_a_loop_ends_that_waits_until_all_are_done() -> None:
    """As text is generated: until the longest length, or a word that ends each text. It once never
    ended, since no text was ever found to be done."""
    with bfc.predict("a100") as run:
        words = torch.zeros(4, 8, dtype=torch.int64, device="cuda")
        unfinished = torch.ones(4, dtype=torch.int64, device="cuda")
        while True:
            new = torch.multinomial(torch.rand(4, 100, device="cuda"), 1)
            words = torch.cat([words, new], 1)
            done = torch.full((4,), False, device="cuda")
            done = done | torch.full((4,), words.shape[1] >= 16, device="cuda")
            done = done | torch.isin(words[:, -1], torch.tensor([2], device="cuda"))
            unfinished = unfinished & ~done
            if unfinished.max() == 0:
                break
        assert words.shape == (4, 16)
    assert len(guesses(run)) == 1  # before the longest length


def test_one_number_that_is_drawn_lies_in_its_range() -> None:
    """As torchvision chooses a size: it was given the number behind the last."""
    with bfc.predict("a100"):
        sizes = [480, 512, 544]
        drawn = torch.empty(1).uniform_(0.0, float(len(sizes))).item()
        assert sizes[int(drawn)] == 544
        assert 0.0 < torch.empty(()).uniform_().item() < 1.0
        assert bool(torch.empty(1).uniform_(-2.0, 2.0) < 2.0)
        assert torch.empty(4).uniform_(3.0)[0].item() == 1.0  # several are not known


def test_a_mask_of_ones_masks_nothing() -> None:
    with bfc.predict("a100") as run:
        mask = torch.ones(2, 8, dtype=torch.int64, device="cuda")
        assert torch.all(mask == 1)
        assert (mask[:, 1:].bool().sum() / 7).item() == 2.0
        assert not (1 - torch.ones_like(mask)).any()
        assert torch.full((3,), 0.5, device="cuda").mul(4).max().item() == 2.0
        assert torch.where(mask.bool(), 3, 4).min().item() == 3
    assert guesses(run) == []


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.normal_(),
        lambda x: x.view(-1)[:2].add_(torch.rand(2, device="cuda")),
        lambda x: x.__setitem__(0, 7.0),
        lambda x: torch._foreach_add_([x], [torch.rand_like(x)]),
        lambda x: x[0].zero_(),
        lambda x: torch.rand(x.shape, device="cuda", out=x),
    ],
)
def test_what_was_written_to_is_not_known(write: Any) -> None:
    with bfc.predict("a100") as run:
        x = torch.full((4, 4), 3.0, device="cuda")
        assert x.max().item() == 3.0
        assert guesses(run) == []
        write(x)
        x.max().item()
    assert guesses(run) == [".item()"]


def test_what_is_known_goes_with_its_memory() -> None:
    with bfc.predict("a100"):
        x = torch.zeros(4, device="cuda")
        known = x.sum().item()
        assert known == 0
        del x
        for _ in range(50):
            assert torch.rand(4, device="cuda").sum().item() == 1.0


def filled(value: Any, dtype: Any, count: int = 4) -> Any:
    return torch.full((count,), value, dtype=dtype, device="cuda")


@pytest.mark.parametrize(
    ("make", "value"),
    [
        (lambda: filled(1, torch.bool, 0).any(), False),
        (lambda: filled(0, torch.bool, 0).all(), True),
        (lambda: (torch.rand(4, device="cuda")[4:] == 1).all(), True),
        (lambda: filled(3, torch.int64, 0).sum(), 0),
        (lambda: filled(6, torch.int64)[:1] | True, 7),
        (lambda: filled(10**18, torch.int64).sum(), 4 * 10**18),
        (lambda: filled(float("-inf"), torch.float32).max(), float("-inf")),
        (lambda: filled(2.7, torch.float32).long().max(), 2),
        (lambda: (filled(200, torch.uint8) + 100).max(), 44),
        (lambda: (filled(2**62, torch.int64) * 2**62).max(), 0),
    ],
)
def test_what_is_known_is_what_the_device_computes(make: Any, value: Any) -> None:
    with bfc.predict("a100") as run:
        found = make().item()
    assert (found, type(found)) == (value, type(value))
    assert guesses(run) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda: filled(1.0, torch.float32, 0).mean(),
        lambda: filled(float("inf"), torch.float32).to(torch.int8).max(),
        lambda: filled(float("nan"), torch.float32).int().max(),
        lambda: (filled(0, torch.float32) * float("inf")).max(),
        lambda: (filled(60000, torch.float16) * 60000).max(),
        lambda: filled(1.0, torch.float32).view(torch.int32).max(),
        lambda: (torch.randint(4, 8, (4,), device="cuda") | True).max(),
        lambda: filled(0.1, torch.float32, 7).sum(),
        lambda: (filled(0.1, torch.float32) == 0.1).max(),
    ],
)
def test_what_wraps_around_or_is_rounded_is_not_known(make: Any) -> None:
    """Infinities once ended bfc with a traceback."""
    with bfc.predict("a100") as run:
        make().item()
    assert guesses(run) == [".item()"]


def test_places_of_a_maximum_are_not_known() -> None:
    with bfc.predict("a100") as run:
        values, places = filled(0, torch.float32), filled(0, torch.int64)
        torch.max(torch.rand(4, 4, device="cuda"), 1, out=(values, places))
        places[0].item()
    assert guesses(run) == [".item()"]


def test_a_loop_ends_once_nothing_is_left() -> None:
    with bfc.predict("a100"):
        done, at = filled(False, torch.bool), 0
        while not done[at:].all():
            at += 1
        assert at == 4


def test_what_the_host_draws_is_as_it_would_be_there() -> None:
    """Lengths of items, the order of an epoch, and batches of both. Each was 1 once, so that all
    batches were of the shortest sequences."""

    def drawn() -> list[Any]:
        torch.manual_seed(3)
        lengths = [int(torch.randint(20, 64, (1,))) for _ in range(8)]
        batches = torch.utils.data.DataLoader(lengths, 2, shuffle=True)
        found = [batch.tolist() for batch in batches]
        longest = [int(batch.max()) for batch in batches]
        rows = torch.randint(0, 9, (5,), generator=torch.Generator().manual_seed(7))
        rows[0] = 3
        return [lengths, found, longest, torch.randperm(6)[2:4].tolist(), rows.add_(1).tolist()]

    real = drawn()
    with bfc.predict("a100") as run:
        assert drawn() == real
    assert guesses(run) == []


def test_each_place_is_another() -> None:
    """As a mixture of experts goes through those that have something to do. It once came to the
    second alone, and the others had no gradients."""
    with bfc.predict("a100") as run:
        assert [int(one) for one in (torch.rand(4, device="cuda") > 0).nonzero()] == [0, 1, 2, 3]
        places = (torch.rand(2, 3, device="cuda") > 0).nonzero()
        assert [(int(a), int(b)) for a, b in places] == [(i, j) for i in (0, 1) for j in (0, 1, 2)]
        assert places[:, 1].tolist() == [0, 1, 2, 0, 1, 2]
        assert [one.item() for one in torch.arange(3, 9, 2, device="cuda")] == [3, 5, 7]
        places += 1
        assert places[:, 1].tolist() == [1] * 6  # not known any more
    assert "a mask, or nonzero: all elements" in guesses(run)


def test_sizes_are_known_on_the_gpu_too() -> None:
    """As models of images and text keep the sizes of their pictures there: each was 1 by 1."""

    def read(device: str) -> list[Any]:
        grid = torch.tensor([[1, 8, 12], [2, 4, 4]], device="cpu").to(device)
        areas = torch.repeat_interleave(grid[:, 1] * grid[:, 2], grid[:, 0])
        ends = functional.pad(areas.cumsum(dim=0, dtype=torch.int32), (1, 0))
        lengths = (ends[1:] - ends[:-1]).tolist()
        made = [tuple(one.shape) for one in torch.ones(128, device=device).split(lengths)]
        sizes = [(int(high), wide.item()) for _, high, wide in grid]
        return [lengths, made, sizes, ends.cpu().tolist(), (grid.sum(1) > 12).tolist()]

    real = read("cpu")
    with bfc.predict("a100") as run:
        assert read("cuda") == read("cpu") == real
        model = nn.Module()
        model.register_buffer("size", torch.tensor([3072, 9216]))
        assert model.to("cuda", torch.bfloat16).size.tolist() == [3072, 9216]
    assert guesses(run) == []


def test_an_array_has_what_is_known() -> None:
    with bfc.predict("a100") as run:
        sizes = torch.tensor([3, 4]).cuda() + 1
        assert sizes.cpu().numpy().tolist() == sizes.tolist() == [4, 5]
        assert torch.full((3,), 7, device="cuda").cpu().numpy().tolist() == [7, 7, 7]
    assert guesses(run) == []


def test_numbers_of_a_part_lie_where_they_lay_in_the_whole() -> None:
    """`_unsafe_view` does not say that it returns a part."""
    with bfc.predict("a100"):
        whole = torch.tensor([[1, 2], [3, 4]]).cuda()
        assert torch.ops.aten._unsafe_view(whole[1], [2, 1]).tolist() == [[3], [4]]
        assert whole.tolist() == [[1, 2], [3, 4]]


def test_numbers_that_were_written_over_are_not_known() -> None:
    with bfc.predict("a100") as run:
        sizes = torch.tensor([8, 12]).cuda()
        sizes[:1].random_(4)
        assert sizes.tolist() == [1, 1]
        assert torch.empty_like(torch.tensor([8, 12]).cuda()).tolist() == [1, 1]
        drawn = torch.randint_like(torch.tensor([8, 12]).cuda(), 100)
        assert drawn.tolist() == [1, 1]
        many = torch.arange(2000).cuda()
        assert (many + many).tolist()[:2] == [1, 1]
    assert ".tolist()" in guesses(run)


def test_one_number_is_read_of_what_a_mask_selects() -> None:
    """As a diffusion model's schedule is asked which step a time is. It once was told that all
    elements cannot be converted to one number."""
    with bfc.predict("a100") as run:
        for device in ("cpu", "cuda"):
            schedule, now = (torch.rand(size, device=device) for size in (1000, 1))
            assert [(schedule == one).nonzero().item() for one in now] == [0]
            assert int(torch.where(schedule == now)[0]) == 0
            assert int(torch.where(schedule == now)[0].to("cpu")) == 0
            assert float(schedule[schedule == now]) == schedule[:1].item() == 1
            assert schedule[torch.where(schedule == now)].item() == 1
            with pytest.raises(RuntimeError, match="1000 elements"):
                schedule.item()
            both = torch.tensor([1, 1], device=device).nonzero()
            with pytest.raises(RuntimeError, match="2 elements"):
                both.item()
            assert torch.tensor([0, 1], device=device).nonzero().item() is not None
    assert "a number that a mask selects: the first" in guesses(run)


def test_a_mask_has_as_many_places_as_were_set() -> None:
    """As torchvision's detectors choose a sample of all boxes."""
    with bfc.predict("a100") as run:
        places = torch.randperm(1000, device="cuda")
        one, other = (torch.zeros(1000, dtype=torch.uint8, device="cuda") for _ in range(2))
        one[places[:20]] = 1
        other[places[:30]] = 1
        one[places[:4]] = 1
        assert len(torch.where(one)[0]) == 24
        assert len(torch.where(one | other)[0]) == 54
        assert len(torch.where(torch.cat([one, other]))[0]) == 54
        assert len(places[one.bool()]) == 24
        assert len(torch.where(one[:10])[0]) == 10
        rows = torch.zeros(100, 8, dtype=torch.bool, device="cuda")
        rows[places[:3]] = True
        assert len(rows.nonzero()) == 24
        for written in (other, one):  # whatever else is written ends it
            written.random_()
            assert len(torch.where(written)[0]) == 1000
        one.zero_()
        one.index_fill_(0, places[:7], 1)  # which PyTorch 2.15 makes of `one[places[:7]] = 1`
        assert len(torch.where(one)[0]) == 7
        one.zero_()
        one[rows[:, 0].nonzero().expand(-1, 2)] = 1
        assert len(torch.where(one)[0]) == 48
    assert "a mask, or nonzero: all that were set" in guesses(run)


def test_the_greatest_number_of_a_row_is_known() -> None:
    """Programs make tensors of `batch.max() + 1` rows: one for each graph of a batch. It was once
    taken for 1, and what came later did not fit."""
    with bfc.predict("h100") as run:
        own = torch.arange(256, device="cuda").repeat_interleave(18)
        assert (int(own.max()) + 1, int(own.min())) == (256, 0)
        start = torch.arange(36, device="cuda").repeat(2)
        links = torch.stack([start, start // 18 * 18 + (start + 1) % 18])
        assert int(links.max()) == 35
        assert int(torch.cat([torch.full((7,), i, device="cuda") for i in range(5)]).max()) == 4
        assert (torch.arange(10, device="cuda") * 3 - 5).amax().item() == 22
        drawn = torch.randint(0, 50, (1000,), device="cuda")
        assert functional.one_hot(drawn).shape == (1000, 50)
        assert int(torch.randint(0, 50, (4,), device="cuda").max()) == 39  # as is to be expected
        rows = torch.zeros(256, 3, device="cuda")
        rows.scatter_add_(0, own[:, None].expand(-1, 3), torch.ones(4608, 3, device="cuda"))
        rows.index_add_(0, own, torch.ones(4608, 3, device="cuda"))
        assert int(own.max()) == 255  # which was read alone
        torch.bitwise_or(own, 64, out=own)
        assert int(own.max()) == 1
    assert guesses(run) == [".item()"]


def test_the_greatest_number_of_a_part_is_not_that_of_the_whole() -> None:
    """Of more numbers than are computed."""
    with bfc.predict("h100") as run:
        numbers = torch.arange(2000, device="cuda")
        assert int(numbers[:1500].max()) == 1
        assert int(numbers[:1].expand(2000).max()) == 1  # 2000 times one of them
        assert int(numbers[:5].max()) == 4
        numbers += torch.randint(3, (2000,), device="cuda").cumsum(0)
        assert int(numbers.max()) == 1
    assert len(guesses(run)) == 3


def test_the_greatest_number_of_a_scaled_sum_is_not_taken_for_that_of_a_sum() -> None:
    with bfc.predict("h100") as run:
        numbers = torch.arange(2000, device="cuda")
        assert int(torch.add(numbers, numbers, alpha=3).max()) == 1
        assert int(torch.add(numbers[:10], numbers[:10], alpha=3).max()) == 36
    assert guesses(run) == [".item()"]


def test_tensors_of_other_shapes_are_not_equal() -> None:
    with bfc.predict("h100") as run:
        assert not torch.equal(torch.rand(3, device="cuda"), torch.rand(4, device="cuda"))
        assert torch.equal(torch.rand(3, device="cuda"), torch.rand(3, device="cuda"))
    assert len(guesses(run)) == 1


def test_whether_a_number_is_finite_is_known_on_the_gpu() -> None:
    """The answer lay on the host, and the next operator raised."""
    with bfc.predict("a100") as run:
        loss = torch.randn(4, device="cuda").mean()
        for found in (torch.isfinite(loss), loss.isfinite()):
            assert found.is_cuda
            assert (~found).is_cuda
            assert (~found[None] | (loss[None] < 0)).is_cuda
            assert torch.zeros(1, device="cuda").add_(found.float()[None]).is_cuda
            assert bool(found)
            assert not ~found
    assert run.assumptions == []


def test_whether_all_numbers_are_finite_is_known() -> None:
    """Of more than one number the answer was no, and programs stopped."""
    with bfc.predict("a100") as run:
        losses = torch.randn(4, 8, device="cuda", requires_grad=True)
        assert torch.isfinite(losses).all()
        assert losses.isfinite().all(dim=1).all()
        assert not (~torch.isfinite(losses)).any()
        assert run.assumptions == []
        losses.mean(1).sum().backward()
        torch.nn.utils.clip_grad_norm_([losses], 1.0, error_if_nonfinite=True)
