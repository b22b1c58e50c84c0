"""`bfc.predict`: what a block of a program needs, and what is left of it."""

from __future__ import annotations

import contextlib
import gc
import html
import re
import weakref

import pytest
import torch
from torch import nn

import bfc

KIB, MIB = 1 << 10, 1 << 20
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))


class Net(nn.Module):
    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss = (model(torch.randn(64, 512, device="cuda")) ** 2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture(scope="module")
def trained() -> bfc.Prediction:
    with bfc.predict("h100") as run:
        model = Net().cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            step(model, optimizer)
    return run


def test_a_program_is_answered_by_our_allocator() -> None:
    with bfc.predict("24GiB") as run:
        assert torch.cuda.is_available()
        assert torch.cuda.device_count() == 1
        x = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_allocated() == 3 * MIB
        assert torch.cuda.memory_reserved() == 20 * MIB
        assert torch.cuda.mem_get_info() == ((24 << 30) - 20 * MIB, 24 << 30)
        assert torch.cuda.memory_stats()["allocation.all.current"] == 1
        del x
        assert torch.cuda.memory_allocated() == 0
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == 0
        assert torch.cuda.max_memory_reserved() == 20 * MIB
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_reserved() == 0
    assert run.peak_reserved == 20 * MIB
    assert run.trace.op.tolist() == [0, 1, 2]
    assert not torch.cuda.is_available()


def test_whose_memory_it_is(trained) -> None:
    weights = 2 * 4 * 512 * 2048 + 4 * (512 + 2048)
    kinds = trained.peak.by_kind
    assert kinds["parameters"] == weights
    assert kinds["gradients"] == weights
    assert kinds["optimizer state"] == 2 * weights
    assert sum(kinds.values()) == trained.peak_requested == trained.trace.peak_bytes_live()
    assert trained.peak.phase == "optimizer"
    assert "test_predict.py" in trained.peak.line
    of_lt = 0 if TORCH >= (2, 12) else MIB  # whose workspace the first product with a bias makes
    by_module = trained.peak.by_module
    assert by_module["up"] == by_module["down"] + 4 * 4 * (2048 - 512) + of_lt


def test_the_trace_has_modules_and_lines(trained) -> None:
    trace = trained.trace
    assert {"up", "down", "Net"} <= set(trace.owners)
    lines = {
        (frame.name, trace.owners[trace.owner[event]])
        for event in range(len(trace))
        for frame in trace.frames_of(event)
    }
    assert ("at::_ops::addmm::call", "up") in lines
    assert ("torch::autograd::generated::AddmmBackward0::apply", "down") in lines
    assert ("Net.forward", "up") in lines
    assert not any(
        "predicting" in frame.filename and "/bfc_tools/" in frame.filename for frame in trace.frames
    )


def test_a_replay_reserves_what_was_predicted(trained) -> None:
    assert trained.reserved_under("") == trained.peak_reserved
    replayed = trained.trace.replay(bfc.CachingAllocator(bfc.SimulatedSubAllocator("80 GiB")))
    assert replayed.peak_bytes_reserved == trained.peak_reserved
    assert trained.fits(trained.peak_reserved)
    assert not trained.fits(trained.peak_requested - 1)


def test_advice_on_a_prediction_speaks_of_no_recording(trained) -> None:
    advice = str(trained.advise("1 GiB"))
    assert "The run was predicted: there is no recording to compare it with." in advice
    assert f"whose rules torch {torch.__version__} has" in advice
    assert trained.trace.torch in ("2.11", "2.15")
    assert "addresses" not in advice


def test_printed_it_tells_what_the_command_prints(trained) -> None:
    lines = str(trained).splitlines()
    assert lines[0].startswith("It fits on NVIDIA H100 80GB HBM3, of which PyTorch can take ")
    assert [line.split()[0] for line in lines[1:4]] == ["live", "allocated", "reserved"]
    for title in ("whose memory at the peak:", "by module:", "assumed:"):
        assert title in lines
    with bfc.predict("1GiB") as run:
        held = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    del held
    assert "run.advise() looks for settings that make it fit." in str(run).splitlines()
    with bfc.predict("1GiB") as run:
        assert str(run) == "It has allocated nothing on the GPU."


def test_a_notebook_shows_the_same_and_names_are_text() -> None:
    with bfc.predict("h100") as run:
        model = nn.Sequential()
        model.add_module("<b>", nn.Linear(64, 64, device="cuda"))
        kept = model(torch.empty(64, device="cuda"))
    del kept
    answer, _, rest = str(run).partition("\n")
    assert "<b>" in rest
    page = run._repr_html_()
    assert "<b>" not in page
    shown = html.unescape(re.sub(r"<[^>]*>", "", page))
    assert shown == answer + rest


def test_nothing_of_the_program_is_held() -> None:
    with bfc.predict("h100") as run:
        model = Net().cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        step(model, optimizer)
        held = [weakref.ref(one) for one in model.parameters()]
        del model, optimizer
        gc.collect()
        assert [one() for one in held] == [None] * 4
        # two workspaces of cuBLAS, of the main thread and of that of the backward pass, and one of
        # cuBLASLt, which shares the former since 2.12
        assert torch.cuda.memory_allocated() == (64 if TORCH >= (2, 12) else 65) * MIB
    assert run.trace.op[-1] == 1


def test_it_runs_out_of_memory_where_the_program_would() -> None:
    with bfc.predict("1GiB", oom=True) as run:
        kept = [torch.empty(100 * MIB, dtype=torch.uint8, device="cuda") for _ in range(10)]
        with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 100\.00 MiB"):
            torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
        del kept
    assert run.peak_reserved == 1000 * MIB


def test_the_settings_in_force_count(monkeypatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with bfc.predict("h100") as run:
        torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
    assert run.peak_reserved == 20 * MIB
    assert run.settings == "expandable_segments:True"
    assert run.reserved_under("") == 20 * MIB
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:potatoes")
    with pytest.raises(bfc.SettingsError, match="PYTORCH_CUDA_ALLOC_CONF"), bfc.predict("h100"):
        pass


def test_settings_that_the_program_makes_itself_count(monkeypatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    with bfc.predict("h100") as run:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "roundup_power2_divisions:4")
        torch.empty(5 * MIB + 512, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] == 6 * MIB
    assert run.settings == "roundup_power2_divisions:4"
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    with bfc.predict("h100") as run:
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    assert run.settings == "expandable_segments:True"


def test_a_fraction_that_the_program_allows_itself_counts() -> None:
    with bfc.predict("h100") as run:
        torch.cuda.set_per_process_memory_fraction(0.1)
        assert torch.cuda.get_per_process_memory_fraction() == 0.1
        torch.empty(20 << 30, dtype=torch.uint8, device="cuda")
    assert not run.fits()
    assert run.fits("24 GiB")


def test_a_refusal_that_ended_the_program_is_no_fit() -> None:
    with contextlib.suppress(torch.OutOfMemoryError), bfc.predict("1GiB", oom=True) as run:
        torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    assert not run.fits()


def test_streams_are_handed_out_in_turn() -> None:
    """PyTorch has 32 of each priority."""
    with bfc.predict("h100"):
        given = [torch.cuda.Stream() for _ in range(33)]
        assert len({one.stream_id for one in given}) == 32
        assert given[0] == given[32]
        assert torch.cuda.Stream(priority=-1) not in given


def test_the_first_line_that_allocates_is_known() -> None:
    with bfc.predict("h100") as run:
        torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
    assert "test_predict.py" in run.peak.line


def test_streams_have_memory_of_their_own() -> None:
    with bfc.predict("h100") as run:
        side = torch.cuda.Stream()
        a = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
        with torch.cuda.stream(side):
            b = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
            assert torch.cuda.current_stream() == side
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        del a, b
    assert run.trace.stream.tolist()[:2] == [0, 1]
    assert run.peak_reserved == 40 * MIB


def test_a_value_that_was_made_up_is_told() -> None:
    with bfc.predict("h100") as run:
        assert torch.rand(3, device="cuda").sum().item() == 1.0
    (one,) = [one for one in run.assumptions if one["what"] == ".item()"]
    assert one["where"].rpartition(":")[0].endswith("test_predict.py")
    assert (one["value"], one["times"]) == (1.0, 1)


def test_another_device_is_not_there() -> None:
    with bfc.predict("h100"), pytest.raises(RuntimeError, match="no cuda:3"):
        torch.empty(1, device="cuda:3")
    with bfc.predict("h100"), pytest.raises(RuntimeError, match="no cuda:3"):
        torch.cuda.set_device(3)


def test_a_snapshot_is_written_in_pytorchs_form(tmp_path) -> None:
    path = tmp_path / "snapshot.pickle"
    with bfc.predict("h100") as run:
        torch.cuda.memory._record_memory_history(max_entries=1000)
        kept = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
        torch.cuda.memory._dump_snapshot(str(path))
        torch.cuda.memory._record_memory_history(enabled=None)
        del kept
    trace = bfc.Trace.from_torch(path)
    assert trace.size.tolist() == [3 * MIB]
    (frame, *_) = [one for one in trace.frames_of(0) if one.filename.endswith(".py")]
    assert frame.filename.endswith("test_predict.py")
    assert run.snapshots == [str(path)]


def test_what_is_live_after_a_backward_pass_is_not_left_to_chance() -> None:
    """PyTorch's own thread held the graph for some microseconds after one pass of forty."""
    with bfc.predict("v100"):
        left = set()
        for _ in range(200):
            x = torch.ones(1, device="cuda", requires_grad=True)
            y = x.tanh()
            torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
            del x, y
            left.add(torch.cuda.memory_allocated())
    assert left == {0}


def test_what_a_step_overwrites_is_freed_at_once() -> None:
    """PyTorch has no fake form of SGD's fused step, and its error holds the gradients in a cycle:
    they would live until Python looks for cycles."""
    with bfc.predict("h100"):
        weight = torch.nn.Parameter(torch.ones(8, device="cuda"))
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, fused=True)
        weight.sum().backward()
        gradient = weakref.ref(weight.grad)
        gc.disable()
        try:
            optimizer.step()
            optimizer.zero_grad()
            assert gradient() is None
        finally:
            gc.enable()
