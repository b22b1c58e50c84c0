"""cuBLAS's workspaces."""

from __future__ import annotations

import pytest
from rule_calls import Shape, call, of

from bfc_tools.predicting.releases import NEWEST, release_of
from bfc_tools.predicting.rules import gemm
from bfc_tools.predicting.rules.operators import OPERATORS

MIB = 1 << 20


@pytest.fixture(autouse=True)
def by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_CUBLAS_WORKSPACE_CACHE", raising=False)


A, B, BIAS = Shape((64, 32)), Shape((32, 16)), Shape((16,))


@pytest.mark.parametrize(
    ("cc", "torch", "nbytes"),
    [
        ((7, 5), (2, 13), 8519680),
        ((8, 9), (2, 13), 8519680),
        ((9, 0), (2, 9), 32 * MIB),
        ((10, 0), (2, 11), 8519680),
        ((10, 0), (2, 13), 32 * MIB),
        ((12, 0), (2, 13), 32 * MIB),
    ],
)
def test_its_size_goes_by_the_compute_capability(
    cc: tuple[int, int], torch: tuple[int, int], nbytes: int
) -> None:
    assert gemm.workspace_bytes(cc, release_of(torch)) == nbytes


@pytest.mark.parametrize(
    ("config", "nbytes"), [(":4096:8", 32 * MIB), (":16:8:8:2", 147456), ("no", 8519680)]
)
def test_the_environment_says_another(config: str, nbytes: int) -> None:
    assert gemm.workspace_bytes((8, 0), NEWEST, config) == nbytes


def test_each_thread_and_stream_keeps_one() -> None:
    keys = set()
    for thread, stream in ((1, 0), (2, 0), (1, 7)):
        for name in ("mm(self, mat2)", "bmm(self, mat2)"):
            made = call(name, A, B, thread=thread, stream=stream)
            for rule in OPERATORS[made.func._schema.name].after:
                keys |= {one.kept for one in rule(made)}
    assert len(keys) == 3


def test_matrices_with_gaps_between_their_elements_are_copied() -> None:
    apart = Shape((64, 32), strides=(64, 2))
    assert of(call("mm(self, mat2)", apart, B)) == [0, 64 * 32 * 4, 8519680]
    column = Shape((64, 32), strides=(1, 64))
    part = Shape((64, 32), strides=(100, 1))
    for one in (column, part):
        assert of(call("mm(self, mat2)", one, B)) == [0, 8519680]
    heads = Shape((8, 64, 32), strides=(32, 256, 1))
    assert of(call("bmm(self, mat2)", heads, Shape((8, 32, 16)))) == [0, 8519680]


ADDMM = "addmm(self, mat1, mat2, beta=1, alpha=1)"


def test_a_bias_shares_it_from_2_12_to_2_14(monkeypatch: pytest.MonkeyPatch) -> None:
    made = call(ADDMM, BIAS, A, B, beta=1, alpha=1)
    assert of(made) == [0, 8519680]
    monkeypatch.setenv("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "0")
    assert of(made) == [0, 8519680, MIB]
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "4096")
    assert of(made) == [0, 8519680, 4 * MIB]


def test_a_bias_of_a_result_with_gaps_is_added_by_cublas() -> None:
    """As Inductor's programs have it where it widens rows to whole 128 bytes."""
    out = Shape((64, 16), strides=(32, 1))
    assert of(call(ADDMM, BIAS, A, B, beta=1, alpha=1, torch=(2, 15), out=out)) == [0, 8519680]


def test_a_bias_has_one_beside_that_of_the_handle_until_2_11(monkeypatch) -> None:
    """As an H200 has it with 2.11: both are kept."""
    made = call(ADDMM, BIAS, A, B, beta=1, alpha=1, torch=(2, 11))
    assert of(made) == [0, 8519680, MIB]
    assert all(one.kept for one in OPERATORS["aten::addmm"].after[0](made))
    small = call(ADDMM, Shape((1,)), A, Shape((32, 1)), beta=1, alpha=1, torch=(2, 11))
    assert of(small) == [0, 8519680]
    of_one_row = call(ADDMM, BIAS, Shape((1, 32)), B, beta=1, alpha=1, torch=(2, 11))
    assert of(of_one_row) == [0, 8519680, MIB]  # as an H100 has it
    monkeypatch.setenv("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "1")
    assert of(made) == [0, 8519680]


def test_each_call_has_its_own_since_2_15(monkeypatch: pytest.MonkeyPatch) -> None:
    made = call(ADDMM, BIAS, A, B, beta=1, alpha=1, torch=(2, 15))
    product = call("mm(self, mat2)", A, B, torch=(2, 15))
    assert of(made) == [0, MIB]
    assert of(product) == [0, 8519680]
    for one in (made, product):
        assert [held.kept for held in OPERATORS[one.func._schema.name].after[0](one)] == [None]
    monkeypatch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", "1")
    assert of(made) == [0, 8519680]
    assert all(held.kept for held in OPERATORS["aten::addmm"].after[0](made))
