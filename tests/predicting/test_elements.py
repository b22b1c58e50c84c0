"""Single elements of tensors, written and read in loops: as the operators do it, at little cost."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import bfc

SHAPES = [(4,), (3, 2), (2, 3, 2)]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_million_elements_are_written_without_an_operator(device: str) -> None:
    """A text becomes a tensor of words so. It took 1 ms for each word, and did not end."""
    with bfc.predict("h100") as run:
        words, rows = torch.empty(100, device=device).long(), torch.zeros(4, 1, 3, device=device)
        before = run.operators
        for place in range(100):
            words[place] = place
            rows[place % 4, 0, -1] = 0.5
            rows[3, 0, place % 3] = rows.new_zeros(())
        assert run.operators - before == 100  # `new_zeros`
        assert torch.zeros(2, 2)[0].sum().item() == 0


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_was_written_is_no_longer_known(device: str) -> None:
    with bfc.predict("h100") as run:
        tensor = torch.zeros(4, device=device)
        tensor[1] = 3
        tensor.sum().item()
        one = torch.zeros(1, device=device)
        one[0] = 3
        assert one.item() == 3
        given = torch.tensor([1, 2, 3])
        given[0] = 7
        assert given.tolist() == [7, 2, 3]
    assert [one["what"] for one in run.assumptions] == [".item()"]


@pytest.mark.parametrize("index", [4, -5, (0, 0), 1.5])
def test_an_index_out_of_range_is_refused_as_by_pytorch(index: Any) -> None:
    with bfc.predict("h100"):
        tensor = torch.zeros(4, device="cuda")
        with pytest.raises((IndexError, TypeError)):
            tensor[index] = 1
        with pytest.raises((IndexError, TypeError)):
            tensor[index]


def test_a_write_to_what_has_a_gradient_is_refused_or_followed() -> None:
    with bfc.predict("h100"):
        leaf = torch.zeros(4, device="cuda", requires_grad=True)
        with pytest.raises(RuntimeError, match="in-place"):
            leaf[0] = 1
        made = leaf * 2
        made[0] = 1
        made.sum().backward()
        assert leaf.grad is not None


@pytest.mark.parametrize("shape", SHAPES)
def test_a_view_of_one_place_is_that_of_pytorch(shape: tuple[int, ...]) -> None:
    real = torch.empty(shape).transpose(0, -1)[1:]
    with bfc.predict("h100"):
        made = torch.empty(shape, device="cuda").transpose(0, -1)[1:]
        for dim in range(-real.dim(), real.dim()):
            for place in (-1, 0):
                view, expected = made.select(dim, place), real.select(dim, place)
                assert view.shape == expected.shape
                assert view.stride() == expected.stride()
                assert view.storage_offset() == expected.storage_offset()
                assert view._base is made._base
        part = made.detach().requires_grad_().select(0, 0)
        assert part.requires_grad
        with torch.inference_mode():  # whose tensors have no versions
            assert made[0].shape == made.new_zeros(made.shape)[0].zero_().shape


def test_who_goes_through_a_tensor_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The labels of 50,000 pictures were read one by one, and taken for a program that waits."""
    from bfc_tools.predicting import recorder

    monkeypatch.setattr(recorder, "MOST_ANSWERS", 20)
    with bfc.predict("h100"):
        for one in torch.rand(100, device="cuda"):
            one.item()
        labels = torch.rand(100, device="cuda")
        for place in range(100):
            labels[place].item()


def test_a_tensor_of_a_few_numbers_keeps_them() -> None:
    with bfc.predict("h100"):
        for given in (3, [1, 2], [[0.5, 1.0]], True):
            made = torch.tensor(given)
            assert made.tolist() == given
            assert made.cuda().shape == made.shape


def test_an_operator_is_not_looked_at_anew_where_its_tensors_begin_elsewhere() -> None:
    """50,000 sums of two elements each took as long as if they were different operators."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with bfc.predict("h100"):
        rows = torch.rand(20, 4, device="cuda")
        sums = rows[0] + rows[1]
        before = FakeTensorMode.cache_info().misses
        for place in range(1, 20):
            sums = rows[place] + rows[0]
        assert FakeTensorMode.cache_info().misses == before
        assert sums.storage_offset() == 0
        for place in range(1, 4):
            part = rows[place:]
            assert part.storage_offset() == part.view(-1).storage_offset() == 4 * place
            assert part.t().reshape(-1).storage_offset() == 0
            assert part[:, 1:].storage_offset() == 4 * place + 1


def test_numbers_of_the_host_are_computed_as_they_are_asked_for() -> None:
    """As pictures are prepared: with views, other types, and in place."""

    def prepared() -> tuple[object, ...]:
        picture = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.uint8)
        turned = picture.t().contiguous().to(torch.float32).div(255)
        kept, part = turned.clone(), turned[1]
        changed = turned.sub_(torch.tensor([0.5, 0.25])).div_(2)
        part.add_(1)
        return changed is turned, kept.tolist(), turned.tolist(), turned.shape, part.sum().item()

    real = prepared()
    with bfc.predict("h100") as run:
        assert prepared() == real
    assert not run.assumptions


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_views_lie_where_those_of_pytorch_do(device: str) -> None:
    """Also those that are found by what was asked before, of a tensor that begins elsewhere."""
    parts = [
        (slice(a, b, c)) for a in (None, 0, 2, -2, 9) for b in (None, 1, -1, 9) for c in (1, 3)
    ]
    cases = [
        *((lambda x, one=one: x[:, one]) for one in parts),
        *(lambda x: x.view(2, -1), lambda x: x.permute(1, 0), lambda x: x.unbind(1)[2]),
        *(lambda x: x.split([1, 4], 1)[1], lambda x: x.unsqueeze(0)[0], lambda x: x.t().diagonal()),
        *(lambda x: x.view(torch.int16), lambda x: x.unfold(1, 2, 2), lambda x: x.expand(3, 2, 5)),
    ]

    def places(of: str) -> list[tuple[object, ...]]:
        whole = torch.zeros(4, 2, 5, device=of)
        made = [case(whole[at]) for case in cases for at in (0, 1, 3)]
        return [(one.shape, one.stride(), one.storage_offset()) for one in made]

    as_they_are = places("cpu")
    with bfc.predict("h100"):
        assert places(device) == as_they_are
