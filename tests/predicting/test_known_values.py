"""What a program reads of tensors that are filled with one number is that number, and no guess."""

from __future__ import annotations

from typing import Any

import pytest
import torch

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
