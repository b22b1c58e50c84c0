"""What docs/how-to/tensors-on-opencl.md says works, and what it says does not: a test for each row
of its two tables, and a test that there are no other rows."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import own_interpreter
import pytest
import torch
from torch import nn
from torch.nn import functional

from bfc.integrations import torch_opencl
from bfc_torch_opencl import runtime

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "tensors-on-opencl.md"
TABLES = ("## What works", "### What does not")
OPENCL = "opencl"

rows: dict[str, list[str]] = {heading: [] for heading in TABLES}
pytestmark = pytest.mark.usefixtures("nothing_left")


def works(row: str) -> Callable[[Any], Any]:
    rows[TABLES[0]].append(row)
    return lambda test: test


def does_not_work(row: str) -> Callable[[Any], Any]:
    rows[TABLES[1]].append(row)
    return lambda test: test


def rows_of_page(heading: str) -> list[str]:
    lines = PAGE.read_text().partition(f"\n{heading}\n")[2].splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("|"))
    found = []
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            break
        found.append(line.split(" | ")[0].removeprefix("| "))
    return found


@pytest.mark.parametrize("heading", TABLES)
def test_each_row_has_its_test(heading: str) -> None:
    assert rows_of_page(heading) == rows[heading]


def given(*shape: int) -> torch.Tensor:
    """Numbers on the host, the same each time."""
    return torch.randn(*shape or (3, 4), generator=torch.Generator().manual_seed(1))


def assert_same(function: Callable[..., Any], *inputs: torch.Tensor) -> None:
    """The function gives on opencl what it gives on the CPU, nearly."""
    here = function(*inputs)
    there = function(*(each.to(OPENCL) for each in inputs))
    pairs = [(here, there)] if isinstance(here, torch.Tensor) else zip(here, there, strict=True)
    for one, other in pairs:
        assert other.device.type == OPENCL
        torch.testing.assert_close(other.cpu(), one)


# -- what works, in the order of the page ----------------------------------------------------------


@works("`torch.empty`, `torch.zeros` and the other functions that make tensors")
def test_factories() -> None:
    assert torch.empty(2, 3, device=OPENCL).shape == (2, 3)
    for make in (torch.zeros, torch.ones, torch.eye):
        assert torch.equal(make(4, device=OPENCL).cpu(), make(4))
    for make in (torch.linspace, torch.logspace):
        assert torch.equal(make(0, 1, 5, device=OPENCL).cpu(), make(0, 1, 5))
    assert torch.arange(3, device=OPENCL).tolist() == [0, 1, 2]
    assert torch.tensor([[1, 2]], device=OPENCL).tolist() == [[1, 2]]
    assert torch.full((2,), 7, device=OPENCL).new_zeros(1).device.type == OPENCL
    with pytest.raises(RuntimeError, match="there is no device opencl:7"):
        torch.empty(1, device="opencl:7")


@works("`.to`, `.cpu`, `copy_` between any strides and dtypes")
def test_copies() -> None:
    x = given()
    assert torch.equal(x.to(OPENCL).cpu(), x)
    assert torch.equal(x.to(OPENCL).t().cpu(), x.t())
    assert torch.equal(torch.empty(4, 3, device=OPENCL).copy_(x.t()).cpu(), x.t())
    whole = torch.zeros(6, 4, device=OPENCL)
    whole[::2].copy_(x)
    assert torch.equal(whole.cpu()[::2], x)
    for dtype in (torch.float64, torch.int64, torch.bool, torch.bfloat16, torch.float8_e4m3fn):
        assert torch.equal(x.to(OPENCL).to(dtype).cpu().float(), x.to(dtype).float())


@works("`non_blocking=True` from pinned memory")
def test_copies_that_do_not_wait() -> None:
    x = given(1000).pin_memory()
    there = x.to(OPENCL, non_blocking=True)
    back = torch.empty(1000, pin_memory=True).copy_(there, non_blocking=True)
    torch.accelerator.synchronize()
    assert torch.equal(back, x)


@works("conjugated and negated views")
def test_bits() -> None:
    x = torch.complex(given(), given(3, 4) + 1)
    there = x.to(OPENCL)
    assert there.conj().is_conj()
    assert torch.equal(there.conj().cpu().resolve_conj(), x.conj().resolve_conj())
    assert there.conj().imag.is_neg()
    assert torch.equal(there.conj().imag.cpu().resolve_neg(), x.conj().imag.resolve_neg())


@works("views: slices, `t`, `expand`, `unfold`, `diagonal`, `as_strided`, `view_as_real`, ...")
def test_views() -> None:
    x = given()
    there = x.to(OPENCL)
    for view in (
        lambda a: a[1:, ::2],
        lambda a: a.t(),
        lambda a: a[:1].expand(5, 4),
        lambda a: a.unfold(1, 2, 1),
        lambda a: a.diagonal(),
        lambda a: a.as_strided((2, 2), (1, 3), 2),
        lambda a: torch.view_as_complex(a.view(3, 2, 2)),
        lambda a: a.view(torch.int32),
        lambda a: a.movedim(0, 1).unsqueeze(0).select(1, 2),
    ):
        shown = view(there)
        assert shown.untyped_storage().data_ptr() == there.untyped_storage().data_ptr()
        assert shown.stride() == view(x).stride()
        assert torch.equal(shown.cpu(), view(x))
    there.diagonal().fill_(5)
    assert there.cpu().diagonal().tolist() == [5.0] * 3


@works("indexing, read and written; indices may lie on the host")
def test_indexing() -> None:
    def read_and_write(a: torch.Tensor) -> list[torch.Tensor]:
        rows = torch.tensor([2, 0, 2], device=a.device)
        b = a.clone()
        b[a > 0] = 5
        b[rows, 1] = b[0, 0]
        added = a.clone().index_put_((rows,), a, accumulate=True)
        return [a[rows], a[a > 0], b, added, a.gather(0, rows[None, :3]), a.take(rows)]

    assert_same(read_and_write, given())
    x = given().to(OPENCL)
    assert torch.equal(x[torch.tensor([2, 0])].cpu(), given()[[2, 0]])


@works("`resize_`, `untyped_storage().resize_`, `set_`")
def test_sizes() -> None:
    x = given()
    there = x.to(OPENCL)
    assert torch.equal(there.clone().resize_(30)[:12].cpu(), x.flatten())
    held = there.clone()
    held.untyped_storage().resize_(0)
    assert held.untyped_storage().nbytes() == 0
    held.untyped_storage().resize_(48)
    assert held.shape == (3, 4)
    assert torch.equal(torch.empty(0, device=OPENCL).set_(there).cpu(), x)


@works("`copy.deepcopy`, `pickle`")
def test_copies_of_python() -> None:
    x = given()
    for other in (copy.deepcopy(x.to(OPENCL)), pickle.loads(pickle.dumps(x.to(OPENCL)))):
        assert other.device == torch.device("opencl:0")
        assert torch.equal(other.cpu(), x)


@works('`torch.save`, `torch.load(map_location="opencl")`')
def test_files() -> None:
    x = given()
    for saved in (x, x.to(OPENCL)):
        for place in ("cpu", "opencl", "opencl:0", torch.device(OPENCL), {"cpu": "opencl:0"}):
            file = io.BytesIO()
            torch.save(saved, file)
            file.seek(0)
            found = torch.load(file, map_location=place)
            assert found.device.type == (OPENCL if place != "cpu" else "cpu")
            assert torch.equal(found.cpu(), x)


@works('`torch.set_default_device("opencl")`, `with torch.device("opencl"):`')
def test_default_device() -> None:
    with torch.device(OPENCL):
        assert torch.ones(2).device.type == OPENCL
        assert nn.Linear(1, 1).weight.device.type == OPENCL
    torch.set_default_device(OPENCL)
    try:
        assert torch.randperm(3).device.type == OPENCL
    finally:
        torch.set_default_device(None)
    assert torch.ones(1).device.type == "cpu"


@works("printing, `item`, `tolist`, `bool`, `len`, `in`, iteration")
def test_python() -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=OPENCL)
    assert str(x) == "tensor([[1., 2.],\n        [3., 4.]], device='opencl:0')"
    assert (x[0, 1].item(), x.tolist(), len(x)) == (2.0, [[1, 2], [3, 4]], 2)
    assert 3.0 in x
    assert 9.0 not in x
    assert bool((x > 0).all())
    assert [row.sum().item() for row in x] == [3, 7]
    assert torch.equal(x, x.clone())
    assert ["a", "b"][torch.tensor(1, device=OPENCL)] == "b"


def slopes(device: str) -> list[torch.Tensor]:
    x = given().to(device).requires_grad_()
    first = torch.autograd.grad((x**3).sum(), x, create_graph=True)[0]
    second = torch.autograd.grad(first.sum(), x)[0]
    return [first.detach(), second]


@works("autograd: second derivatives, hooks, `gradcheck`, checkpointing, `torch.autograd.Function`")
def test_autograd() -> None:
    from torch.utils.checkpoint import checkpoint

    for one, other in zip(slopes("cpu"), slopes(OPENCL), strict=True):
        torch.testing.assert_close(other.cpu(), one)
    seen: list[torch.Tensor] = []
    layer = nn.Linear(4, 2).to(OPENCL)
    layer.weight.register_hook(seen.append)
    x = given().to(OPENCL).requires_grad_()
    layer(x).sum().backward()
    assert [each.device.type for each in seen] == [OPENCL]
    again = torch.autograd.grad(checkpoint(layer, x, use_reentrant=False).sum(), x)[0]
    assert torch.equal(again, x.grad)
    double = torch.randn(2, 2, dtype=torch.float64, device=OPENCL, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a: (a @ a.t()).sin(), double)


@works("`torch.func`: `grad`, `vmap`, `jacrev`, `hessian`")
@pytest.mark.filterwarnings("ignore")
def test_func() -> None:
    from torch import func

    assert_same(func.grad(lambda a: (a**2).sum()), given())
    assert_same(func.vmap(lambda a: a.sum()), given())
    assert_same(func.jacrev(torch.sin), given(4))
    assert_same(func.hessian(lambda a: (a**3).sum()), given(4))


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "Conv1d": (lambda: nn.Conv1d(2, 4, 3, padding=1, groups=2), (2, 2, 5)),
    "Conv2d": (lambda: nn.Conv2d(2, 4, 3, bias=False), (2, 2, 5, 5)),
    "Conv3d": (lambda: nn.Conv3d(2, 4, 3, stride=2), (2, 2, 5, 5, 5)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(2, 4, 3, stride=2, groups=2), (2, 2, 4, 4)),
    "MaxPool2d": (lambda: nn.MaxPool2d(2), (2, 2, 4, 4)),
    "AdaptiveAvgPool2d": (lambda: nn.AdaptiveAvgPool2d(2), (2, 2, 5, 5)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(2), (2, 2, 4, 4)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), (2, 4, 3)),
    "LayerNorm": (lambda: nn.LayerNorm(4), (3, 4)),
    "Upsample": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), (1, 1, 3, 3)),
    "RNN": (lambda: nn.RNN(4, 5), (6, 2, 4)),
    "LSTM": (lambda: nn.LSTM(4, 5, 2, bidirectional=True), (6, 2, 4)),
    "LSTM, projected": (lambda: nn.LSTM(4, 5, proj_size=3), (6, 2, 4)),
    "GRU": (lambda: nn.GRU(4, 5, 2), (6, 2, 4)),
    "GRU without bias": (lambda: nn.GRU(4, 5, bias=False), (6, 2, 4)),
    "GRUCell": (lambda: nn.GRUCell(4, 5), (6, 4)),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0), (3, 2, 4)),
    "PixelShuffle": (lambda: nn.PixelShuffle(2), (1, 4, 2, 2)),
}


@works("`torch.nn`: convolutions, pooling, norms, attention, RNN, LSTM, GRU, losses, ...")
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_layers(name: str) -> None:
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    layer = make()
    twin = copy.deepcopy(layer).to(OPENCL)
    found = []
    for module, device in ((layer, "cpu"), (twin, OPENCL)):
        x = given(*shape).to(device).requires_grad_()
        out = module(x)
        out = out if isinstance(out, torch.Tensor) else out[0]
        out.square().sum().backward()
        found.append([out, x.grad, *(each.grad for each in module.parameters())])
    for one, other in zip(*found, strict=True):
        assert other.device.type == OPENCL
        torch.testing.assert_close(other.detach().cpu(), one.detach(), rtol=1e-4, atol=1e-5)


def test_cells_have_second_derivatives() -> None:
    x = torch.randn(2, 2, dtype=torch.float64, device=OPENCL, requires_grad=True)
    for cell in (nn.LSTMCell(2, 2), nn.GRUCell(2, 2)):
        cell.double().to(OPENCL)
        assert torch.autograd.gradcheck(cell, (x,))
        assert torch.autograd.gradgradcheck(cell, (x,))


def test_losses_and_packed_sequences() -> None:
    target = torch.tensor([0, 1, 2])
    assert_same(functional.cross_entropy, given(), target)
    assert_same(functional.mse_loss, given(), torch.ones(3, 4))
    assert_same(functional.embedding, target, given())
    layer = nn.RNN(4, 3).to(OPENCL)
    packed = nn.utils.rnn.pack_padded_sequence(given(5, 2, 4).to(OPENCL), [5, 3])
    out, lengths = nn.utils.rnn.pad_packed_sequence(layer(packed)[0])
    assert (out.shape, lengths.tolist()) == ((5, 2, 3), [5, 3])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9),
    "SGD, fused": lambda given: torch.optim.SGD(given, lr=0.1, fused=True),
    "Adam": lambda given: torch.optim.Adam(given),
    "Adam, foreach": lambda given: torch.optim.Adam(given, foreach=True),
    "Adam, fused": lambda given: torch.optim.Adam(given, fused=True),
    "AdamW": lambda given: torch.optim.AdamW(given, amsgrad=True),
    "RMSprop": lambda given: torch.optim.RMSprop(given),
    "Adagrad": lambda given: torch.optim.Adagrad(given),
}


def trained(make: Callable[[Any], torch.optim.Optimizer], device: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
    optimizer = make(model.parameters())
    x = given(16, 4).to(device)
    for _ in range(5):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return [each.detach().cpu() for each in model.parameters()]


@works("`torch.optim`, with `foreach=True` and `fused=True`; `clip_grad_norm_`")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str) -> None:
    here, there = (trained(OPTIMIZERS[name], device) for device in ("cpu", OPENCL))
    for one, other in zip(here, there, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)


@works("`einsum`, `bmm`, `torch.linalg`, `torch.fft`, complex numbers")
def test_linear_algebra() -> None:
    square = given(3, 3) + 3 * torch.eye(3)
    assert_same(lambda a: torch.einsum("ij,kj->ik", a, a), given())
    assert_same(lambda a: a.bmm(a), given(2, 3, 3))
    assert_same(lambda a: torch.linalg.solve(a, a[:, :1]), square)
    assert_same(lambda a: [torch.linalg.inv(a), torch.linalg.svdvals(a)], square)
    assert_same(torch.linalg.cholesky, square @ square.T)
    assert_same(lambda a: torch.fft.irfft(torch.fft.rfft(a)), given())
    assert_same(lambda a: (torch.complex(a, a) @ torch.complex(a, a).mH).abs(), given())


@works("`sort`, `topk`, `unique`, `nonzero`, `where`, `cumsum`, `scatter`, `masked_scatter`, ...")
def test_searches() -> None:
    assert_same(lambda a: [*a.sort(descending=True), *a.topk(2)], given())
    assert_same(lambda a: a.round().unique(return_inverse=True, return_counts=True), given())
    assert_same(lambda a: [(a > 0).nonzero(), *(a > 0).nonzero(as_tuple=True)], given())
    assert_same(lambda a: [torch.where(a > 0, a, 0.0), a.clamp(-1, 1), a.cumsum(1)], given())
    zeros = torch.zeros(3, 4, dtype=torch.int64)
    assert_same(lambda a, i: [a.scatter(0, i, a), a.scatter_add(0, i, a)], given(), zeros)
    assert_same(lambda a: a.masked_scatter(a > 0, a.flatten()), given())


DRAWS: list[Callable[[Any], torch.Tensor]] = [
    lambda device: torch.randn(9, device=device),
    lambda device: torch.rand(9, device=device),
    lambda device: torch.randint(9, (9,), device=device),
    lambda device: torch.randperm(9, device=device),
    lambda device: torch.ones(9, device=device).exponential_(),
    lambda device: torch.full((9,), 0.5, device=device).bernoulli(),
    lambda device: torch.ones(9, device=device).multinomial(3),
    lambda device: functional.dropout(torch.ones(9, device=device)),
]


@works("random numbers: a seed gives the CPU's; `get_rng_state`, `torch.Generator`")
def test_random_numbers() -> None:
    for draw in DRAWS:
        torch.manual_seed(3)
        expected = draw("cpu")
        torch.manual_seed(3)
        assert torch.equal(draw(OPENCL).cpu(), expected)
    state = torch.opencl.get_rng_state()
    first = torch.randn(5, device=OPENCL)
    assert not torch.equal(torch.randn(5, device=OPENCL), first)
    torch.opencl.set_rng_state(state)
    assert torch.equal(torch.randn(5, device=OPENCL), first)
    own = torch.Generator(OPENCL).manual_seed(5)
    found = torch.randn(5, device=OPENCL, generator=own).cpu()
    assert torch.equal(found, torch.randn(5, generator=torch.Generator().manual_seed(5)))


@works('`torch.random.fork_rng(device_type="opencl")`')
def test_forked_random_numbers() -> None:
    state = torch.opencl.get_rng_state()
    with torch.random.fork_rng(device_type=OPENCL):
        torch.randn(5, device=OPENCL)
        assert not torch.equal(torch.opencl.get_rng_state(), state)
    assert torch.equal(torch.opencl.get_rng_state(), state)


@works('`torch.Stream("opencl")`, `torch.Event`, and the time between two')
def test_streams() -> None:
    stream = torch.Stream(OPENCL)
    x = given().to(OPENCL)
    start, end = (torch.Event(OPENCL, enable_timing=True) for _ in range(2))
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        assert torch.accelerator.current_stream() == stream
        start.record()
        y = x + 1
        end.record()
    torch.accelerator.current_stream().wait_event(end)
    assert torch.equal(y.cpu(), given() + 1)
    end.synchronize()
    assert end.query()
    assert start.elapsed_time(end) >= 0
    stream.synchronize()
    assert stream.query()


def test_a_stream_that_was_waited_for_is_idle_without_a_marker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However busy the machine is: nothing that the driver does is waited for. Work of any kind
    ends that, and so does a handle that was given away, on which others may queue work."""
    asked = []
    record = runtime.Runtime.record
    monkeypatch.setattr(
        runtime.Runtime, "record", lambda *given: (asked.append(given), record(*given))[1]
    )
    stream, x, mark = torch.Stream(OPENCL), given().to(OPENCL), torch.Event(OPENCL)
    mark.record()
    for work in (
        lambda: x + 1,
        lambda: x.clone(),
        lambda: torch.zeros_like(x),
        lambda: stream.wait_event(mark),
    ):
        asked.clear()
        with stream:
            work()
        stream.query()
        assert len(asked) == 1
        stream.synchronize()
        assert stream.query()
        assert len(asked) == 1
    assert stream.native_handle
    stream.query()
    assert len(asked) == 2


@works("`record_stream`")
def test_record_stream() -> None:
    stream = torch.Stream(OPENCL)
    x = torch.ones(1000, device=OPENCL)
    before = torch.accelerator.memory_allocated()
    with stream:
        y = x + 1
    x.record_stream(stream)
    del x
    assert torch.accelerator.memory_allocated() <= before + 4096
    stream.synchronize()
    assert y.sum().item() == 2000
    del y


@works("`pin_memory()`, `torch.empty(..., pin_memory=True)`")
def test_pinned_memory() -> None:
    x = given()
    pinned = x.pin_memory()
    assert (pinned.is_pinned(), x.is_pinned()) == (True, False)
    assert torch.equal(pinned, x)
    assert torch.empty(3, pin_memory=True).is_pinned()


@works(
    "statistics: `torch.accelerator.memory_stats()` and its kin, `torch.opencl.memory_allocated()`"
)
def test_statistics() -> None:
    held = [torch.ones(n, device=OPENCL) for n in (10, 1000, 500_000)]
    pool = torch.opencl.pool().memory_stats()
    ours = torch.opencl.memory_stats()
    assert {key: ours[key] for key in pool} == pool
    assert set(ours) - set(pool) == {"invalid_frees"}
    del pool["num_oom_rejections"]  # torch.accelerator has no place for it
    assert dict(torch.accelerator.memory_stats()) == pool
    assert torch.accelerator.memory_allocated() == pool["allocated_bytes.all.current"]
    assert torch.accelerator.memory_reserved() == pool["reserved_bytes.all.current"]
    del held
    torch.accelerator.reset_peak_memory_stats()
    now = torch.accelerator.memory_allocated()
    assert torch.accelerator.max_memory_allocated() == torch.opencl.max_memory_allocated() == now
    torch.accelerator.reset_accumulated_memory_stats()
    assert torch.opencl.memory_stats()["allocation.all.allocated"] == 0
    assert "memory" in torch.opencl.memory_summary().lower()


@works("snapshots and histories for PyTorch's viewer: `torch.opencl._dump_snapshot()`")
def test_snapshots(tmp_path: Path) -> None:
    torch.opencl._record_memory_history()
    try:
        held = torch.ones(1000, device=OPENCL)
        del held
        found = torch.opencl._snapshot()
        torch.opencl._dump_snapshot(tmp_path / "snapshot.pickle")
    finally:
        torch.opencl._record_memory_history(None)
    with open(tmp_path / "snapshot.pickle", "rb") as file:
        read = pickle.load(file)
    actions = [entry["action"] for entry in read["device_traces"][0]]
    assert actions == [*actions[:-4], "alloc", "free_requested", "free_completed", "snapshot"]
    assert len(read["segments"]) == len(found["segments"]) > 0


@works("`torch.OutOfMemoryError` with bfc's text, and success after `empty_cache`")
def test_out_of_memory() -> None:
    gc.collect()
    torch.accelerator.empty_cache()
    part = 700 << 20
    held = torch.ones(10, device=OPENCL), torch.empty(part, dtype=torch.uint8, device=OPENCL)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(part, dtype=torch.uint8, device=OPENCL)
    said = str(caught.value)
    assert said.startswith("out of memory: asked for 700.00 MiB")
    assert "fragmentation" in said
    assert "limit of 1.00 GiB" in said
    del held, caught
    torch.accelerator.empty_cache()
    assert torch.empty(part, dtype=torch.uint8, device=OPENCL).nbytes == part
    torch.accelerator.empty_cache()


@works("`DataLoader(pin_memory=True)`, also with workers")
@pytest.mark.filterwarnings("ignore")
def test_data_loader() -> None:
    from torch.utils.data import DataLoader, TensorDataset

    x = given(8, 2)
    for workers in (0, 1):
        batches = list(DataLoader(TensorDataset(x), 4, pin_memory=True, num_workers=workers))
        assert all(batch.is_pinned() for (batch,) in batches)
        there = [batch.to(OPENCL, non_blocking=True) for (batch,) in batches]
        assert torch.equal(torch.cat(there).cpu(), x)


@works("`nn.Module.to`, `state_dict`, and an optimiser's")
def test_modules() -> None:
    model = nn.Linear(4, 2).to(OPENCL)
    optimizer = torch.optim.Adam(model.parameters())
    model(given().to(OPENCL)).sum().backward()
    optimizer.step()
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    kept, steps = torch.load(file, map_location="cpu")
    twin = nn.Linear(4, 2)
    twin.load_state_dict(kept)
    assert torch.equal(twin.weight, model.weight.cpu())
    other = torch.optim.Adam(model.parameters())
    other.load_state_dict(steps)
    assert other.state_dict()["state"][0]["exp_avg"].device.type == OPENCL
    assert {each.device.type for each in model.to("cpu").parameters()} == {"cpu"}
    assert model.half().to(OPENCL)(given().half().to(OPENCL)).dtype == torch.float16


@works('`torch.amp.GradScaler("opencl")`')
def test_grad_scaler() -> None:
    model = nn.Linear(4, 2).to(OPENCL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(OPENCL, init_scale=4.0)
    before = model.weight.detach().cpu()
    scaler.scale(model(given().to(OPENCL)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    moved = before - 0.1 * given().sum(0).expand(2, 4)
    torch.testing.assert_close(model.weight.detach().cpu(), moved)


@works('`torch.compile(backend="eager")` and `"aot_eager"`, `torch.fx`, `torch.export`')
@pytest.mark.filterwarnings("ignore")
def test_graphs_of_python() -> None:
    model = nn.Linear(4, 2).to(OPENCL)
    x = given().to(OPENCL)
    expected = model(x)
    for backend in ("eager", "aot_eager"):
        assert torch.equal(torch.compile(model, backend=backend)(x), expected)
    assert torch.equal(torch.fx.symbolic_trace(model)(x), expected)
    assert torch.equal(torch.export.export(model, (x,)).module()(x), expected)
    torch.compiler.reset()


@works("several devices: `opencl:0`, `opencl:1`, ...")
def test_several_devices() -> None:
    own_interpreter.run("""
        os.environ["POCL_DEVICES"] = "basic pthread"
        sys.path.insert(0, "tests/helpers")
        import pocl
        pocl.start()
        import torch
        from bfc.integrations import torch_opencl
        torch_opencl.enable("1 GiB")
        assert torch.opencl.device_count() == torch.accelerator.device_count() >= 2
        first = torch.arange(6.0, device="opencl:0")
        second = first.to("opencl:1")
        assert second.device == torch.device("opencl:1")
        assert (second + second).tolist() == [0, 2, 4, 6, 8, 10]
        assert torch.empty_like(first).copy_(second).equal(first)
        assert torch.opencl.memory_allocated(1) == torch.opencl.memory_allocated(0) == 512
        for mixed in (lambda: first + second, lambda: torch.cat([first, second])):
            try:
                mixed()
            except RuntimeError as error:
                assert "opencl:0" in str(error) and "opencl:1" in str(error), error
            else:
                raise AssertionError("it took tensors of two devices")
        with torch.opencl.device(1):
            assert torch.ones(1, device="opencl").device.index == 1
            with torch.Stream("opencl:1") as stream:
                assert torch.opencl.current_stream(1) == stream
                assert (torch.ones(2, device="opencl") + 1).tolist() == [2, 2]
        assert torch.opencl.current_device() == 0
        event = torch.Event("opencl:1")
        event.record(torch.opencl.current_stream(1))
        event.wait(torch.opencl.current_stream(0))
        event.synchronize()
    """)


@works("`torch_opencl.fallbacks()`")
def test_fallbacks() -> None:
    before = torch_opencl.fallbacks()
    torch.softmax(torch.ones(2, 2, device=OPENCL), 1)
    added = {k: n - before.get(k, 0) for k, n in torch_opencl.fallbacks().items()}
    assert {name: n for name, n in added.items() if n} == {"aten::_softmax.out": 1}


# -- what does not ---------------------------------------------------------------------------------


@does_not_work("tensors of two devices in one operator")
@pytest.mark.parametrize(
    "mixed",
    [
        lambda here, there: here + there,
        lambda here, there: there.mul_(here),
        lambda here, there: torch.add(there, there, out=here),
        lambda here, there: here @ there.t(),
        lambda here, there: torch.cat([here, there]),
        lambda here, there: torch.where(there > 0, here, here),
        lambda here, there: torch.equal(here, there),
        lambda here, there: functional.linear(there, here),
        lambda here, there: functional.conv1d(there[None], here[:, :3, None]),
        lambda here, there: functional.conv1d(there[None], there[:, :3, None], here[:, 0]),
        lambda here, there: functional.embedding(here.abs().long(), there),
        lambda here, there: there.index_select(0, torch.tensor([0])),
        lambda here, there: there.gather(0, here.abs().long()),
        lambda here, there: there.index_put_((torch.tensor([0]),), here[0]),
        lambda here, there: torch._foreach_add([there], [here]),
        lambda here, there: nn.LSTM(4, 2).to(OPENCL)(here[None]),
        lambda here, there: here[torch.tensor([0], device=OPENCL)],
    ],
)
def test_mixed_devices(mixed: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
    with pytest.raises(RuntimeError, match=r"devices?\b|opencl.* and .*cpu|cpu and on opencl"):
        mixed(given(), given().to(OPENCL))
    assert (torch.ones(2, device=OPENCL) + torch.tensor(2.0)).tolist() == [3, 3], "a number goes"


@does_not_work("a generator of opencl for tensors of the host, and one of the host for opencl")
def test_generators_of_others() -> None:
    with pytest.raises(RuntimeError, match="has a generator of opencl:0 and tensors on cpu"):
        torch.randn(3, generator=torch.Generator(OPENCL))
    for draw in (torch.randn, torch.rand, torch.randperm):
        with pytest.raises(RuntimeError, match="generator of cpu and tensors on opencl:0"):
            draw(3, device=OPENCL, generator=torch.Generator())


def test_a_convolutions_backward_looks_at_devices_as_its_forward_does() -> None:
    here, there = given(1, 2, 8), given(1, 2, 8).to(OPENCL)
    weight = given(2, 2, 3).to(OPENCL)
    gradient = given(1, 2, 6).to(OPENCL)
    backward = torch.ops.aten.convolution_backward_overrideable
    rest = [1], [0], [1], False, [0], 1, [True, True, True]
    assert [found.device.type for found in backward(gradient, there, weight, *rest)] == [OPENCL] * 3
    with pytest.raises(RuntimeError, match="has tensors on opencl:0 and on cpu"):
        backward(gradient, here, weight, *rest)


@does_not_work("`numpy()`, `np.asarray`")
def test_numpy() -> None:
    with pytest.raises(TypeError, match=r"Use Tensor.cpu\(\) to copy the tensor to host memory"):
        given().to(OPENCL).numpy()


@does_not_work("DLPack: `torch.from_dlpack`, `__dlpack__`")
def test_dlpack() -> None:
    with pytest.raises(ValueError, match="Unknown device type opencl for Dlpack"):
        torch.from_dlpack(given().to(OPENCL))
    with pytest.raises(BufferError, match=r"on opencl:0 has no address .*\.cpu\(\)"):
        given().to(OPENCL).__dlpack__()
    assert torch.equal(torch.from_dlpack(given()), given()), "those of the host go"


@does_not_work("`torch.compile` with its own back end, Inductor")
@pytest.mark.filterwarnings("ignore")
def test_inductor() -> None:
    from torch._inductor.exc import InductorError

    with pytest.raises(InductorError, match="opencl"):
        torch.compile(lambda a: a + 1)(given().to(OPENCL))
    torch.compiler.reset()


@does_not_work('`torch.autocast("opencl")`')
def test_autocast() -> None:
    layer = nn.Linear(4, 2).to(OPENCL)
    x = given().to(OPENCL)
    with (
        torch.autocast(OPENCL, dtype=torch.bfloat16),
        pytest.raises(NotImplementedError, match="'Autocastopencl' backend"),
    ):
        layer(x)


@does_not_work("sparse tensors")
def test_sparse() -> None:
    with pytest.raises(NotImplementedError, match="'Sparseopencl' backend"):
        given().to(OPENCL).to_sparse()


@does_not_work("quantised tensors")
def test_quantised() -> None:
    with pytest.raises(NotImplementedError, match="'Quantizedopencl' backend"):
        torch.quantize_per_tensor(given().to(OPENCL), 0.1, 0, torch.qint8)


@does_not_work("`torch.nested`, but for `layout=torch.jagged`")
@pytest.mark.filterwarnings("ignore")
def test_nested() -> None:
    x = given().to(OPENCL)
    jagged = torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged, device=OPENCL)
    assert jagged.values().shape == (5, 4)
    with pytest.raises(NotImplementedError, match="'NestedTensoropencl' backend"):
        str(torch.nested.nested_tensor([x, x[:2]], device=OPENCL))


@does_not_work("pinned memory of a tensor on opencl")
def test_pinned_device_memory() -> None:
    with pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
        given().to(OPENCL).pin_memory()
    with pytest.raises(RuntimeError, match="only memory of the host can be pinned"):
        torch.empty(3, device=OPENCL, pin_memory=True)


@does_not_work("tensors sent to other processes through `torch.multiprocessing`")
def test_other_processes() -> None:
    from multiprocessing.reduction import ForkingPickler

    with pytest.raises(RuntimeError, match="_share_fd_: only available on CPU"):
        ForkingPickler.dumps(given().to(OPENCL))


@does_not_work("`nn.DataParallel`")
def test_data_parallel() -> None:
    with pytest.raises(AttributeError, match="has no attribute '_scatter'"):
        nn.DataParallel(nn.Linear(4, 2).to(OPENCL))(given().to(OPENCL))


@does_not_work("graphs: `torch.accelerator.Graph()`")
def test_device_graphs() -> None:
    with pytest.raises(RuntimeError, match="Graph is not supported on device type: opencl"):
        torch.accelerator.Graph()


@does_not_work("PyTorch's profiler's view of memory")
def test_profiler() -> None:
    with torch.profiler.profile(profile_memory=True) as profile:
        torch.ones(1000, device=OPENCL)
    events = profile.key_averages()
    assert "aten::empty" in {event.key for event in events}
    assert {event.self_device_memory_usage for event in events} == {0}
