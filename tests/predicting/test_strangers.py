"""What programs of others do that predictions once could not, or told wrongly."""

from __future__ import annotations

import functools
import importlib.util
import json
import multiprocessing
import os
import runpy
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bfc
from bfc_tools.cli import main

MIB = 1 << 20


def sizes(run: Any) -> list[int]:
    """The allocations in their order."""
    trace = run.trace
    return [int(size) for op, size in zip(trace.op, trace.size, strict=True) if op == 0]


def test_a_function_that_was_imported_by_its_name_before_is_that_of_the_prediction(monkeypatch):
    """Attention once took the build's kernel then, with its matrix of 64 MiB."""
    module = types.ModuleType("somebodys_model")
    module.attend = nn.functional.scaled_dot_product_attention  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "somebodys_model", module)

    def attention(asks: Callable[[], Any]) -> list[int]:
        with bfc.predict("h100") as run:
            query = torch.empty(1, 4, 4096, 64, device="cuda", dtype=torch.float16)
            asks()(query, query, query)
        return sizes(run)

    found = attention(lambda: module.attend)
    assert found == attention(lambda: nn.functional.scaled_dot_product_attention)
    assert max(found) <= 4 * MIB
    assert module.attend is nn.functional.scaled_dot_product_attention


@contextmanager
def group(size: int) -> Iterator[None]:
    torch.distributed.init_process_group("nccl", rank=0, world_size=size)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def test_a_module_may_move_itself_with_arguments_of_its_own() -> None:
    """torchmetrics does; Lightning failed with them."""

    class Metric(nn.Module):
        def _apply(self, fn: Callable[..., Any], exclude: Any = ()) -> nn.Module:
            assert "total" not in exclude
            return super()._apply(fn)

    with bfc.predict("a100") as run:
        nn.Sequential(Metric(), nn.Linear(8, 8)).cuda()
    assert sizes(run) == [256, 32]


@pytest.mark.parametrize("out", [False, True])
def test_a_product_may_be_of_another_type(out: bool) -> None:
    """PyTorch takes `out_dtype` for beta where tensors are fake; trl trains with it."""
    with bfc.predict("h100") as run:
        left = torch.randn(64, 128, device="cuda", dtype=torch.bfloat16)
        right = torch.randn(128, 32, device="cuda", dtype=torch.bfloat16)
        total = torch.zeros(64, 32, device="cuda")
        before = len(sizes(run))
        where = {"out": total} if out else {}
        made = torch.addmm(total, left, right, out_dtype=torch.float32, **where)
        assert made.dtype == torch.float32
        assert made.shape == (64, 32)
    assert [size for size in sizes(run)[before:] if size < MIB] == ([] if out else [4 * 64 * 32])


def test_a_stream_s_workspace_is_made_once() -> None:
    """It was made in the last step, and a hundred steps were said to need it a hundred times."""
    with bfc.predict("h100") as run:
        layer = nn.Linear(64, 64, device="cuda")
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        for stream in (torch.cuda.Stream(), torch.cuda.current_stream()):
            with torch.cuda.stream(stream):
                optimizer.zero_grad()
                layer(torch.randn(8, 64, device="cuda")).sum().backward()
                optimizer.step()
    assert run.reserved_after() - run.peak_reserved <= 2 * MIB


def test_what_a_program_keeps_of_each_step_counts_in_each() -> None:
    kept = []
    with bfc.predict("h100") as run:
        layer = nn.Linear(64, 64, device="cuda")
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            made = layer(torch.randn(1 << 16, 64, device="cuda"))
            kept.append(made.detach())
            made.sum().backward()
            optimizer.step()
    assert run.reserved_after() - run.peak_reserved >= 99 * 16 * MIB
    del kept


def test_buckets_of_gradients_and_nccl_are_named() -> None:
    with bfc.predict("h100") as run, group(2):
        model = nn.parallel.DistributedDataParallel(nn.Linear(1024, 1024, device="cuda"))
        model(torch.randn(8, 1024, device="cuda")).sum().backward()
        del model
    assert run.peak.by_kind["buckets of gradients"] == 4 * (1024 * 1024 + 1024)
    assert "NCCL" in [one.what for one in run.not_counted]


def test_a_mesh_makes_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waited for the other processes, for ever."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    with bfc.predict("a100") as run:
        mesh = torch.distributed.init_device_mesh("cuda", (2, 2), mesh_dim_names=("one", "other"))
        assert mesh["one"].size() == 2
        torch.distributed.destroy_process_group()
    assert any("4 that sends nothing" in one["what"] for one in run.assumptions)


def test_groups_of_other_backends_send_nothing() -> None:
    """Programs make one of gloo for their objects and checkpoints."""
    with bfc.predict("a100"), group(2):
        made = torch.distributed.new_group([0, 1], backend="gloo")
        torch.distributed.all_reduce(torch.ones(3), group=made)
        torch.distributed.monitored_barrier(made)


def test_sharded_parameters_are_parameters() -> None:
    from torch.distributed.fsdp import fully_shard

    with bfc.predict("h100") as run, group(4):
        model = nn.Linear(1024, 1024, bias=False, device="cuda")
        fully_shard(model)
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(2):
            model(torch.randn(8, 1024, device="cuda")).sum().backward()
            optimizer.step()
        optimizer.zero_grad()
        held = torch.zeros(8 * MIB, device="cuda")
        del held
    kinds = run.peak.by_kind
    assert kinds["parameters"] == MIB
    assert kinds["optimizer state"] // MIB == 2


def test_a_search_with_beams_goes_on_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers ends it by scores, and one token was predicted in place of all; and then two
    were returned, whose number it had read from the GPU."""

    class Mixin:
        @staticmethod
        def _beam_search_has_unfinished_sequences(scores: Any, stopped: Any) -> Any:
            return torch.any(scores > 0) & ~torch.all(stopped)

        def _beam_search(self, kept: Any, generation_config: Any) -> Any:
            length = generation_config.max_length
            found = torch.ones(1, 3 * length, dtype=torch.int64, device="cuda")[:, : kept.sum()]
            return found if length < 20 else types.SimpleNamespace(sequences=found)

    module = types.ModuleType("transformers.generation.utils")
    module.GenerationMixin = Mixin  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with bfc.predict("a100") as run:
        scores = torch.randn(3, device="cuda")
        stopped = torch.full((3,), False, device="cuda")
        assert Mixin()._beam_search_has_unfinished_sequences(scores, stopped)
        assert not Mixin()._beam_search_has_unfinished_sequences(scores, stopped | True)
        few, many = (types.SimpleNamespace(max_length=one) for one in (8, 24))
        assert Mixin()._beam_search(scores > 0, generation_config=few).shape == (1, 8)
        assert Mixin()._beam_search(scores > 0, few).shape == (1, 8)
        found = Mixin()._beam_search(scores > 0, many)
        assert found.sequences.shape == (1, 24)
    assert [one["times"] for one in run.assumptions if "beams" in one["what"]] == [1]


def test_a_step_of_a_solver_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused one returns what it was given, which has no gradient."""
    module: Any = types.ModuleType("torchdiffeq._impl.rk_common")
    module._compute_error_ratio = lambda found, better: (found - better).abs().max()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with bfc.predict("h100") as run:
        state = torch.ones(8, 64, device="cuda")
        found = nn.Linear(64, 64, device="cuda")(state)
        accepted = module._compute_error_ratio(state, found) <= 1
        (found if accepted else state).sum().backward()
    told = {one["what"]: one["value"] for one in run.assumptions}
    assert told["steps of a solver (torchdiffeq)"] == "accepted"


@functools.cache
def kernels() -> Any:
    """A kernel of Triton, and one that is tuned; a file of their own, since Triton reads it."""
    pytest.importorskip("triton")
    return types.SimpleNamespace(
        **runpy.run_path(str(Path(__file__).with_name("kernels_of_triton.py")))
    )


def test_a_kernel_of_triton_takes_nothing() -> None:
    triton = pytest.importorskip("triton")
    with bfc.predict("h100") as run:
        device = triton.runtime.driver.active.get_active_torch_device()
        one = torch.zeros(1024, device=device)
        made = torch.empty_like(one)
        kernels().double[(1,)](one, made, 1024, block=1024)
        assert not (one == 0).all().item()  # which it may have written to
        properties = triton.runtime.driver.active.utils.get_device_properties(0)
        assert properties["multiprocessor_count"] == 132
    assert sizes(run)[:2] == [4096, 4096]
    (found,) = [one for one in run.assumptions if "Triton" in one["what"]]
    assert found["what"] == "the Triton kernel double"
    assert __file__ in found["where"]


def test_a_kernel_that_is_tuned_takes_a_buffer_meanwhile() -> None:
    with bfc.predict("h100") as run:
        one = torch.zeros(1024, device="cuda")
        for _ in range(2):
            kernels().tuned[lambda meta: (1,)](one, torch.empty_like(one), 1024)
    assert sizes(run).count(256 * MIB) == 2  # once for each configuration


def test_an_operator_made_of_kernels_takes_what_its_function_takes() -> None:
    found = kernels()
    with bfc.predict("h100") as run:
        made = torch.ops.bfc_tests.twice(torch.zeros(MIB, device="cuda"))
        assert made.shape == (MIB,)
    assert sizes(run) == [4 * MIB] * 3
    assert not run.unknown
    assert found.triton is not None


def test_a_parameter_may_be_copied_by_its_class() -> None:
    """accelerate's `init_empty_weights` does so."""
    with bfc.predict("a100"):
        layer = nn.Linear(8, 8)
        given = {**vars(layer.weight), "requires_grad": False}
        made = type(layer.weight)(layer.weight.to("meta"), **given)
        assert isinstance(made, nn.Parameter)
        assert made.is_meta
        assert not made.requires_grad


@pytest.fixture
def fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)

    def run(text: str) -> str:
        (tmp_path / "train.py").write_text("import torch\n" + text)
        assert main(["predict", "--device", "a100", "train.py"]) == 2
        return capsys.readouterr().err

    return run


def test_a_traceback_shows_the_program_and_not_bfc(fails) -> None:
    """A page of frames of fake tensors, and of errors behind the error, once hid the line."""
    text = """
torch.library.define("bfc_tests::unfaked", "(Tensor given) -> Tensor")
torch.ops.bfc_tests.unfaked(torch.ones(3, device="cuda"))
"""
    said = fails(text)
    assert said.count("Traceback") == 1
    assert "fake_tensor.py" not in said
    assert "recorder.py" not in said
    assert 'train.py", line 4' in said
    assert "register_fake" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import nowhere", "It needs that package here, too"),
        ("raise ModuleNotFoundError('no triton', name='triton')", "pip install triton"),
        ("raise ImportError('flash')", 'attn_implementation="sdpa"'),
        ("raise OSError('no model') from ConnectionError()", "It needs the network"),
        ("import os\nos.environ['LOCAL_RANK']", "RANK=0 LOCAL_RANK=0 WORLD_SIZE=8 bfc predict"),
        ("assert torch.randn(1, device='cuda').item() > 5", "PYTHONOPTIMIZE=1"),
        ("raise RuntimeError('but its data is not allocated yet.')", "torch.library.custom_op"),
        ("raise RuntimeError from ValueError('why')", "ValueError: why"),
        ("raise KeyError([1])", "KeyError"),
        ("one = ValueError()\none.__cause__ = one\nraise one", "raised ValueError"),
        ("raise ValueError", "it had allocated nothing on the GPU"),
        ("torch.ones(3, device='cuda')\nraise ValueError", "the figures are those until then"),
    ],
)
def test_what_a_failed_program_needs_is_said(fails, text: str, said: str) -> None:
    assert said in fails(text)


def test_a_trace_runs_what_it_is_given(tmp_path: Path) -> None:
    """A traced convolution asks for the values of its strides, which ended the program."""
    with bfc.predict("a100") as run:
        layer = nn.Conv2d(3, 8, 3, device="cuda")
        traced = torch.jit.trace(layer, (torch.zeros(1, 3, 8, 8, device="cuda"),))
        assert traced(torch.zeros(2, 3, 8, 8, device="cuda")).shape == (2, 8, 6, 6)
        traced.save(tmp_path / "layer.pt")
    assert "torch.jit.trace: run as it is written" in [one["what"] for one in run.assumptions]


def test_a_process_that_fails_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    """The program may wait for it: one that started processes with queues stood still, and nothing
    was said."""
    with bfc.predict("a100"):
        process = multiprocessing.get_context("fork").Process(target=sys.exit, args=(1,))
        process.start()
        said = ""
        while "which the program has started, failed" not in said:
            time.sleep(0.01)
            said += capfd.readouterr().err
        process.join()
    assert f"bfc: {process.name}" in said


def test_who_observes_is_told_before_memory_runs_out() -> None:
    told = []
    with bfc.predict(1 << 30, oom=True):
        torch._C._cuda_attach_out_of_memory_observer(lambda *given: told.append(given))
        kept = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    assert told == [(0, 1 << 31, 1 << 30, (1 << 30) - 2 * MIB)]
    del kept


def test_workspaces_of_cublas_are_freed_where_a_program_asks_for_that() -> None:
    """A build for CPUs has no such function; PyTorch 2.15 keeps none of its own accord."""
    with bfc.predict("h100"):
        matrix = torch.empty(512, 512, device="cuda")
        before = torch.cuda.memory_allocated()
        for _ in range(2):
            matrix.mm(matrix)
            are_kept = torch.cuda.memory_allocated() > before
            assert are_kept == (torch.torch_version.TorchVersion(torch.__version__) < (2, 15))
            torch._C._cuda_clearCublasWorkspaces()
            assert torch.cuda.memory_allocated() == before


def test_values_that_packages_read_are_one_line(tmp_path: Path, monkeypatch, capsys) -> None:
    """Forty lines of trl's trainer stood between a reader and the one that mattered."""
    package = tmp_path / "site-packages" / "trainers"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("def read(x):\n" + "    x.sum().item()\n" * 5)
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(
        "import torch, trainers\nx = torch.randn(3, device='cuda')\ntrainers.read(x)\nx[0].item()\n"
    )
    assert main(["predict", "train.py"]) == 0
    told = capsys.readouterr().out
    assert told.count(".item()") == 2
    assert "at 5 lines of trainers" in told
    assert ".item() at train.py:4 is 1.0" in told


def test_a_number_that_is_moved_to_the_gpu_is_known() -> None:
    """It was 1: a learning rate on the GPU was refused."""
    with bfc.predict("a100") as run:
        assert torch.tensor(0.5, device="cuda").item() == 0.5
        assert torch.tensor(3).cuda().item() == 3
        assert torch.tensor([1.0, 2.0], device="cuda").shape == (2,)
        layer = nn.Linear(4, 4, device="cuda")
        rate = torch.tensor(1e-3, device="cuda")
        optimizer = torch.optim.AdamW(layer.parameters(), lr=rate, capturable=True)
        layer(torch.randn(2, 4, device="cuda")).sum().backward()
        optimizer.step()
    assert not run.assumptions


def test_programs_may_compare_their_kernels() -> None:
    with bfc.predict("a100") as run:
        one = torch.randn(MIB, device="cuda")
        torch.testing.assert_close(one, one.clone())
        with pytest.raises(AssertionError):
            torch.testing.assert_close(one, one.bfloat16())
    assert [one["what"] for one in run.assumptions] == ["torch.testing.assert_close"]


def test_statistics_may_be_nested_and_pools_have_names() -> None:
    with bfc.predict("a100"):
        kept = torch.empty(MIB, dtype=torch.uint8, device="cuda")
        nested = torch.cuda.memory.memory_stats_as_nested_dict()
        assert nested["allocated_bytes"]["all"]["peak"] == MIB
        assert torch.cuda.device_memory_used() == 2 * MIB
        assert len(torch.cuda.MemPool().id) == 2
        assert torch.cuda.cudart().cudaMemGetInfo(0) == torch.cuda.mem_get_info()
        del kept


def test_nvml_answers_for_the_device() -> None:
    """Programs that print how much memory is in use ask it, and not PyTorch."""
    before = sys.modules.get("pynvml")
    with bfc.predict("a100"):
        nvml = importlib.import_module("pynvml")
        assert importlib.util.find_spec("pynvml") is not None
        nvml.nvmlInit()
        assert nvml.nvmlDeviceGetCount() == 1
        handle = nvml.nvmlDeviceGetHandleByIndex(0)
        assert nvml.nvmlDeviceGetName(handle) == torch.cuda.get_device_name()
        kept = torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")
        info = nvml.nvmlDeviceGetMemoryInfo(handle)
        assert (info.free, info.total) == torch.cuda.mem_get_info()
        [process] = nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle)
        assert process.pid == os.getpid()
        assert process.usedGpuMemory == info.used >= kept.nbytes
        assert nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU) == 0
        assert issubclass(nvml.NVMLError_NotSupported, Exception)
        with pytest.raises(AttributeError, match="has no attribute"):
            nvml.no_such_name  # noqa: B018
    assert sys.modules.get("pynvml") is before


def test_all_of_nvml_may_be_imported() -> None:
    """It brought nothing, and the program ended at `nvmlInit`."""
    names: dict[str, Any] = {}
    with bfc.predict("a100"):
        exec("from pynvml import *", names)
        names["nvmlInit"]()
        info = names["nvmlDeviceGetMemoryInfo"](names["nvmlDeviceGetHandleByIndex"](0))
        assert info.free == torch.cuda.mem_get_info()[0]
        assert issubclass(names["NVMLError"], Exception)


def test_a_subclass_of_tensors_may_be_made_of_numbers() -> None:
    """PyTorch found a fake tensor where it was to make one of the class."""

    class Points(torch.Tensor):
        pass

    with bfc.predict("h100"):
        made = Points([[1.0, 2.0]])
        assert type(made + made.new_ones(2)) is type(made)
        assert isinstance(made.cuda(), Points)
        assert made.cuda().device.type == "cuda"
        assert Points(2, 3).shape == (2, 3)


def test_an_empty_range_may_be_compared() -> None:
    with bfc.predict("h100"):
        empty = torch.arange(0, device="cuda")
        assert torch.nonzero(empty < 3).shape == (0, 1)
        assert torch.nonzero(torch.arange(4, device="cuda")[:, None] < empty).shape == (0, 2)


def test_a_complex_number_may_be_moved_to_the_gpu() -> None:
    with bfc.predict("h100"):
        assert (torch.tensor(1j, device="cuda") * 2).shape == ()


def test_a_number_of_the_host_may_be_close() -> None:
    with bfc.predict("h100"):
        assert torch.allclose(torch.ones(3, device="cuda"), torch.tensor(1.0))
        with pytest.raises(RuntimeError, match="same device"):
            torch.equal(torch.ones(3, device="cuda"), torch.ones(3))


def test_values_of_the_host_are_compared() -> None:
    with bfc.predict("h100"), pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(torch.zeros(2), torch.ones(2))


def test_a_traced_module_can_leave_the_gpu() -> None:
    """What saves it held its parameters."""
    with bfc.predict("h100"):
        model = nn.Linear(1024, 1024, bias=False, device="cuda")
        torch.jit.trace(model, torch.ones(2, 1024, device="cuda"))
        before = torch.cuda.memory_allocated()
        model.cpu()
        assert before - torch.cuda.memory_allocated() == 4 * MIB
    assert not hasattr(nn.Module, "save")


def test_an_encoder_that_failed_leaves_nothing_to_the_next_prediction() -> None:
    def attend(fail: bool) -> int:
        with bfc.predict("h100") as run, torch.no_grad():
            layer = nn.TransformerEncoderLayer(64, 4, batch_first=True, device="cuda")
            encoder = nn.TransformerEncoder(layer, 2).eval()
            data = torch.ones(2, 10, 64, device="cuda")
            if fail:
                hook = encoder.layers[1].register_forward_pre_hook(lambda *given: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    encoder(data, src_key_padding_mask=data[..., 0] == 0)
                hook.remove()
            else:
                encoder(data)
        return len(sizes(run))

    alone = attend(False)
    attend(True)
    assert attend(False) == alone


def test_experts_get_even_parts_where_how_many_is_not_known() -> None:
    """A router that reads how many tokens each of its experts has, and splits the tokens so."""
    with bfc.predict("h100") as run:
        tokens = torch.randn(64, 1024, device="cuda", requires_grad=True)
        counts = (torch.randn(64, 10, device="cuda") > 0).sum(0).tolist()
        parts = torch.split(tokens, counts, dim=0)
        assert [len(part) for part in parts] == [7] * 4 + [6] * 6
        torch.cat([part * 2 for part in parts]).sum().backward()
        assert tokens.grad is not None
        assert tokens.grad.shape == tokens.shape
        with pytest.raises(RuntimeError, match="sum exactly to 64"):
            torch.split(tokens, [1] * 10)  # the program's own numbers
    assert any(one["what"].startswith("split: even parts") for one in run.assumptions)


def test_a_picture_for_tensorboard_is_a_run_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    protocols = "tensorboard.compat.proto"
    for name, made in (("config_pb2", "RunMetadata"), ("graph_pb2", "GraphDef")):
        module = types.ModuleType(f"{protocols}.{name}")
        setattr(module, made, object)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    writer = types.ModuleType("torch.utils.tensorboard.writer")
    writer.graph = before = lambda *given: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, writer.__name__, writer)
    seen = []
    with bfc.predict("h100"):
        model = nn.Linear(64, 64, device="cuda")
        model.register_forward_hook(lambda *given: seen.append(model.training))
        writer.graph(model, torch.ones(2, 64, device="cuda"))  # type: ignore[attr-defined]
        assert model.training
    assert seen == [False]
    assert writer.graph is before  # type: ignore[attr-defined]


CHILD_THAT_FILLS_A_QUEUE = """
import multiprocessing

import torch


def fill(queue):
    while True:
        queue.put(b"0" * 100_000)


if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    queue = context.Queue(maxsize=30)
    context.Process(target=fill, args=(queue,), daemon=True).start()
    model = torch.nn.Linear(8, 8, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        queue.get()
        model(torch.ones(2, 8, device="cuda")).sum().backward()
        optimizer.step()
"""


def test_a_child_ends_by_the_signal_that_ends_it(tmp_path: Path) -> None:
    """It samples for the training, as recommenders do, and waits at a queue that nobody reads any
    more: without a prediction SIGTERM ends it there, and the program does not wait for it."""
    (tmp_path / "train.py").write_text(CHILD_THAT_FILLS_A_QUEUE)
    command = [sys.executable, "-m", "bfc", "predict", "--json", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 2
