"""What fewer programs do, as on a GPU: each by what it costs in memory, or by what was refused."""

from __future__ import annotations

import copy
import io
import os
import pickle
import sys
import types
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import bfc
from bfc.pytorch.extension import torch_version
from bfc_tools.predicting.releases import release_of

MIB = 1 << 20


def allocated() -> int:
    return torch.cuda.memory_allocated()


def assumed(run: Any) -> dict[str, Any]:
    return {one["what"]: one["value"] for one in run.assumptions}


@pytest.fixture
def group() -> Any:
    """Rank 0 of two."""

    def begin() -> None:
        torch.distributed.init_process_group("nccl", rank=0, world_size=2)

    yield begin
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


# -- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("location", "taken"), [("cuda", 3 * MIB + 512), ("cpu", 0), (None, 3 * MIB), ({}, 3 * MIB)]
)
def test_what_was_saved_is_loaded_again(tmp_path: Path, location: Any, taken: int) -> None:
    """Weights and two states of each, once more, and with them the number of steps."""
    path = tmp_path / "model.pt"
    with bfc.predict("a100"):
        layer = nn.Linear(512, 512, bias=False).cuda()
        optimizer = torch.optim.Adam(layer.parameters())
        layer(torch.randn(1, 512, device="cuda")).sum().backward()
        optimizer.step()
        held = {"model": layer.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
        torch.save(held, path)
        before = allocated()
        loaded = torch.load(path, map_location=location)
        assert allocated() - before == taken
        layer.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        assert loaded["epoch"] == 3
    assert not path.exists()


def test_what_was_saved_holds_no_memory() -> None:
    file = io.BytesIO()
    with bfc.predict("a100"):
        layer = nn.Linear(512, 512).cuda()
        torch.save(layer.state_dict(), file)
        del layer
        assert allocated() == 0
        file.seek(0)
        assert list(torch.load(file)) == ["weight", "bias"]


@pytest.mark.parametrize(
    ("location", "device"),
    [
        (lambda storage, place: storage, "cpu"),
        (lambda storage, place: storage.cuda(0), "cuda"),
        (lambda storage, place: None, "cuda"),
        (lambda storage, place: storage.cuda() if place == "cuda:0" else storage, "cuda"),
        (torch.serialization.default_restore_location, "cuda"),
    ],
)
def test_a_function_says_where_tensors_are_loaded(location: Any, device: str) -> None:
    with bfc.predict("a100"):
        torch.save(torch.ones(4, device="cuda"), "model.pt")
        assert torch.load("model.pt", map_location=location).device.type == device


def test_what_was_saved_into_an_open_file_is_found_by_its_name(tmp_path: Path) -> None:
    """And renamed and removed, as programs do that write a checkpoint at once."""
    new, path = tmp_path / "new.pt", tmp_path / "model.pt"
    path.write_bytes(b"of an earlier run")
    with bfc.predict("a100"):
        with open(new, "wb") as file:
            torch.save({"w": torch.ones(4, device="cuda")}, file)
        os.replace(new, path)
        assert torch.load(path)["w"].is_cuda
        with open(path, "rb") as file:
            assert torch.load(file)["w"].is_cuda
        torch.save(None, new)
        assert torch.load(new) is None
        new.unlink()
        with pytest.raises(FileNotFoundError):
            torch.load(new)
        with pytest.raises(EOFError):
            torch.load(io.BytesIO())
        with pytest.raises(RuntimeError, match=r"Parent directory .*none does not exist"):
            torch.save({}, tmp_path / "none/model.pt")
    assert path.read_bytes() == b"of an earlier run"
    assert not new.exists()


def test_what_was_saved_shares_memory_as_before() -> None:
    """And holds none: a whole module, or a named tuple, once came back as the same object."""
    with bfc.predict("a100"):
        layer = nn.Linear(512, 512, bias=False).cuda()
        row = nn.Parameter(torch.ones(1 << 18, device="cuda"))
        torch.save({"layer": layer, "twice": (row, row), "view": row.detach()[:2]}, "all.pt")
        torch.save(torch.get_rng_state(), "state.pt")
        torch.set_rng_state(torch.load("state.pt"))
        before = allocated()
        loaded = torch.load("all.pt", weights_only=False)
        assert allocated() - before == 2 * MIB
        assert loaded["twice"][0] is loaded["twice"][1]
        assert isinstance(loaded["layer"].weight, nn.Parameter)
        loaded["layer"].weight.sum().backward()
        assert loaded["layer"].weight.grad.is_cuda
        assert layer.weight.grad is None
        del layer, row, loaded
        assert allocated() == 0


@pytest.mark.filterwarnings("ignore:.torch.jit.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.*:FutureWarning")
def test_a_script_module_is_saved_over_the_files(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with bfc.predict("a100"):
        torch.jit.script(nn.Linear(2, 2).cuda()).save("module.pt")
        torch.jit.save(
            torch.jit.trace(nn.Linear(2, 2), torch.ones(2), check_trace=False), "traced.pt"
        )
        assert Path("module.pt").exists()
        assert Path("traced.pt").exists()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:.torch.jit.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.*:FutureWarning")
def test_a_script_module_is_loaded_where_it_is_to_be(tmp_path: Path) -> None:
    path = tmp_path / "module.pt"
    torch.jit.save(torch.jit.script(nn.Linear(512, 512, bias=False)), path)
    with bfc.predict("a100") as run:
        torch.jit.load(path)
        assert allocated() == 0
        layer = torch.jit.load(path, map_location="cuda")
        assert allocated() == MIB
        layer(torch.randn(2, 512, device="cuda")).sum().backward()
        assert layer.weight.grad.is_cuda
    assert list(assumed(run).values()) == ["cpu"]


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_a_distributed_checkpoint_is_saved_and_loaded(tmp_path: Path, monkeypatch) -> None:
    """At once where it would be in the background, which copies what fake tensors are made of."""
    monkeypatch.chdir(tmp_path)
    with bfc.predict("a100"):
        from torch.distributed import checkpoint

        layer = nn.Linear(512, 512, bias=False).cuda()
        state = {"model": layer.state_dict()}
        checkpoint.save(state, checkpoint_id="first")
        checkpoint.load(state, checkpoint_id="first")
        checkpoint.async_save(state, checkpoint_id="second").result()
        assert sorted(os.listdir("second")) == sorted(os.listdir("first"))
        checkpoint.load(state, checkpoint_id="second")
        assert state["model"]["weight"].is_cuda
        assert allocated() == MIB
    assert list(tmp_path.iterdir()) == []
    assert checkpoint.async_save.__module__.startswith("torch.distributed")


def test_files_that_others_wrote_are_read(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save(nn.Linear(512, 512, bias=False).state_dict(), path)
    with bfc.predict("a100"):
        assert torch.load(path, map_location="cuda")["weight"].is_cuda
        layer = nn.Linear(512, 512, bias=False).cuda()
        layer.load_state_dict(torch.load(path, map_location="cpu"))


def test_files_of_safetensors_too(tmp_path: Path) -> None:
    with bfc.predict("a100"):
        from safetensors import safe_open
        from safetensors.torch import _is_complete, load, load_file, save, save_file, save_model

        assert _is_complete(torch.ones(8, device="cuda"))  # which accelerate asks, too
        assert not _is_complete(torch.ones(8, device="cuda")[:4])

        save_file(
            {"a": torch.ones(512, 512, device="cuda")}, tmp_path / "a.safetensors", {"format": "pt"}
        )
        assert load_file(tmp_path / "a.safetensors")["a"].device.type == "cpu"
        assert load_file(tmp_path / "a.safetensors", device="cuda")["a"].is_cuda
        before = allocated()
        with safe_open(tmp_path / "a.safetensors", framework="pt", device="cuda") as file:
            assert (list(file.keys()), file.metadata()) == (["a"], {"format": "pt"})
            assert file.get_slice("a").get_shape() == [512, 512]
            assert allocated() == before
            assert file.get_tensor("a").is_cuda
            assert file.get_slice("a")[:2].shape == (2, 512)
        assert load(save({"b": torch.ones(3)}))["b"].shape == (3,)
        layer = nn.Linear(2, 2)
        layer.twice = layer.weight
        save_model(layer, "model.safetensors")
        assert sorted(load_file("model.safetensors")) == ["bias", "twice"]
        with pytest.raises(FileNotFoundError):
            load_file(tmp_path / "b.safetensors")


def test_tensors_are_pickled_as_shapes() -> None:
    with bfc.predict("a100"):
        layer = nn.Linear(512, 512, bias=False).cuda()
        before = allocated()
        twin = pickle.loads(pickle.dumps(layer))
        assert isinstance(twin.weight, nn.Parameter)
        assert allocated() - before == MIB


def test_data_of_another_device_takes_its_place() -> None:
    """So programs swap layers out. The device of a fake tensor once stayed as it was."""
    with bfc.predict("a100"):
        layer = nn.Linear(512, 512, bias=False).cuda()
        layer.weight.data = layer.weight.data.cpu()
        assert allocated() == 0
        assert layer.weight.device.type == "cpu"
        layer.weight.data = layer.weight.data.to("cuda")
        assert allocated() == MIB


# -- what a program asks of torch.cuda ---------------------------------------------------------


def test_a_kernel_of_the_programs_own_source_is_not_run() -> None:
    with bfc.predict("a100") as run:
        kernel = torch.cuda._compile_kernel("not CUDA", "add_tensors")
        filled = torch.ones(8, device="cuda")
        kernel(grid=(1, 1, 1), block=(8, 1, 1), args=[filled, 8])
        kernel.set_shared_memory_config(1 << 16)
        assert allocated() == 512
        assert filled.sum().item() == 1.0  # made up: the kernel may have written anything
    assert assumed(run)["the CUDA kernel add_tensors"] == "not run; it allocates nothing"


def test_who_has_allocated_what_is_live() -> None:
    with bfc.predict("a100"):
        memory = torch.cuda.memory
        first = torch.ones(8, device="cuda")
        assert memory._allocation_traceback(first.untyped_storage().data_ptr()) is None
        memory._record_memory_history()
        second = torch.ones(8, device="cuda")
        found = memory._allocation_traceback(second.untyped_storage().data_ptr())
        assert any(frame["filename"] == __file__ for frame in found)
        assert memory._allocation_traceback(1) is None
        memory._set_memory_metadata("epoch 1")
        assert memory._get_memory_metadata() == "epoch 1"
        with memory.caching_allocator_disabled():
            assert memory.host_memory_stats() == {}
        assert torch.cuda.get_stream_from_external(7).cuda_stream == 7


# -- several processes ---------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*all_gather_into_tensor. is deprecated:FutureWarning")
@pytest.mark.parametrize("size", [1, 2])
def test_what_a_process_sends_it_has_still(size: int) -> None:
    distributed = torch.distributed
    with bfc.predict("a100"):
        distributed.init_process_group("nccl", rank=0, world_size=size)
        try:
            number, other = torch.tensor([5], device="cuda"), torch.tensor([5], device="cuda")
            distributed.broadcast(number, src=0)
            assert (number.item(), number.cpu().numpy().tolist()) == (5, [5])
            distributed.all_reduce(other)
            assert other.item() == (5 if size == 1 else 1)  # made up
            gathered = torch.zeros(size, dtype=torch.int64, device="cuda")
            distributed.all_gather_into_tensor(gathered, number)
            if size == 1:
                assert gathered.item() == 5
            else:
                distributed.broadcast(number, src=1)
                assert number.item() == 1
        finally:
            distributed.destroy_process_group()


# -- older names ---------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:torch.set_default_tensor_type:UserWarning")
def test_types_of_the_device_make_tensors_there() -> None:
    with bfc.predict("a100"):
        kind = torch.cuda.FloatTensor
        assert kind(256, 1024).fill_(1.0).shape == (256, 1024)
        made = torch.randn(3).type(kind)
        assert isinstance(made, kind)
        assert made.type() == "torch.cuda.FloatTensor"
        assert torch.cuda.LongTensor([1, 2]).dtype == torch.int64
        assert kind(np.int64(3), np.int64(4)).shape == (3, 4)
        assert torch.randn(2).type("torch.cuda.HalfTensor").is_cuda
        assert not isinstance(torch.randn(2), kind)
        torch.set_default_tensor_type(torch.cuda.FloatTensor)
        for made in (torch.Tensor([1e10]), torch.Tensor(3, 4), torch.Tensor(torch.ones(2).cuda())):
            assert made.is_cuda
        assert isinstance(nn.Parameter(torch.Tensor(3)), nn.Parameter)
        assert torch.randn(2).is_cuda
        torch.set_default_tensor_type(torch.FloatTensor)
        assert not torch.Tensor([1e10]).is_cuda
        assert not torch.randn(2).is_cuda


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_questions_to_the_device_are_answered() -> None:
    with bfc.predict("a100"):
        stream, event = torch.Stream(device="cuda"), torch.Event(device="cuda")
        stream.record_event(event)
        torch.backends.cuda.cufft_plan_cache[0].max_size = 8
        torch.backends.cuda.cufft_plan_cache.clear()
        torch.backends.cuda.preferred_linalg_library("cusolver")
        assert torch.cuda.nccl.version() >= (2, 0)
        assert torch.cuda.get_sync_debug_mode() == 0
        torch.compiler.cudagraph_mark_step_begin()
        with torch.autograd.profiler.emit_nvtx(), torch.profiler.profile() as seen:
            torch.ones(2, device="cuda")
        print(seen.key_averages().table()[:80], len(seen.key_averages()))


# -- attention -----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")
def test_flex_attention_counts_as_its_compiled_kernel() -> None:
    """The output, one or two numbers of each row in 32 bits, and no scores."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    with bfc.predict("a100") as run:
        query = torch.randn(2, 4, 1024, 64, device="cuda", requires_grad=True)
        mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 1024, 1024, device="cuda")
        torch.cuda.reset_peak_memory_stats()
        before = allocated()
        found = torch.compile(flex_attention)(query, query, query, block_mask=mask)
        rows = 2 * 4 * 1024
        assert rows * 64 * 4 + rows * 4 <= allocated() - before < rows * 64 * 4 + 3 * rows * 4
        found.sum().backward()
        assert query.grad is not None
        assert torch.cuda.max_memory_allocated() - before < rows * 1024 * 4
    assert any(what.startswith("flex_attention") for what in assumed(run))


def test_nested_tensors_in_rows_work() -> None:
    with bfc.predict("a100"):
        rows = [torch.randn(length, 64, device="cuda") for length in (100, 156)]
        layer = nn.Linear(64, 64).cuda()
        before = allocated()
        nested = torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)
        assert allocated() - before >= 256 * 64 * 4
        layer(nested * 2).values().sum().backward()
        assert nested.grad is not None
        with pytest.raises(NotImplementedError, match="prediction cannot run it"):
            torch.nested.nested_tensor(rows)


@pytest.mark.parametrize(("release", "holds_scores"), [("2.13", True), ("2.14", False)])
def test_groups_of_heads_in_32_bits(release: str, holds_scores: bool) -> None:
    """Before 2.14 the efficient kernel knows no groups: it was once taken, and its gradient did not
    fit. Since then it does, and PyTorch 2.15 says itself that it takes it."""
    with bfc.predict("a100", as_torch=release) as run:
        query = torch.randn(2, 4, 256, 64, device="cuda", requires_grad=True)
        key = torch.randn(2, 2, 256, 64, device="cuda", requires_grad=True)
        found = functional.scaled_dot_product_attention(query, key, key, enable_gqa=True)
        found.sum().backward()
        assert key.grad is not None
        assert key.grad.shape == key.shape
    assert (2 * 4 * 256 * 256 * 4 in run.trace.size.tolist()) is holds_scores


def test_products_of_groups_have_rows_of_whole_16_bytes() -> None:
    with bfc.predict("h100"):
        rows, experts = torch.randn(64, 32, device="cuda"), torch.randn(4, 32, 30, device="cuda")
        ends = torch.zeros(4, dtype=torch.int32, device="cuda")
        found = torch._grouped_mm(rows, experts, offs=ends)
        assert (found.shape, found.stride()) == ((64, 30), (32, 1))


# -- losses, waves, matrices, quantized numbers --------------------------------------------------


@pytest.mark.parametrize("place", ["cuda", "cpu", None])
def test_ctc_loss_keeps_all_prefixes(place: str | None) -> None:
    steps, batch, longest = 50, 4, 20
    with bfc.predict("a100") as run:
        scores = torch.randn(steps, batch, 30, device="cuda", requires_grad=True).log_softmax(2)
        targets = torch.ones(batch, longest, dtype=torch.int64, device="cuda")
        lengths: Any = [(steps,) * batch, (longest,) * batch]
        if place is not None:
            lengths = [torch.tensor(one, device=place) for one in lengths]
        functional.ctc_loss(scores, targets, *lengths).backward()
    sizes = run.trace.size[run.trace.op == 0].tolist()
    assert sizes.count(batch * steps * (2 * longest + 1) * 4) == 2  # prefixes, and suffixes
    assert any("lengths of targets" in what for what in assumed(run))


@pytest.mark.parametrize("place", ["cuda", "cpu"])
def test_the_gradient_of_ctc_loss_sums_up_what_is_blank(place: str) -> None:
    """Of long inputs, as on an H100 with PyTorch 2.11. Targets on the host are copied."""
    with bfc.predict("h100") as run:
        scores = torch.randn(256, 4, 32, device="cuda", requires_grad=True)
        targets = torch.ones(4, 128, dtype=torch.int64, device=place)
        lengths = [torch.full((4,), one) for one in (256, 128)]
        functional.ctc_loss(scores, targets, *lengths).backward()
    sizes = run.trace.size[run.trace.op == 0].tolist()
    copied = [32, 32, 32]
    assert sizes[2:] == [
        *(*copied, 1_052_672, 16, 16, 16, 16, 4, 4, 16, 16),
        *(*copied, 1_052_672, 131_072, 528_384, 4096, 4096, 1024, 528_384, 4096),
    ]


def test_ctc_loss_of_cudnn_wants_targets_and_lengths_alike() -> None:
    """In 32 bits they would go to cuDNN, which an H100 refuses: targets on the host."""
    with bfc.predict("h100"):
        scores = torch.randn(50, 4, 20, device="cuda")
        targets = torch.ones(40, dtype=torch.int32)
        lengths = [torch.full((4,), one, dtype=torch.int32) for one in (50, 10)]
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            functional.ctc_loss(scores, targets, *lengths)
        functional.ctc_loss(scores, targets, *lengths, blank=3, zero_infinity=True)
        functional.ctc_loss(scores[:, 0], targets[:10], *(one[0] for one in lengths))
        functional.ctc_loss(scores, targets, *lengths, blank=3, reduction="none")
        functional.ctc_loss(scores, targets, (50,) * 4, (10,) * 4, reduction="sum")


def test_ctc_loss_is_called_by_name() -> None:
    with bfc.predict("a100"):
        scores, targets = torch.randn(50, 4, 20), torch.ones(4, 10, dtype=torch.int64)
        lengths = {"input_lengths": (50,) * 4, "target_lengths": (10,) * 4}
        assert torch.ctc_loss(log_probs=scores, targets=targets, **lengths).shape == ()


def test_waves_are_put_together_again() -> None:
    with bfc.predict("a100"):
        window = torch.hann_window(256, device="cuda")
        wave = torch.randn(2, 4096, device="cuda", requires_grad=True)
        frames = torch.stft(wave, 256, 64, window=window, return_complex=True)
        again = torch.istft(frames, 256, 64, window=window, length=4096)
        assert again.shape == wave.shape
        again.sum().backward()
        assert torch.istft(frames[0], 256, 64, window=window).shape == (4096,)
        whole = torch.stft(wave, 256, window=window, onesided=False, return_complex=True)
        given = {"window": window, "onesided": False, "return_complex": True}
        assert torch.istft(whole, 256, **given).dtype == torch.complex64


def test_least_squares() -> None:
    with bfc.predict("a100") as run:
        matrix, right = torch.randn(3, 16, 8, device="cuda"), torch.randn(3, 16, 2, device="cuda")
        found = torch.linalg.lstsq(matrix, right)
        assert (found.solution.shape, found.residuals.shape) == ((3, 8, 2), (3, 2))
        assert torch.linalg.lstsq(matrix, right[..., 0]).solution.shape == (3, 8)
        assert torch.linalg.lstsq(matrix[:1], right).solution.shape == (3, 8, 2)
    assert "aten::linalg_lstsq" in run.unknown


def test_numbers_that_are_rounded_on_purpose_keep_a_mask() -> None:
    with bfc.predict("a100"):
        given = torch.randn(512, 512, device="cuda", requires_grad=True)
        before = allocated()
        found = torch.fake_quantize_per_tensor_affine(given, 0.1, 0, -128, 127)
        assert allocated() - before == 512 * 512 * (4 + 1)
        found.sum().backward()


# -- several processes ---------------------------------------------------------------------------


def test_batch_norm_over_processes(group: Any) -> None:
    with bfc.predict("a100"):
        group()
        layer = nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm2d(8)).cuda()
        images = torch.randn(2, 8, 16, 16, device="cuda", requires_grad=True)
        layer(images).sum().backward()
        assert images.grad is not None


@pytest.mark.parametrize("asks", ["find_unused_parameters", "static_graph"])
def test_parameters_that_may_be_unused(group: Any, asks: str) -> None:
    """DDP asks the device which ones are; the next step once failed."""
    with bfc.predict("a100"):
        group()
        layers = nn.ModuleDict({"used": nn.Linear(8, 8), "unused": nn.Linear(8, 8)}).cuda()
        layers.forward = lambda x: layers["used"](x)  # type: ignore[method-assign]
        model = nn.parallel.DistributedDataParallel(layers, **{asks: True})
        for _ in range(3):
            model(torch.randn(2, 8, device="cuda")).sum().backward()


def test_objects_are_sent_to_all(group: Any) -> None:
    with bfc.predict("a100"):
        group()
        found: list[Any] = [None, None]
        torch.distributed.all_gather_object(found, {"a": 1})
        assert found == [{"a": 1}] * 2
        told = ["b"]
        torch.distributed.broadcast_object_list(told)
        assert told == ["b"]


def test_what_others_have_sent_is_not_known(group: Any) -> None:
    """Their schemas do not say that they write: sizes that were gathered once stayed zero."""
    with bfc.predict("a100") as run:
        group()
        sizes = [torch.zeros(1, device="cuda") for _ in range(2)]
        torch.distributed.all_gather(sizes, torch.ones(1, device="cuda"))
        assert [size.item() for size in sizes] == [1.0, 1.0]
        kept = torch.zeros(2, device="cuda")
        torch.distributed.all_reduce(kept)
        assert kept.max().item() == 1.0
    assert assumed(run)[".item()"] == 1.0


@pytest.mark.filterwarnings("ignore:.*FSDP.*:FutureWarning")
def test_the_older_fsdp_moves_its_shards(group: Any) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    with bfc.predict("a100"):
        group()
        layers = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(2)))
        model = FullyShardedDataParallel(layers, device_id=0, use_orig_params=True)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(torch.randn(2, 512, device="cuda")).sum().backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        assert allocated() >= 3 * MIB  # half of two layers, and two states of each
        copy.copy(optimizer.state_dict())


def test_of_processes_that_are_spawned_the_first_runs_here(group: Any) -> None:
    ranks = []

    def main(rank: int, size: int) -> None:
        ranks.append(rank)
        torch.distributed.init_process_group("nccl", rank=rank, world_size=size)
        model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64).to(rank), device_ids=[rank])
        model(torch.ones(2, 64).to(rank)).sum().backward()

    with bfc.predict("a100") as run:
        torch.multiprocessing.spawn(main, args=(4,), nprocs=4)
        assert torch.multiprocessing.spawn(ranks.append, nprocs=2, join=False).join()
    assert ranks == [0, 0]
    assert run.peak_allocated > 4 * 64 * 64 * 2
    assert assumed(run)["4 processes: the first of them, in this one"] == "rank 0"


def test_transformers_finds_one_sequence_in_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = types.ModuleType("transformers.masking_utils")
    masks.find_packed_sequence_indices = lambda positions: positions
    monkeypatch.setitem(sys.modules, masks.__name__, masks)
    found = []

    def compiled(x: torch.Tensor) -> torch.Tensor:
        found.append(masks.find_packed_sequence_indices(7))
        return x * 2

    with bfc.predict("a100") as run:
        torch.compile(compiled, backend="aot_eager")(torch.ones(4, device="cuda"))
        assert set(found) == {7}, "it has a mask, since it cannot look"
        assert "rows of several sequences (transformers)" not in assumed(run)
        assert masks.find_packed_sequence_indices(7) is None
    assert masks.find_packed_sequence_indices(7) == 7
    assert assumed(run)["rows of several sequences (transformers)"] == "none"


def test_transformers_is_not_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would make a mask where a batch has no padding, for which attention has other kernels."""
    imports = types.ModuleType("transformers.utils.import_utils")
    imports.is_fake_tensor = lambda tensor: isinstance(tensor, FakeTensor)
    monkeypatch.setitem(sys.modules, imports.__name__, imports)
    with bfc.predict("a100"):
        tensor = torch.empty(1, device="cuda")
        assert not imports.is_fake_tensor(tensor)
    assert imports.is_fake_tensor(tensor)


def test_boxes_that_do_not_overlap_are_at_most_all() -> None:
    """torchvision's operator, here by its name alone: the bits of 1000 boxes with each other."""
    library = None
    if not hasattr(torch.ops.torchvision, "nms"):
        library = torch.library.Library("torchvision", "FRAGMENT")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    with bfc.predict("a100") as run:
        boxes, scores = torch.empty(1000, 4, device="cuda"), torch.empty(1000, device="cuda")
        before = allocated()
        kept = torch.ops.torchvision.nms(boxes, scores, 0.5)
        assert kept.shape == (1000,)
        assert allocated() - before == 8192  # nothing but the places of those kept
    births = [int(size) for op, size in zip(run.trace.op, run.trace.size, strict=True) if not op]
    assert births.count(1000 * 16 * 8) == 1
    assert "torchvision" not in str(run.not_counted)
    del library


# -- sparse tensors ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_sparse_gradient_takes_the_rows_that_were_read(kind: Any) -> None:
    """It once took nothing: fake tensors lose what a sparse one holds as they are copied."""
    with bfc.predict("a100"):
        table = kind(10_000, 256, sparse=True, device="cuda")
        optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
        words = torch.randint(0, 10_000, (8, 128), device="cuda")
        before = allocated()
        (table(words) ** 2).sum().backward()
        if kind is nn.Embedding:
            assert allocated() - before == MIB  # a row for each word, and its indices are the words
        assert allocated() - before >= MIB
        assert table.weight.grad._nnz() == 1024
        table(words).sum().backward()
        assert table.weight.grad._nnz() == 2048
        optimizer.step()
        optimizer.zero_grad()
        assert allocated() - before < MIB


def test_adam_for_sparse_gradients_keeps_dense_states() -> None:
    with bfc.predict("a100") as run:
        table = nn.Embedding(10_000, 256, sparse=True, device="cuda")
        optimizer = torch.optim.SparseAdam(table.parameters())
        for _ in range(2):
            table(torch.randint(0, 10_000, (8, 128), device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert allocated() >= 3 * 10_000 * 1024
    assert assumed(run)["a sparse tensor: indices that differ"] == 974  # of 1024, as expected


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_other_work_on_sparse_tensors_is_refused_in_words() -> None:
    with bfc.predict("a100"):
        places, values = torch.randint(0, 100, (2, 500)), torch.randn(500)
        matrix = torch.sparse_coo_tensor(places, values, (100, 100)).cuda()
        assert matrix._values().is_cuda
        with pytest.raises(NotImplementedError, match="Give the program dense ones"):
            torch.sparse.mm(matrix, matrix)
        own = torch.eye(3) + torch.eye(3, dtype=torch.int64).to_sparse()  # as of a graph's nodes
        assert (own.dtype, own.layout) == (torch.float32, torch.strided)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_a_dense_tensor_becomes_a_sparse_one() -> None:
    """Which numbers are zero is not known: none, unless they were set in zeros."""
    with bfc.predict("h100") as run:
        assert torch.ones((), device="cuda").to_sparse()._nnz() == 1
        dense = torch.randn(64, 32, device="cuda")
        before = allocated()
        matrix = dense.to_sparse()
        assert allocated() - before == 2 * 8 * 2048 + 4 * 2048
        assert matrix.is_coalesced()
        assert matrix.coalesce() is matrix
        assert (matrix @ torch.randn(32, 8, device="cuda")).shape == (64, 8)
        assert matrix.to_dense().shape == (64, 32)
        rows = dense.to_sparse(1)
        assert rows._indices().shape == (1, 64)
        assert rows._values().shape == (64, 32)
    assert assumed(run)["a mask, or nonzero: all elements"] == 2048
    births = run.trace.size[run.trace.op == 0].tolist()
    made = births.index(2 * 8 * 2048)  # their places, a copy, and the numbers there, twice
    following = [size for size in births[made:] if size in (8 * 4096, 4 * 2048)]
    assert following[:4] == [8 * 4096, 8 * 4096, 4 * 2048, 4 * 2048]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("operator", [torch.sparse.mm, torch.mm])
def test_a_sparse_matrix_times_a_dense_one(operator: Any) -> None:
    """As graph networks do it: within 23 bytes for cuSPARSE of 1,603,963 on an H100."""
    with bfc.predict("h100") as run:
        places = torch.empty(2, 999, dtype=torch.int64, device="cuda")
        matrix = torch.sparse_coo_tensor(places, torch.empty(999, device="cuda"), (1000, 1000))
        dense = torch.empty(1000, 64, device="cuda", requires_grad=True)
        found = operator(matrix, dense)
        found.backward(torch.empty_like(found))
        assert found.shape == dense.grad.shape == (1000, 64)
        assert matrix.to_dense().shape == (1000, 1000)
        assert matrix.coalesce().is_coalesced()
    births = run.trace.size[run.trace.op == 0].tolist()
    aligned = 256 * (release_of(torch_version(torch)).cccl >= 3)  # twice
    ordered = [7992, 7992, 7992, 16_895, 1279 + aligned, 3996, 15_984]
    result = [256_000, 256_000, *ordered, 4004, 3996, 3996, 256_000]
    assert births[3:] == [
        *(*result, 256_000),
        *(3996, 15_984, 7992, *result),
        *(4_000_000, 7992, *ordered),
    ]


def test_an_optimizer_that_reads_of_the_device_divides_by_what_is_not_zero(
    request: pytest.FixtureRequest,
) -> None:
    """NAdam keeps a product of its momenta where new tensors go."""
    with bfc.predict("a100"):
        torch.set_default_device("cuda")
        request.addfinalizer(lambda: torch.set_default_device(None))
        layer = nn.Linear(8, 8)
        optimizer = torch.optim.NAdam(layer.parameters())
        layer(torch.ones(2, 8)).sum().backward()
        optimizer.step()


def test_arrays_and_shared_memory_of_what_is_on_the_device() -> None:
    with bfc.predict("a100") as run:
        data = torch.randn(8, device="cuda")
        assert data.numpy(force=True).shape == (8,)
        assert data.share_memory_() is data
        with pytest.raises(TypeError, match=r"Tensor.cpu\(\)"):
            data.numpy()
    assert assumed(run) == {".numpy()": "zeros"}


class Image(torch.Tensor):
    """As torchvision's images: a class of its own, which results have, too."""

    @staticmethod
    def __new__(cls, data: Any) -> Any:
        return torch.Tensor._make_subclass(cls, data)


def test_tensors_of_other_classes_stay_so() -> None:
    with bfc.predict("a100"):
        for image in (Image(torch.ones(3, 8, 8)), torch.ones(3, 8, 8).as_subclass(Image)):
            moved = image.to("cuda") * 2
            assert isinstance(image, Image)
            assert isinstance(moved, Image)
            assert isinstance(moved.as_subclass(torch.Tensor), FakeTensor)
            assert moved.is_cuda
        layer = nn.Conv2d(3, 4, 3).cuda()
        layer(moved).sum().backward()
        assert type(layer.weight.grad) is FakeTensor
        assert isinstance(copy.deepcopy(image), torch.Tensor)
    assert torch.ones(2).as_subclass(Image).tolist() == [1, 1]
    assert type(Image(torch.ones(2))) is Image


class Quantized(torch.Tensor):
    """As torchao's weights: numbers of 8 bits and scales, and a table of the functions that it has
    versions of."""

    functions: ClassVar[dict[Any, Any]] = {}

    @staticmethod
    def __new__(cls, numbers: Any, scales: Any) -> Any:
        options = {"device": numbers.device, "dtype": scales.dtype}
        made = torch.Tensor._make_wrapper_subclass(cls, numbers.shape, **options)
        made.numbers, made.scales = numbers, scales
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers", "scales"], None

    @staticmethod
    def __tensor_unflatten__(parts: Any, context: None, size: Any, stride: Any) -> Any:
        return Quantized(**parts)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in cls.functions:
            return cls.functions[func](*args, **kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].numbers, args[0].scales)
        raise NotImplementedError(func)


def of_quantized(found: Any, weight: Any, bias: Any = None) -> Any:
    return (found @ weight.numbers.to(found.dtype).t()) * weight.scales + bias


@pytest.mark.parametrize("known", ["before", "meanwhile", "after another"])
def test_a_subclass_finds_its_own_version_of_a_function(
    known: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stands in for `linear` was no key of its table, and other operators were called."""
    functions: dict[Any, Any] = {}
    monkeypatch.setattr(Quantized, "functions", functions)
    if known == "before":
        functions[nn.functional.linear] = of_quantized
    if known == "after another":
        with bfc.predict("h100"):
            functions[nn.functional.linear] = of_quantized
    with bfc.predict("h100") as run:
        if known == "meanwhile":
            functions[nn.functional.linear] = of_quantized
        layer = nn.Linear(64, 32, device="cuda")
        numbers = torch.zeros(32, 64, dtype=torch.int8, device="cuda")
        weight = Quantized(numbers, torch.ones(32, device="cuda"))
        layer.weight = nn.Parameter(weight, requires_grad=False)
        assert layer(torch.randn(4, 64, device="cuda")).shape == (4, 32)
    assert functions.keys() == {nn.functional.linear}
    assert run.peak.by_kind["parameters"] == 32 * 64 + 32 * 4 + 32 * 4  # numbers, scales, the bias


def test_a_product_of_8_bits_in_32_is_computed_by_its_kernel() -> None:
    """As torchao calls it for weights and activations of 8 bits: an operator that takes another."""
    product = torch.ops.higher_order.out_dtype
    with bfc.predict("h100"):
        left = torch.zeros(64, 128, dtype=torch.int8, device="cuda")
        right = torch.zeros(32, 128, dtype=torch.int8, device="cuda").t()
        torch._int_mm(left, right)  # its workspace stays
        before = allocated()
        found = product(torch.ops.aten.mm.default, torch.int32, left, right)
        assert (found.shape, found.dtype, found.is_cuda) == ((64, 32), torch.int32, True)
        assert allocated() - before == 64 * 32 * 4
        assert product(torch.ops.aten.mm.default, torch.int32, left.half(), right.half()).is_cuda


REPLACED = [
    *((torch, name) for name in ("isfinite", "prod", "cumprod", "ctc_loss", "istft")),
    *((torch.Tensor, name) for name in ("isfinite", "prod", "cumprod")),
    (nn.functional, "one_hot"),
]


class Asked(torch.Tensor):
    """A tensor that has its own versions of functions in a table."""

    functions: ClassVar[dict[Any, Any]] = {}

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in cls.functions:
            return cls.functions[func]
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize(("holder", "name"), REPLACED, ids=lambda it: getattr(it, "__name__", it))
def test_each_function_that_is_replaced_counts_as_itself(
    holder: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a table that was filled before, and called as a function or a method: they once were other
    functions while a prediction ran, and a subclass saw the operators in them."""
    monkeypatch.setattr(Asked, "functions", {getattr(holder, name): name})
    with bfc.predict("h100"):
        tensor = torch.ones(4, device="cuda").as_subclass(Asked)
        given = {"cumprod": (0,), "one_hot": (2,), "istft": (2,), "ctc_loss": (tensor, [4], [1])}
        call = getattr(*((tensor, name) if holder is torch.Tensor else (holder, name)))
        first = () if holder is torch.Tensor else (tensor,)
        assert call(*first, *given.get(name, ())) == name
        assert len({getattr(holder, name), *Asked.functions}) == 1


def test_results_that_pytorch_says_nothing_of() -> None:
    with bfc.predict("h100"):
        shape = torch.ones(1000, device="cuda", requires_grad=True)
        torch.distributions.Gamma(shape, shape).rsample().sum().backward()
        assert shape.grad.shape == (1000,)
        image = torch.randn(2, 3, 16, 16, 16, device="cuda", requires_grad=True)
        functional.fractional_max_pool3d(image, 3, output_size=5).sum().backward()
        assert image.grad.shape == image.shape


@pytest.mark.parametrize("masked", [False, True])
def test_attention_of_inference_softmaxes_in_place(masked: bool) -> None:
    """Without a mask; else there is a copy of that for each head. What is averaged comes last."""
    with bfc.predict("h100") as run, torch.no_grad():
        layer = nn.MultiheadAttention(64, 4, batch_first=True, device="cuda").eval()
        x = torch.randn(8, 50, 64, device="cuda")
        mask = torch.zeros(50, 50, dtype=torch.bool, device="cuda") if masked else None
        layer(x, x, x, attn_mask=mask)
    births = run.trace.size[run.trace.op == 0].tolist()
    scores, average = 320_000, 80_000
    assert births.count(scores) == 1 + masked
    assert births.count(average) == 1 + masked
    of_lt = [] if torch.__version__ >= (2, 12) else [MIB]  # of the first product with a bias
    assert births[-3 - len(of_lt) :] == [102_400, 102_400, *of_lt, average]
