"""Tensors of compressed rows or columns, as PyTorch makes them on the processor."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import bfc
from bfc_tools.predicting.rules.compressed import FLIPPED

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")

BLOCKS = (2, 2)


def converted(tensor: Any, kind: str) -> Any:
    convert = getattr(tensor, f"to_sparse_{kind}")
    return convert(BLOCKS) if kind.startswith("b") else convert()


def facts(tensor: Any) -> object:
    """What is known without its numbers."""
    ends = "crow" if tensor.layout in (torch.sparse_csr, torch.sparse_bsr) else "ccol"
    places = "col" if ends == "crow" else "row"
    parts = (
        *(getattr(tensor, f"{ends}_indices")(), getattr(tensor, f"{places}_indices")()),
        tensor.values(),
    )
    return tensor.layout, tensor.shape, tensor._nnz(), [(it.shape, it.dtype) for it in parts]


def conversions(device: str) -> dict[str, object]:
    """Of matrices without a zero: each kind from a dense one, from indices and from each other."""
    found: dict[str, object] = {}
    for kind in FLIPPED:
        made = converted(torch.ones(8, 4, device=device), kind)
        found[kind] = facts(made)
        found[f"{kind} of indices"] = facts(
            converted(torch.ones(8, 4, device=device).to_sparse(), kind)
        )
        found[f"{kind} to indices"] = made.to_sparse()._indices().shape
        found[f"{kind} to dense"] = made.to_dense().shape
        found[f"{kind} turned round"] = facts(made.t())
        found[f"{kind} copied"] = facts(made.clone())
        found[f"{kind} in 16 bits"] = facts(made.half())
        layout = {"layout": made.layout, "blocksize": BLOCKS if kind.startswith("b") else None}
        found[f"{kind} by its layout"] = facts(torch.ones(8, 4, device=device).to_sparse(**layout))
        for other in FLIPPED:
            if kind.startswith("c") or other.startswith("b"):
                found[f"{kind} to {other}"] = facts(converted(made, other))
    return found


def test_every_conversion_makes_the_parts_that_pytorch_makes() -> None:
    """They were refused: PyTorch asks a real device where it makes one of shapes."""
    with bfc.predict("h100"):
        predicted = conversions("cuda")
    assert predicted == conversions("cpu")


def test_a_dense_matrix_becomes_one_of_compressed_rows() -> None:
    """The places by selections from numbers that are counted for it, and the values by theirs."""
    with bfc.predict("h100") as run:
        dense = torch.randn(100, 50, device="cuda")
        before = torch.cuda.memory_allocated()
        matrix = dense.to_sparse_csr()
        held = torch.cuda.memory_allocated() - before
        moved = matrix.cpu().cuda()
        assert torch.cuda.memory_allocated() - before == 2 * held
        del matrix, moved
        assert torch.cuda.memory_allocated() == before
    assert held == 1024 + 40_448 + 20_480  # 101 ends, 5000 places and values
    births = run.trace.size[run.trace.op == 0].tolist()
    asked = [size for size in births if size in (5000, 400, 800, 808)]
    assert asked == [5000, 400, 800, 808, 808]  # a mask; columns and rows; ends, and their copy


def test_products_with_dense_ones_and_their_gradients() -> None:
    """As graph networks do it, with the adjacency in compressed rows."""
    with bfc.predict("h100"):
        ends = torch.arange(0, 3001, 3)
        places = torch.zeros(3000, dtype=torch.int64)
        matrix = torch.sparse_csr_tensor(ends, places, torch.ones(3000), (1000, 1000)).cuda()
        dense = torch.randn(1000, 64, device="cuda", requires_grad=True)
        for product in (torch.mm, torch.sparse.mm):
            found = product(matrix, dense)
            before = torch.cuda.memory_allocated()
            found.sum().backward()
            assert found.shape == dense.grad.shape == (1000, 64)
            del found
        assert before > 0
        added = torch.addmm(torch.zeros(1000, 64, device="cuda"), matrix, dense)
        assert added.shape == (1000, 64)
        assert (dense.detach().t() @ matrix).shape == (64, 1000)
        assert (matrix @ dense[:, 0]).shape == (1000,)
        with pytest.raises(NotImplementedError, match="Give the program dense ones"):
            matrix @ matrix


@pytest.mark.parametrize("kind", [*FLIPPED, "coo"])
def test_a_gradient_passes_through_each_kind(kind: str) -> None:
    """Backward through `sparse_mask`, which gives what is where the mask has something."""
    with bfc.predict("h100"):
        dense = torch.ones(64, 8, device="cuda", requires_grad=True)
        (dense.to_sparse() if kind == "coo" else converted(dense, kind)).to_dense().sum().backward()
        assert dense.grad.shape == (64, 8)
        mask = torch.ones(64, 8, device="cuda")
        mask = mask.to_sparse() if kind == "coo" else converted(mask, kind)
        if kind == "coo":
            dense.sparse_mask(mask).to_dense().sum().backward()
        else:
            assert facts(dense.detach().sparse_mask(mask)) == facts(mask)


def test_rows_of_an_embedding_through_a_mask() -> None:
    with bfc.predict("h100"):
        dense = torch.randn(10_000, 256, device="cuda", requires_grad=True)
        rows = torch.zeros(1, 100, dtype=torch.int64, device="cuda")
        mask = torch.sparse_coo_tensor(rows, torch.ones(100, 256, device="cuda"), dense.shape)
        picked = dense.sparse_mask(mask.coalesce())
        torch.sparse.sum(picked).backward()
        assert dense.grad.shape == dense.shape


def test_what_is_not_known_is_refused_in_words() -> None:
    """A real device was once asked."""
    with bfc.predict("h100"):
        with pytest.raises(NotImplementedError, match="two dimensions"):
            torch.randn(2, 4, 4, device="cuda").to_sparse_csr()
        blocks = torch.ones(4, 4, device="cuda").to_sparse_bsr(BLOCKS)
        with pytest.raises(NotImplementedError, match="dense ones"):
            blocks @ torch.ones(4, 4, device="cuda")
        with pytest.raises(NotImplementedError, match="dense ones"):
            blocks.relu()
