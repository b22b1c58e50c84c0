"""The names of torch.cuda that the how-to lists are there, or not, as it says; and what they do."""

from __future__ import annotations

import re
import textwrap

import pytest
import torch
from documents import ROOT
from torch_script import run

import bfc

PAGE = (ROOT / "docs" / "how-to" / "tensors-on-opencl.md").read_text()
#: PyTorch's page has these beside those of the module torch.cuda.memory.
BESIDE_MEMORY = {"OutOfMemoryError", "device_memory_used", "ipc_collect"}
MIB = 1 << 20
USAGE = """
torch_opencl.enable("64 MiB")
sizes = 1, 3000, 1 << 20, (1 << 20) + 1, 12 << 20
kept = [torch.empty(size, dtype=torch.uint8, device="opencl") for size in sizes]
del kept[3], kept[1]
try:
    torch.empty(60 << 20, dtype=torch.uint8, device="opencl")
except torch.OutOfMemoryError:
    pass
"""


def table_below(heading: str) -> list[list[str]]:
    lines = PAGE.partition(f"\n### {heading}\n")[2].partition("\n#")[0].splitlines()
    return [line.strip("| ").split(" | ") for line in lines if line.startswith("| `")]


def test_the_table_of_names_is_right(opencl: torch.device) -> None:
    said: dict[str, bool] = {}
    for names, what in table_below("The names of torch.cuda"):
        assert what.startswith(("yes", "no:"))
        said |= dict.fromkeys(re.findall(r"`(\w+)`", names), what.startswith("yes"))
    assert set(said) == {*torch.cuda.memory.__all__, *BESIDE_MEMORY}
    assert said == {name: hasattr(torch.opencl, name) for name in said}
    text = PAGE.partition("\nOf devices there are ")[2].partition("`get_device_capability`")[0]
    for name in re.findall(r"`(\w+)`", text):
        assert hasattr(torch.opencl, name), name


def test_the_table_of_statistics_is_measured() -> None:
    rows = {
        row[0].strip("`"): row[2]
        for row in table_below("What memory_stats says, beside PyTorch's description")
    }
    assert textwrap.dedent(USAGE).partition("\n")[2].partition("\n")[2] in PAGE
    run(
        USAGE
        + f"""
ours = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"), memory_limit="64 MiB")
live = [ours.allocate_raw(size) for size in sizes]
ours.deallocate_raw(live[3])
ours.deallocate_raw(live[1])
refusal(bfc.OutOfMemoryError, ours.allocate_raw, 60 << 20)
found = torch.opencl.memory_stats()
assert found == ours.memory_stats() | {{"invalid_frees": 0}}, "the same program, the same figures"
for key, figure in {rows!r}.items():
    measured = found.get(key, found.get(f"{{key}}.all.current", "none"))
    assert str(measured) == figure, (key, measured, figure)
described = {{key.partition(".")[0] for key in {list(rows)!r}}}
assert {{key.partition(".")[0] for key in found}} <= described
"""
    )


def test_memory_runs_out_as_everyone_writes_it() -> None:
    run("""
        device = torch_opencl.enable("64 MiB")
        assert torch.opencl.OutOfMemoryError is torch.OutOfMemoryError
        for empty_cache in (torch.opencl.empty_cache, torch.accelerator.empty_cache):
            batch, refused = 256, 0
            while True:
                try:
                    x = torch.ones(batch, 1 << 18, device=device)  # a MiB each
                    y = x + x
                    break
                except torch.opencl.OutOfMemoryError:
                    x = y = None
                    empty_cache()
                    batch, refused = batch // 2, refused + 1
            assert (batch, refused) == (32, 3), (batch, refused)
            assert y[-1, -1].item() == 2
            del x, y
        pool = torch.opencl.pool()
        refusal(bfc.OutOfMemoryError, pool.allocate, "65 MiB")
    """)


def test_a_fraction_limits_the_pool() -> None:
    run("""
        device = torch_opencl.enable("64 MiB")
        total = torch.opencl.mem_get_info()[1]
        assert abs(torch.opencl.get_per_process_memory_fraction() - (64 << 20) / total) < 1e-9
        torch.opencl.set_per_process_memory_fraction((8 << 20) / total)
        refusal(torch.OutOfMemoryError, torch.empty, 9 << 20, dtype=torch.uint8, device=device)
        torch.opencl.set_per_process_memory_fraction(1.0, "opencl:0")
        torch.empty(65 << 20, dtype=torch.uint8, device=device)
        assert "between 0.0 and 1.0" in refusal(
            ValueError, torch.opencl.set_per_process_memory_fraction, 1.5
        )
    """)
    run("""
        torch_opencl.enable("64 MiB", policy="bfc")
        said = refusal(RuntimeError, torch.opencl.set_per_process_memory_fraction, 0.5)
        assert "policy='caching'" in said, said
    """)


def test_statistics_nest_as_pytorchs_do(opencl: torch.device) -> None:
    flat, nested = torch.opencl.memory_stats(), torch.opencl.memory_stats_as_nested_dict()
    assert nested["active_bytes"]["all"]["peak"] == flat["active_bytes.all.peak"]
    assert nested["num_ooms"] == flat["num_ooms"]
    pinned = torch.ones(1000).pin_memory()
    host = torch.opencl.host_memory_stats_as_nested_dict()
    assert host["active_bytes"]["current"] >= pinned.nbytes
    assert host["num_host_alloc"] == torch.opencl.host_memory_stats()["num_host_alloc"]
    torch.opencl.reset_accumulated_host_memory_stats()
    assert torch.opencl.host_memory_stats()["active_bytes.allocated"] == 0


def test_devices_streams_and_generators_have_cudas_names(opencl: torch.device) -> None:
    properties = torch.opencl.get_device_properties(opencl)
    assert properties.name == torch.opencl.get_device_name()
    assert properties.total_memory == torch.opencl.mem_get_info()[1]
    assert properties.multi_processor_count > 0
    stream = torch.Stream(opencl)
    with stream:
        assert torch.opencl.current_stream() == stream != torch.opencl.default_stream()
    assert torch.opencl.current_stream() == torch.opencl.default_stream()
    states = torch.opencl.get_rng_state_all()
    drawn = torch.rand(3, device=opencl).tolist()
    torch.opencl.seed_all()
    assert torch.rand(3, device=opencl).tolist() != drawn
    torch.opencl.set_rng_state_all(states)
    assert torch.rand(3, device=opencl).tolist() == drawn


def test_pinned_memory_that_is_refused_is_pytorchs_error(
    opencl: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise bfc.OutOfMemoryError(5)

    monkeypatch.setattr(bfc.suballocators.host.HostSubAllocator, "alloc", refuse)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        torch.ones(50 * MIB).pin_memory()
