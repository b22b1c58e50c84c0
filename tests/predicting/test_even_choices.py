"""How many elements a mask selects that compares numbers which were drawn, or chosen among so many:
as many as if each were as likely as the others, and not all of them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as functional
from torch import nn

import bfc
from bfc_tools.predicting.even_choices import Even

EVEN = "a mask, or nonzero: as many as if choices were even, and up to all elements"


@pytest.mark.parametrize(
    ("low", "high", "whole"), [(0, 8, True), (-2, 3, True), (5, 6, True), (0.0, 1.0, False)]
)
def test_shares_are_those_of_real_numbers(low: int, high: int, whole: bool) -> None:
    even = Even(low, high, whole)
    numbers = torch.arange(low, high).float() if whole else (torch.arange(1000) + 0.5) / 1000
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        for number in (-3, -2, 0, 0.25, 0.5, 1, 2.5, 3, 5, 8, float("inf"), -float("inf")):
            true = getattr(torch, name)(numbers, number).float().mean().item()
            assert even.share(name, number) == pytest.approx(true, abs=1e-6), (name, number)


def test_numbers_that_differ_are_as_many_as_of_real_ones() -> None:
    """What an H100 kept of 81920 tokens among 200000: 67213."""
    assert abs(Even(0, 200_000, whole=True, alone=True).different(81920) / 67213 - 1) < 1e-4
    assert Even(0, 1, whole=True, alone=True).different(10) == 1
    assert Even(0, 8, whole=True).different(10) == 10  # each may be another


def chosen(make: Any) -> int:
    with bfc.predict("h100") as run:
        count = int(make().nonzero().shape[0])
    assert [one["what"] for one in run.assumptions] == [EVEN]
    return count


def cuda(*shape: int) -> Any:
    return torch.rand(*shape, device="cuda")


def lengths(longest: int, count: int) -> Any:
    return torch.randint(1, longest + 1, (count, 1), device="cuda")


def padding(rows: int, length: int, begin: int) -> Any:
    mask = torch.zeros(rows, length, dtype=torch.bool, device="cuda")
    mask[:, begin:] = True
    return mask


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (lambda: cuda(1000, 8).topk(2)[1] == 3, 250),
        (lambda: cuda(1000, 8).topk(8, dim=0).indices < 500, 32),
        (lambda: cuda(1000, 8).argmax(-1) == 3, 125),
        (lambda: cuda(1000, 8).max(1)[1].ne(3), 875),
        (lambda: cuda(100, 8).sort(descending=True)[1] < 2, 200),
        (lambda: cuda(1000) < 0.15, 150),
        (lambda: ~(cuda(1000) < 0.15), 850),
        (lambda: (cuda(1000) < 0.5) & (cuda(1000) < 0.5), 250),
        (lambda: torch.full((1000,), 0.3, device="cuda").bernoulli(), 300),
        (lambda: torch.empty(1000, device="cuda").bernoulli_(0.3).bool(), 300),
        (lambda: torch.multinomial(cuda(50, 4), 100, replacement=True).eq(1), 1250),
        (lambda: torch.randint(10, 20, (100, 10), device="cuda").view(-1) >= 15, 500),
        (lambda: torch.arange(50, device="cuda").expand(8, 50) >= 40, 80),
        (lambda: torch.arange(100, device="cuda") % 4 == 0, 25),
        (lambda: lengths(50, 1000) > torch.arange(50, device="cuda"), 25500),
        (lambda: padding(8, 50, 40), 80),
        (lambda: torch.zeros(8, 50).cuda().masked_fill(padding(8, 50, 40), -1.0) == 0, 320),
        (lambda: torch.zeros(8, 50).cuda().masked_fill(padding(8, 50, 40), 1).logical_not(), 320),
        (lambda: functional.one_hot(cuda(100, 8).topk(2)[1], 8).permute(2, 1, 0)[3], 25),
    ],
)
def test_a_mask_selects_an_even_share(make: Any, count: int) -> None:
    assert chosen(make) == max(count, 1)


def test_what_is_written_over_is_not_even() -> None:
    with bfc.predict("h100") as run:
        mask = cuda(1000) < 0.15
        mask[:10] = True
        assert mask.nonzero().shape[0] == 1000
        noise = cuda(1000)
        noise.mul_(3)
        assert (noise < 0.15).nonzero().shape[0] == 1000
    assert EVEN not in [one["what"] for one in run.assumptions]


@pytest.mark.parametrize("even", [True, False])
def test_experts_get_even_shares_of_the_tokens(even: bool) -> None:
    """A layer of experts needs the memory of the tokens that they get, and not of all in each."""
    experts = 8
    with bfc.predict("h100"):
        gate = nn.Linear(64, experts).cuda()
        layers = nn.ModuleList(nn.Linear(64, 256) for _ in range(experts)).cuda()
        x = torch.randn(1024, 64, device="cuda")
        choice = gate(x).topk(1).indices
        if not even:
            choice = choice * 1  # whatever it is then
        found = [layer(x[torch.where(choice == n)[0]]) for n, layer in enumerate(layers)]
        assert sum(map(len, found)) == (1024 if even else 1024 * experts)


def test_a_sparse_gradient_has_rows_that_differ() -> None:
    with bfc.predict("h100") as run:
        bags = nn.EmbeddingBag(200_000, 8, mode="sum", sparse=True).cuda()
        bags(torch.randint(200_000, (4096, 20), device="cuda")).sum().backward()
        rows = bags.weight.grad.coalesce().values().shape[0]
    assert abs(rows / 67213 - 1) < 1e-4
    assert [one["what"] for one in run.assumptions] == ["a sparse tensor: indices that differ"]


def test_ranges_side_by_side_have_as_many_numbers_as_all() -> None:
    with bfc.predict("h100"):
        drawn = torch.randint(0, 1000, (77,), device="cuda")
        limits = [0, 3, 10, 333, 1000]
        found = [
            len(((drawn >= low) & (drawn < high)).nonzero())
            for low, high in itertools.pairwise(limits)
        ]
    assert found == [0, 1, 25, 51]


@pytest.mark.parametrize("drawn", [True, False])
def test_clusters_of_classes_have_all_targets(drawn: bool) -> None:
    """The layer insists on it, and once refused: "Target values should be in ..."."""
    with bfc.predict("h100"):
        layer = nn.AdaptiveLogSoftmaxWithLoss(64, 5000, cutoffs=[500, 2000], device="cuda")
        target = torch.randint(0, 5000, (512,), device="cuda")
        target = target if drawn else target * 1
        layer(torch.randn(512, 64, device="cuda"), target).loss.backward()


CHOSEN = "counts of choices: even, where one may have all 200"


@pytest.mark.parametrize(
    "count",
    [
        lambda chosen: chosen.flatten().bincount(minlength=8),
        lambda chosen: chosen.view(-1).histc(bins=8, min=0, max=8),
        lambda chosen: functional.one_hot(chosen, 8).sum((0, 1)),
        lambda chosen: torch.zeros(100, 8, device="cuda").scatter(1, chosen, 1).bool().sum(0),
    ],
    ids=["bincount", "histc", "one_hot", "scatter"],
)
def test_choices_that_are_counted_are_even(count: Any) -> None:
    with bfc.predict("h100") as run:
        counts = count(cuda(100, 8).topk(2).indices)
        assert counts.tolist() == [25] * 8
        assert counts.view(4, 2).sum(1).cpu().numpy().tolist() == [50] * 4
        assert counts.cumsum(0)[-1].item() == 200
    assert [(one["what"], one["value"]) for one in run.assumptions] == [(CHOSEN, 25)]


def test_what_was_put_in_is_not_counted_as_chosen() -> None:
    with bfc.predict("h100") as run:
        twos = torch.zeros(100, 8, dtype=torch.int64).cuda()
        twos.scatter_(1, cuda(100, 8).topk(2).indices, 2)
        padded = padding(8, 50, 40)
        filled = torch.zeros(100, 8, dtype=torch.int64).cuda().masked_fill(cuda(100, 8) < 0.5, 3)
        assert {*(twos.sum(0).tolist() + padded.sum(0).tolist() + filled.sum(0).tolist())} == {1}
    assert [(one["what"], one["times"]) for one in run.assumptions] == [(".tolist()", 3)]


@pytest.mark.filterwarnings("ignore::FutureWarning")  # a name that will be another
def test_processes_that_tell_each_other_how_many_have_the_same() -> None:
    """How many rows each of them sends, and gets."""
    with bfc.predict("h100"):
        dist.init_process_group("nccl", rank=1, world_size=4)
        try:
            counts = cuda(100, 8).topk(3).indices.flatten().bincount(minlength=8)
            theirs = torch.empty_like(counts)
            dist.all_to_all_single(theirs, counts)
            every = torch.empty(32, dtype=torch.int64, device="cuda")
            dist.all_gather_into_tensor(every, counts)
            gathered = collectives.all_gather_tensor(counts, 0, [0, 1, 2, 3])
            exchanged = collectives.all_to_all_single(counts, None, None, [0, 1, 2, 3])
            assert counts.tolist() == [38] * 4 + [37] * 4
            assert every.tolist() == gathered.tolist() == counts.tolist() * 4
            assert theirs.tolist() == exchanged.tolist() == [38, 38] * 4
        finally:
            dist.destroy_process_group()
