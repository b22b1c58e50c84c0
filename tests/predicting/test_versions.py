"""A PyTorch whose internals nobody has looked at is refused in words."""

from __future__ import annotations

import contextlib
import sys

import pytest
import torch

import bfc
from bfc_tools.cli import main
from bfc_tools.predicting import guard


@pytest.mark.parametrize("version", ["2.99.0+cpu", "3.0.0", "2.8.1"])
def test_an_unknown_version_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    refused = pytest.raises(bfc.DeviceUnavailableError, match=version.partition("+")[0])
    with refused, bfc.predict("a100"):
        pass


def test_without_torch_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    refused = pytest.raises(
        bfc.DeviceUnavailableError, match=r"bfc.predict needs the package torch"
    )
    with refused, bfc.predict("a100"):
        pass


def test_this_one_is_known() -> None:
    assert guard.supported_torch() is torch


def predicted_as(monkeypatch: pytest.MonkeyPatch, version: str, **device: object) -> bfc.Prediction:
    """A prediction by this PyTorch, called by another version's name, that runs out once."""
    monkeypatch.setattr(torch, "__version__", version)
    with bfc.predict("1 GiB", **device) as run:
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            torch.ones(8, device="cuda")
        with contextlib.suppress(torch.OutOfMemoryError):
            torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    return run


def test_figures_of_2_12_are_not_claimed_to_be_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    run = predicted_as(monkeypatch, "2.12.0+cpu")
    assert "live and allocated figures stand" in run.allocator_differs
    assert "not exact" in run.allocator_differs
    assert run.allocator_differs in str(run)
    assert run.trace.meta["torch_version_sign"] != "whose rules torch 2.12.0+cpu has"


def test_exceptions_are_named_where_a_program_meets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = {"settings": "expandable_segments:True", "oom": True}
    assert "private pool" in predicted_as(monkeypatch, "2.13.0+cpu").allocator_differs
    assert "range of addresses" in predicted_as(monkeypatch, "2.14.1", **ranges).allocator_differs
    assert predicted_as(monkeypatch, "2.14.1").allocator_differs == ""
    assert predicted_as(monkeypatch, "2.11.0", **ranges).allocator_differs == ""
    with bfc.predict("1 GiB") as run:
        torch.ones(8, device="cuda")
    assert run.allocator_differs == ""


MIB = 1 << 20


def product_as(version: str | None) -> bfc.Prediction:
    """A product with a bias, by the rules of another version."""
    with bfc.predict("h100", as_torch=version) as run:
        torch.nn.Linear(64, 64, device="cuda")(torch.ones(64, 64, device="cuda"))
    return run


def test_the_rules_of_another_version_hold_without_it() -> None:
    """Up to 2.11 cublasLt has a workspace of its own, beside that of cuBLAS."""
    for version, of_lt in (("2.11", 1), ("2.13", 0)):
        run = product_as(version)
        sizes = [int(one) for op, one in zip(run.trace.op, run.trace.size, strict=True) if op == 0]
        assert (sizes.count(MIB), sizes.count(32 * MIB)) == (of_lt, 1)
    assert product_as("2.9.1").trace.meta["torch_version"] == "2.11"
    assert product_as("2.14").trace.meta["torch_version"] == "2.15"


def test_it_is_said_what_another_version_decided_and_what_not() -> None:
    run = product_as("2.9")
    assert run.trace.meta["torch_version_sign"] == "whose rules torch 2.9 has"
    assert "PyTorch 2.9: its rules, of the allocator and of what operators take" in str(run)
    assert "not decided: which operators PyTorch 2.9 calls, and in which order" in str(run)
    assert f"they are those of torch {run.torch_version}" in str(run)
    assert run.to_dict()["as_torch"] == "2.9"
    assert "its rules, of the allocator" not in str(product_as(None))


def test_a_version_newer_than_all_has_the_newest_rules_and_it_is_said() -> None:
    run = product_as("2.99")
    assert "PyTorch 2.99 is newer than all that is known: these are the rules of 2.15" in str(run)
    assert "make upstream FROM=2.15.0 TO=2.99.0" in str(run)
    assert run.trace.meta["torch_version_sign"].startswith(
        "whose rules are not those of torch 2.99"
    )


@pytest.mark.parametrize("version", ["2.8", "1.13.1", "new", "", "2"])
def test_what_is_no_version_with_known_rules_is_refused(version: str) -> None:
    with pytest.raises(ValueError, match=r"write one from 2\.9 on"), bfc.predict(as_torch=version):
        pass


def test_the_command_passes_it_on(script, capsys) -> None:
    name = script("import torch\ntorch.ones(9, device='cuda')\n")
    assert main(["predict", "--as-torch", "2.10", name]) == 0
    assert "PyTorch 2.10: its rules" in capsys.readouterr().out


def heads_as(version: str) -> tuple[tuple[int, ...], int]:
    """The shape that attention without a batch returns, and the most that is live in it."""
    with bfc.predict("a100", as_torch=version) as run:
        query = torch.randn(8, 512, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        found = torch.nn.functional.scaled_dot_product_attention(query, query, query)
        found.sum().backward()
    return tuple(found.shape), run.peak_requested


def test_attention_without_a_batch_holds_no_scores_since_2_14() -> None:
    (shape, before), (same, since) = map(heads_as, ("2.13", "2.14"))
    assert shape == same == (8, 512, 64)
    assert before > since + 8 * 512 * 512 * 2
