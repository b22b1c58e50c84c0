"""What linear algebra works in: cuSOLVER's workspaces, and the copies that PyTorch makes for it.

Copies and their order are from PyTorch's ATen/native/BatchLinearAlgebra.cpp, its
cuda/BatchLinearAlgebra.cpp and cuda/linalg/BatchLinearAlgebraLib.cpp. How large a workspace is only
cuSOLVER knows. The formulas are fitted to what an H100 with CUDA 13.0 took for square matrices of 3
to 1536 rows, for batches, and for a few that are not square: within 2 % of all of them that are
larger than 64 KiB. Small ones are counted for their place among the allocations.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from bfc.libraries import torch
from bfc_tools.predicting.rules import cub
from bfc_tools.predicting.rules.interface import (
    Call,
    Doubt,
    Release,
    Result,
    Workspace,
    on_cuda,
)
from bfc_tools.predicting.rules.operators import (
    around,
    before,
    between,
    file,
    kernel,
    mark,
    order,
    rule,
)
from bfc_tools.predicting.rules.tensors import argument, div_up, nbytes, numel, operator

BATCH_LINEAR_ALGEBRA = file("ATen/native/BatchLinearAlgebra.cpp", read="2.6.0")
BATCH_LINEAR_ALGEBRA_CPP = file("ATen/native/cuda/linalg/BatchLinearAlgebra.cpp", read="2.6.0")
BATCH_LINEAR_ALGEBRA_LIB = file("ATen/native/cuda/linalg/BatchLinearAlgebraLib.cpp", read="2.6.0")
LINEAR_ALGEBRA_LU_DET_P = file("ATen/native/LinearAlgebra.cpp", "lu_det_P", read="2.6.0")
SEEN = "an H100 with CUDA 13.0: 3 to 1536 rows, within 2 % above 64 KiB"

#: How far the formulas are off at most, which was for few numbers of 64 bits.
FEW_OF_64_BITS = 0.25
WHY_NOT_KNOWN = "cuSOLVER's workspaces are those of an H100, within a quarter"
#: What solvers without a rule take, in matrices: from public reports, and what they compute.
MATRICES = 2

INFO, INDEX, PIVOT = 4, 8, 4
#: Rows and columns that a block works on.
BLOCK = 32
#: What the factorisations into an orthogonal and a triangular matrix take for few columns.
QR_AT_LEAST, QR_MORE = 786432, 524288
#: Up to so many columns, batches are factorised together.
QR_TOGETHER = 256
#: From so many rows divide and conquer finds eigenvalues.
DIVIDES = 512
#: Up to so many rows a matrix is inverted in a kernel that needs no copies, and up to so many it is
#: solved for fewer right sides.
AT_ONCE, AT_ONCE_FEW = 16, 64

Steps = Iterator[Workspace | Release]

order({"aten::_linalg_eigh": (1, 0), "aten::_linalg_svd": (0, 2, 1)}, seen=SEEN)
mark("composed", "aten::linalg_pinv", source=file("ATen/native/LinearAlgebra.cpp", read="2.6.0"))


def _sizes(matrix: Any) -> tuple[int, int, int, int]:
    """Matrices, rows, columns, and the bytes of a number."""
    rows, columns = (int(size) for size in matrix.shape[-2:])
    count = math.prod(int(size) for size in matrix.shape[:-2])
    return count, rows, columns, int(matrix.element_size())


def eigenvalues(rows: int, count: int, size: int) -> int:
    """The numbers of `size` bytes of the workspace for all eigenvalues and vectors of symmetric
    matrices: of one at a time, or of up to 32 rows for `count` together.

    >>> eigenvalues(512, 1, 4) * 4, eigenvalues(100, 1, 4) * 4
    (1124416, 61152)
    """
    if rows < BLOCK or (rows == BLOCK and count > 1):
        return count * (3 * rows * rows + 768 * rows + 65520)
    if rows > DIVIDES or size > 4:
        return 4 * rows * rows + 127 * rows + 33000
    blocks = div_up(rows, BLOCK)
    return rows * rows + rows + blocks + 4 * blocks * blocks + 1024 * (blocks + 1)


def singular_values(rows: int, columns: int) -> int:
    """The numbers of the workspace for singular values and vectors, by Jacobi's method if the
    matrix is square.

    >>> singular_values(512, 512) * 4
    2238592
    """
    least = min(rows, columns)
    if rows != columns:
        turned = _padded(rows * columns) if rows < columns else 0
        return max(QR_AT_LEAST, 1024 * least + QR_MORE) + BLOCK + _padded(least) + turned
    if rows <= BLOCK:
        return 992
    blocks = div_up(rows, BLOCK)
    pairs = 4 * blocks * blocks // BLOCK * BLOCK
    return 2 * rows * rows + pairs + 2080 * blocks + 1056


def _padded(numbers: int) -> int:
    return div_up(numbers, BLOCK) * BLOCK


def triangular(columns: int) -> int:
    """The numbers of the workspace for the factorisation into an orthogonal and a triangular one.

    >>> triangular(300) * 4
    3326080
    """
    return max(QR_AT_LEAST, 1024 * columns + QR_MORE) + BLOCK


def orthogonal(rows: int, columns: int) -> int:
    """The numbers of the workspace that makes the orthogonal matrix from its reflections.

    >>> orthogonal(512, 512) * 4, orthogonal(4096, 512) * 4, orthogonal(1000, 64) * 4
    (852992, 2688000, 388096)
    """
    if columns >= 128:
        return 128 * (rows + 2 * columns) + 16640
    inside = rows * columns + 64 * max(columns - 64, 0)
    return 33024 + div_up(inside, BLOCK) * BLOCK


def reflected(rows: int, columns: int, sides: int) -> int:
    """The numbers of the workspace that applies reflections to `sides` vectors.

    >>> reflected(512, 512, 2) * 4, reflected(4096, 512, 8) * 4
    (2888832, 13911168)
    """
    return columns * columns + rows * columns + 256 * rows + 65824 + 512 * sides


def _lower(rows: int) -> int:
    """The bytes of the workspace of Cholesky's factorisation."""
    return max(4 * div_up(rows, BLOCK) ** 2 + 128, 160)


def _pivoted(rows: int) -> int:
    """The bytes of the workspace of the factorisation with pivots."""
    rows = div_up(rows, BLOCK) * BLOCK
    return 16 * rows + 256 if rows <= 256 else 8 * rows + 4352


def _checked(count: int) -> Steps:
    """Whether any matrix was singular."""
    for _ in range(2 if count == 1 else 1):
        yield Workspace(1, what="whether there was an error")


def _one_by_one(count: int, size: int) -> Steps:
    """The workspace of each matrix of a batch in turn: the allocator sees it once and again."""
    for _ in range(count):
        yield from _of_cusolver(size)


def _of_cusolver(size: int) -> Steps:
    """A workspace that a formula tells."""
    least, most = int(size * (1 - FEW_OF_64_BITS)), math.ceil(size * (1 + FEW_OF_64_BITS))
    yield from cub.for_a_moment(size, "cuSOLVER's workspace", Doubt(least, most, WHY_NOT_KNOWN))


@around(
    source=file("ATen/native/BatchLinearAlgebra.cpp", "_may_require_fw_or_bw_grad", read="2.6.0")
)
@contextmanager
def values_alone(recorder: Any) -> Iterator[None]:
    """`eigvalsh` and `svdvals` make vectors for a tensor subclass, as if it would ask for a
    gradient (_may_require_fw_or_bw_grad)."""

    def only(build: Any, operator: Any, place: int, *given: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            plain = len(args) == 1 and not kwargs and on_cuda(args[0])
            if not plain or (torch.is_grad_enabled() and args[0].requires_grad):
                return build(*args, **kwargs)
            return operator(args[0], *given)[place]

        return run

    linalg, aten = torch.linalg, torch.ops.aten
    with (
        patch.object(linalg, "eigvalsh", only(linalg.eigvalsh, aten._linalg_eigh, 0, "L", False)),
        patch.object(linalg, "svdvals", only(linalg.svdvals, aten._linalg_svd, 1, False, False)),
    ):
        yield


@rule(
    "aten::_linalg_eigh",
    source=(BATCH_LINEAR_ALGEBRA, BATCH_LINEAR_ALGEBRA_CPP, BATCH_LINEAR_ALGEBRA_LIB),
    seen=SEEN,
)
def eigh(call: Call) -> Steps:
    """Small matrices of a batch together, others one by one."""
    matrix = call.args[0]
    count, rows, _, size = _sizes(matrix)
    if not argument(call, "compute_v", True):
        yield Workspace(nbytes(matrix), what="vectors")
    yield Workspace(count * INFO, what="information")
    together = rows <= BLOCK and count > 1
    times, each = (1, count) if together else (count, 1)
    yield from _one_by_one(times, eigenvalues(rows, each, size) * size)
    yield from _checked(count)


@rule(
    "aten::_linalg_svd",
    source=(BATCH_LINEAR_ALGEBRA, BATCH_LINEAR_ALGEBRA_CPP, BATCH_LINEAR_ALGEBRA_LIB),
    seen=SEEN,
)
def svd(call: Call) -> Steps:
    """A copy, and the vectors also where only the values are asked for."""
    matrix = call.args[0]
    count, rows, columns, size = _sizes(matrix)
    yield Workspace(count * INFO, what="information")
    held = [Workspace(nbytes(matrix), what="matrices")]
    if not argument(call, "compute_uv", True):
        least = min(rows, columns)
        held += [Workspace(one * least * size, what="vectors") for one in (rows, columns)]
    yield from held
    yield from _of_cusolver(singular_values(rows, columns) * size)
    yield from (Release(one) for one in reversed(held))
    yield from _checked(count)


def _together(count: int, columns: int) -> bool:
    """Whether a batch is factorised by one kernel of cuBLAS."""
    return columns <= QR_TOGETHER and count >= max(2, columns // 16)


def _factorised(count: int, rows: int, columns: int, size: int) -> Steps:
    if _together(count, columns):
        pointers = [Workspace(count * INDEX, what="addresses") for _ in range(2)]
        yield from pointers
        yield from (Release(one) for one in reversed(pointers))
        return
    information = Workspace(INFO, what="information")
    yield information
    yield from _one_by_one(count, triangular(columns) * size)
    yield Release(information)


def _made(count: int, rows: int, columns: int, size: int) -> Steps:
    information = Workspace(INFO, what="information")
    yield information
    yield from _one_by_one(count, orthogonal(rows, columns) * size)
    yield Release(information)


@rule(
    "aten::linalg_qr",
    source=(BATCH_LINEAR_ALGEBRA, BATCH_LINEAR_ALGEBRA_CPP, BATCH_LINEAR_ALGEBRA_LIB),
    seen=SEEN,
)
def qr(call: Call) -> Steps:
    """Factorised, and the orthogonal matrix made from what that left."""
    count, rows, columns, size = _sizes(call.args[0])
    least = min(rows, columns)
    yield Workspace(count * least * size, what="reflections")
    yield from _factorised(count, rows, columns, size)
    mode = argument(call, "mode", "reduced")
    if mode != "r":
        yield from _made(count, rows, rows if mode == "complete" else least, size)


@rule(
    "aten::geqrf",
    source=(BATCH_LINEAR_ALGEBRA, BATCH_LINEAR_ALGEBRA_CPP, BATCH_LINEAR_ALGEBRA_LIB),
    seen=SEEN,
)
def geqrf(call: Call) -> Steps:
    """Factorised."""
    yield from _factorised(*_sizes(call.args[0]))


@rule(
    "aten::linalg_householder_product",
    source=(BATCH_LINEAR_ALGEBRA, BATCH_LINEAR_ALGEBRA_CPP, BATCH_LINEAR_ALGEBRA_LIB),
    seen=SEEN,
)
def householder_product(call: Call) -> Steps:
    """The orthogonal matrix."""
    yield from _made(*_sizes(call.args[0]))


@kernel(
    "aten::linalg_lstsq",
    source=file("ATen/native/BatchLinearAlgebra.cpp", "linalg_lstsq", read="2.6.0"),
)
def least_squares(call: Call) -> Any:
    """The solution, in the memory of the right side, and the residuals where there are more
    equations than unknowns."""
    matrix, right = call.args[0], call.args[1]
    rows, columns = matrix.shape[-2:]
    vector = len(right.shape) == 1 or tuple(right.shape) == tuple(matrix.shape[:-1])
    count = 1 if vector else right.shape[-1]
    batch = torch.broadcast_shapes(matrix.shape[:-2], right.shape[: -1 if vector else -2])
    solution = right.new_empty((*batch, count, max(rows, columns))).mT[..., :columns, :]
    left = (*batch, count) if rows > columns else (0,)
    ranks = torch.empty(0, dtype=torch.int64, device=matrix.device)
    found = solution.squeeze(-1) if vector else solution
    return found, right.new_empty(left), ranks, right.new_empty(0)


@before("aten::linalg_lstsq", source=BATCH_LINEAR_ALGEBRA)
def ranks(call: Call) -> Steps:
    """Whether each could be solved."""
    yield Workspace(_sizes(call.args[0])[0] * INFO, what="information")


@between(
    "aten::linalg_lstsq",
    source=(BATCH_LINEAR_ALGEBRA, BATCH_LINEAR_ALGEBRA_CPP, BATCH_LINEAR_ALGEBRA_LIB),
    seen=SEEN,
)
def lstsq(call: Call) -> Iterator[Workspace | Release | Result]:
    """The matrix is factorised in a copy, and the reflections are applied to the right side."""
    matrix, right = call.args[0], call.args[1]
    count, rows, columns, size = _sizes(matrix)
    sides = 1 if len(right.shape) < len(matrix.shape) else int(right.shape[-1])
    yield Result(0)
    copy = Workspace(nbytes(matrix), what="matrices")
    yield copy
    if _together(count, columns):
        held = [Workspace(nbytes(matrix), what="matrices")]
        held += [Workspace(count * INDEX, what="addresses") for _ in range(2)]
        yield from held
    else:
        held = [Workspace(count * min(rows, columns) * size, what="reflections")]
        yield from held
        yield from _factorised(count, rows, columns, size)
        information = Workspace(INFO, what="information")
        yield information
        yield from _one_by_one(count, reflected(rows, columns, sides) * size)
        yield Release(information)
        yield from _triangular(count, columns)
    yield from (Release(one) for one in reversed(held))
    yield Result(1)
    yield Release(copy)
    yield from _checked(count)


@rule(
    "aten::linalg_cholesky_ex",
    source=(BATCH_LINEAR_ALGEBRA, BATCH_LINEAR_ALGEBRA_CPP, BATCH_LINEAR_ALGEBRA_LIB),
    seen=SEEN,
)
def cholesky(call: Call) -> Steps:
    """In place of the result."""
    count, rows, _, _ = _sizes(call.args[0])
    size = _lower(rows) if count == 1 else count * INDEX
    yield from _of_cusolver(size)


@rule("aten::_linalg_check_errors", source=BATCH_LINEAR_ALGEBRA)
def check(call: Call) -> Steps:
    """Whether any matrix was singular."""
    yield from _checked(numel(call.args[0]))


@rule(
    "aten::cholesky_inverse",
    source=(BATCH_LINEAR_ALGEBRA, BATCH_LINEAR_ALGEBRA_CPP, BATCH_LINEAR_ALGEBRA_LIB),
    seen=SEEN,
)
def cholesky_inverse(call: Call) -> Steps:
    """In a copy."""
    yield Workspace(nbytes(call.args[0]), what="matrices")
    yield Workspace(INFO, what="information")


@rule(
    "aten::cholesky_solve",
    "aten::_cholesky_solve_helper",
    source=(BATCH_LINEAR_ALGEBRA, BATCH_LINEAR_ALGEBRA_CPP),
)
def cholesky_solve(call: Call) -> Steps:
    """With a copy of the triangular matrix."""
    yield Workspace(nbytes(call.args[1]), what="matrices")


@before(
    "aten::cholesky_solve",
    "aten::_cholesky_solve_helper",
    source=(BATCH_LINEAR_ALGEBRA, BATCH_LINEAR_ALGEBRA_CPP),
)
def whether_solved(call: Call) -> Steps:
    """Whether each could be."""
    yield Workspace(INFO, what="information")


def _pointers(count: int) -> Steps:
    """The addresses of matrices and of right sides, where cuBLAS is given a batch."""
    held = [Workspace(count * INDEX, what="addresses") for _ in range(2)]
    yield from held
    yield from (Release(one) for one in reversed(held))


def _with_pivots(count: int, rows: int, columns: int) -> Steps:
    """Of one matrix by cuSOLVER, of a batch by cuBLAS, or by MAGMA, which needs nothing."""
    if rows != columns or (count > 1 and rows > AT_ONCE and (rows > 128 or count > 16)):
        return
    size = _pivoted(rows) if count == 1 else count * INDEX
    yield from cub.for_a_moment(size, "workspace")


def _order(count: int, rows: int) -> Generator[Workspace | Release, None, Workspace]:
    """The order of the rows that the pivots stand for, of each matrix."""
    range_ = Workspace(rows * INDEX, what="numbers of rows")
    yield range_
    if count == 1:
        return range_
    order = Workspace(count * rows * INDEX, what="order of rows")
    yield order
    yield Release(range_)
    return order


def _triangular(count: int, rows: int) -> Steps:
    """A triangular system; large ones are solved one after the other."""
    if count > 8 or rows < AT_ONCE_FEW:
        yield from _pointers(count)


def _solved(count: int, rows: int, sides: int, right: int, adjoint: bool = False) -> Steps:
    """Two triangular systems and an order of rows, or one call (lu_solve_kernel)."""
    if rows == sides:
        at_once, together = rows <= AT_ONCE, False
    else:
        few = count <= 2 and (sides <= AT_ONCE_FEW or adjoint or rows <= BLOCK)
        together = 8 < rows <= 128 and (few if rows <= AT_ONCE_FEW else count <= 2 >= sides)
        at_once = rows <= 8 or (rows <= 128 and sides <= (8 if rows <= AT_ONCE_FEW else 2))
    if together:
        yield from cub.for_a_moment(INFO, "information")
    elif at_once:
        yield from _pointers(count)
    elif adjoint:
        order = yield from _order(count, rows)
        yield from _triangular(count, rows)
        yield from _triangular(count, rows)
        yield from cub.for_a_moment(right, "right sides")
        yield Release(order)
    else:
        order = yield from _order(count, rows)
        held = [Workspace(rows * INDEX, what="numbers of rows")]
        held.append(Workspace(count * rows * INDEX, what="order the other way round"))
        held.append(Workspace(right, what="right sides"))
        yield from held
        yield from _triangular(count, rows)
        yield from _triangular(count, rows)
        yield from (Release(one) for one in reversed([order, *held]))


@rule(
    "aten::linalg_solve_triangular",
    source=(BATCH_LINEAR_ALGEBRA, BATCH_LINEAR_ALGEBRA_CPP, BATCH_LINEAR_ALGEBRA_LIB),
    seen=SEEN,
)
def solve_triangular(call: Call) -> Steps:
    """In place of the result."""
    count, rows, _, _ = _sizes(call.args[0])
    yield from _triangular(count, rows)


@rule(
    "aten::linalg_lu_factor_ex",
    source=(BATCH_LINEAR_ALGEBRA, BATCH_LINEAR_ALGEBRA_CPP, BATCH_LINEAR_ALGEBRA_LIB),
    seen=SEEN,
)
def lu(call: Call) -> Steps:
    """Factorised in the result."""
    yield from _with_pivots(*_sizes(call.args[0])[:3])


@rule(
    "aten::linalg_lu_solve",
    source=(BATCH_LINEAR_ALGEBRA, BATCH_LINEAR_ALGEBRA_CPP, BATCH_LINEAR_ALGEBRA_LIB),
    seen=SEEN,
)
def lu_solve(call: Call) -> Steps:
    """In place of the result."""
    count, rows, _, size = _sizes(call.args[0])
    right = nbytes(call.result)
    adjoint = bool(argument(call, "adjoint")) == bool(argument(call, "left", True))
    yield from _solved(count, rows, right // (count * rows * size), right, adjoint)


def _sign(count: int, rows: int) -> Generator[Workspace | Release, None, Workspace]:
    """Whether the pivots are an even order: those that differ from their place are counted."""
    numbers = Workspace(rows * PIVOT, what="numbers of rows")
    mask = Workspace(count * rows, what="rows that were exchanged")
    sign = Workspace(count * INDEX, what="sign of the order")
    yield from (numbers, mask, sign)
    yield from cub.for_a_moment(count * rows * INDEX, "mask as numbers")
    yield Release(mask)
    yield Release(numbers)
    return sign


@rule("aten::_linalg_det", source=LINEAR_ALGEBRA_LU_DET_P, seen=SEEN)
def determinant(call: Call) -> Steps:
    """Factorised; the product of the diagonal times a sign (lu_det_P)."""
    count, rows, columns, size = _sizes(call.args[0])
    yield Workspace(count * INFO, what="information")
    yield from _with_pivots(count, rows, columns)
    product = Workspace(count * size, what="product of the diagonal")
    yield product
    sign = yield from _sign(count, rows)
    yield Release(sign)
    yield Release(product)


@rule("aten::_linalg_slogdet", source=LINEAR_ALGEBRA_LU_DET_P, seen=SEEN)
def logarithm_of_determinant(call: Call) -> Steps:
    """Factorised; the product of the signs of the diagonal, and the sum of its logarithms."""
    count, rows, columns, size = _sizes(call.args[0])
    yield Workspace(count * INFO, what="information")
    yield from _with_pivots(count, rows, columns)
    order = yield from _sign(count, rows)
    signs = Workspace(count * rows * size, what="signs of the diagonal")
    product = Workspace(count * size, what="product of signs")
    yield signs
    yield product
    yield Release(product)
    yield Release(signs)
    yield Release(order)
    yield from cub.for_a_moment(count * rows * size, "logarithms of the diagonal")


@rule(
    "aten::linalg_lu",
    source=(BATCH_LINEAR_ALGEBRA, BATCH_LINEAR_ALGEBRA_CPP, BATCH_LINEAR_ALGEBRA_LIB),
    seen=SEEN,
)
def lu_in_parts(call: Call) -> Steps:
    """Factorised in a copy, and unpacked."""
    matrix = call.args[0]
    count, rows, columns, _ = _sizes(matrix)
    copy = Workspace(nbytes(matrix), what="matrices")
    pivots = Workspace(count * min(rows, columns) * PIVOT, what="pivots")
    information = Workspace(count * INFO, what="information")
    yield from (copy, pivots, information)
    yield from _with_pivots(count, rows, columns)
    yield Release(copy)
    order = yield from _order(count, rows)
    yield Release(order)
    yield Release(information)
    yield Release(pivots)


@rule(
    "aten::_linalg_solve_ex",
    source=(BATCH_LINEAR_ALGEBRA, BATCH_LINEAR_ALGEBRA_CPP, BATCH_LINEAR_ALGEBRA_LIB),
    seen=SEEN,
)
def solve(call: Call) -> Steps:
    """Factorised in a result, and solved."""
    count, rows, columns, size = _sizes(call.args[0])
    right = nbytes(call.result[0])
    yield from _with_pivots(count, rows, columns)
    yield from _solved(count, rows, right // (count * rows * size), right)


@rule(
    "aten::linalg_inv_ex",
    source=(BATCH_LINEAR_ALGEBRA, BATCH_LINEAR_ALGEBRA_CPP, BATCH_LINEAR_ALGEBRA_LIB),
    seen=SEEN,
)
def inverse(call: Call) -> Steps:
    """Factorised in a copy, and solved for the columns of the identity."""
    matrix = call.args[0]
    count, rows, columns, _ = _sizes(matrix)
    yield Workspace(nbytes(matrix), what="matrices")
    yield Workspace(count * rows * PIVOT, what="pivots")
    yield from _with_pivots(count, rows, columns)
    yield from _solved(count, rows, rows, nbytes(matrix))


#: The powers that the polynomial of the exponential has at once.
POWERS = 5


@rule("aten::linalg_matrix_exp", source=file("ATen/native/LinearAlgebra.cpp", read="2.6.0"))
def exponential(call: Call) -> Steps:
    """The powers of a polynomial, whose degree the norms of the matrices decide: the highest."""
    matrix = call.args[0]
    alone = _sizes(matrix)[0] == 1
    for times in (*((1, 1) if alone else ()), POWERS, POWERS):
        yield Workspace(times * nbytes(matrix), what="powers")


@rule(
    "aten::linalg_ldl_factor_ex",
    "aten::linalg_eig",
    seen="not measured: what public reports say, and what the algorithms need",
)
def without_formula(call: Call) -> Steps:
    """What cuSOLVER or MAGMA takes of these nobody has looked at: nothing is counted."""
    most = MATRICES * nbytes(call.args[0])
    doubt = Doubt(0, most, f"the workspace of {operator(call)} is not counted")
    yield from cub.for_a_moment(0, "workspace of a solver", doubt)
