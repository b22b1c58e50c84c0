"""What linear algebra allocates, in order and in bytes, as an H100 with CUDA 13.0 did under PyTorch
2.11. Results, workspaces and copies; frees are not listed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import bfc
from bfc_tools.predicting.rules import solvers


@pytest.mark.parametrize(
    ("measured", "numbers"),
    [
        (29000, lambda: solvers.eigenvalues(64, 1, 4)),
        (61152, lambda: solvers.eigenvalues(100, 1, 4)),
        (407896, lambda: solvers.eigenvalues(300, 1, 4)),
        (1075792, lambda: solvers.eigenvalues(500, 1, 4)),
        (9959308, lambda: solvers.eigenvalues(768, 1, 4)),
        (38661004, lambda: solvers.eigenvalues(1536, 1, 4)),
        (287820, lambda: solvers.eigenvalues(8, 1, 4)),
        (184400288, lambda: solvers.eigenvalues(31, 500, 4)),
        (103040, lambda: solvers.singular_values(96, 96)),
        (2141440, lambda: solvers.singular_values(500, 500)),
        (8675456, lambda: solvers.singular_values(1024, 1024)),
        (3146112, lambda: solvers.singular_values(1000, 64)),
        (3402112, lambda: solvers.singular_values(64, 1000)),
        (3145856, lambda: solvers.triangular(64)),
        (6193280, lambda: solvers.triangular(1000)),
        (141312, lambda: solvers.orthogonal(48, 48)),
        (946560, lambda: solvers.orthogonal(2000, 100)),
        (53632, lambda: solvers.singular_values(64, 64)),
        (3145984, lambda: solvers.singular_values(50, 30)),
        (3148416, lambda: solvers.singular_values(6, 100)),
        (2425856, lambda: solvers.orthogonal(1536, 1536)),
        (377984, lambda: solvers.reflected(64, 64, 8)),
        (3167744, lambda: solvers.reflected(2000, 100, 8)),
        (20726912, lambda: solvers.reflected(1536, 1536, 8)),
    ],
)
def test_workspaces_are_those_that_were_measured(measured: int, numbers: Any) -> None:
    assert 4 * numbers() == pytest.approx(measured, rel=0.02)


def allocated(function: Any, *shape: int) -> list[int]:
    with bfc.predict("h100") as run:
        matrix = torch.randn(*shape, device="cuda")
        held = function(matrix)
    del held
    return [int(size) for size, op in zip(run.trace.size, run.trace.op, strict=True) if op == 0][1:]


def solved(matrix: torch.Tensor) -> Any:
    return torch.linalg.solve(matrix, matrix[..., :3])


def least_squares(matrix: torch.Tensor) -> Any:
    return torch.linalg.lstsq(matrix, matrix[..., :8])


def factors(matrix: torch.Tensor) -> Any:
    """A right side, and a system of factors that were made before."""
    return torch.linalg.lu_solve(*torch.linalg.lu_factor(matrix), torch.ones_like(matrix)[..., :5])


def cholesky(matrix: torch.Tensor) -> Any:
    return torch.cholesky_solve(matrix[:, :5], matrix)


def gradient(function: Any) -> Any:
    """The gradient of a result."""

    def run(matrix: torch.Tensor) -> None:
        function(matrix.requires_grad_()).backward(torch.ones(matrix.shape[:-2], device="cuda"))

    return run


N = 512 * 512 * 4
M = 64 * 64 * 4
B, R = 16 * 20 * 20 * 4, 16 * 20 * 8


@pytest.mark.parametrize(
    ("function", "shape", "sizes"),
    [
        (torch.linalg.eigh, (512, 512), [N, 2048, 4, 1124416, 1, 1]),
        (lambda x: torch.linalg.eigvalsh(x), (512, 512), [2048, N, 4, 1124416, 1, 1]),
        (torch.linalg.qr, (512, 512), [N, N, 2048, 4, 4194432, 4, 852992]),
        (torch.linalg.qr, (2, 33, 33), [8712, 8712, 264, 16, 16, 4, 136576, 136576]),
        (torch.linalg.lu_factor, (512, 512), [N, 2048, 4, 8448, 1, 1]),
        (torch.linalg.cholesky, (512, 512), [N, 4, 1152, 1, 1]),
        (torch.linalg.matrix_exp, (64, 8, 8), [16384, 81920, 81920]),
        (solved, (512, 512), [6144, N, 2048, 4, 8448, 4096, 4096, 4096, 6144, 1, 1]),
        (solved, (8, 64, 64), [6144, 131072, 2048, 32, 64, 64, 64, 1]),
        (torch.linalg.inv, (512, 512), [N, 4, N, 2048, 8448, 4096, 4096, 4096, N, 1, 1]),
        (torch.linalg.inv, (3, 200, 200), [480000, 12, 480000, 2400, *[1600, 4800] * 2, 480000, 1]),
        (torch.linalg.lu, (16, 20, 20), [B, B, B, B, 1280, 64, 128, 160, R]),
        (torch.linalg.det, (64, 64), [4, M, 256, 4, 1280, 4, 256, 64, 8, 512]),
        (torch.linalg.slogdet, (64, 64), [4, 4, M, 256, 4, 1280, 256, 64, 8, 512, 256, 4, 256]),
        (
            gradient(torch.linalg.det),
            (16, 20, 20),
            [
                *(64, B, 1280, 64, 128, 64, 80, 320, 128, R),
                *(64, 64, B, 320, 4, 4, 1280, B, B, B),
                *(160, R, 160, R, B, 128, 128, 128, 128, B),  # the last in the order of the matrix
            ],
        ),
        (factors, (64, 64), [M, 256, 4, 1280, 1, 1, M, 1280, 4]),
        (cholesky, (64, 64), [4, 1280, M]),
        (lambda x: torch.linalg.solve_triangular(x, x, upper=True), (16, 20, 20), [B, 128, 128]),
        (least_squares, (2, 16, 16), [8, 1024, 2048, 2048, 16, 16, 1]),
        (
            least_squares,
            (1000, 64),
            [4, 32000, 256000, 256, 4, 3145856, 4, 1576064, 32, 1, 1],
        ),
    ],
)
def test_allocations_come_as_on_a_gpu(function: Any, shape: Any, sizes: list[int]) -> None:
    found = allocated(function, *shape)
    assert [one for one in found if one < 1 << 21] == [one for one in sizes if one < 1 << 21]
    assert found == sizes


def test_values_alone_have_no_vectors() -> None:
    """A fake tensor once got both, as a subclass does."""
    found = allocated(lambda x: torch.linalg.svdvals(x), 512, 512)
    assert found[:2] == [2048, 4]
    assert sum(found) == pytest.approx(2048 + 3 * N + 2238592, rel=0.01)
    with bfc.predict("h100"):
        matrix = torch.randn(8, 8, device="cuda", requires_grad=True)
        torch.linalg.svdvals(matrix).sum().backward()
        torch.linalg.eigvalsh(matrix @ matrix.T, UPLO="U").sum().backward()
        assert matrix.grad is not None
        assert torch.linalg.eigvalsh(torch.eye(3)).device.type == "cpu"
    assert torch.linalg.svdvals(torch.eye(3)).tolist() == [1, 1, 1]


def test_a_pseudo_inverse_is_made_of_singular_values() -> None:
    with bfc.predict("h100") as run:
        torch.linalg.pinv(torch.randn(512, 512, device="cuda"))
    assert run.peak_allocated > 5 * N
