"""Values that stand in files and arrays: a program that asks for them on the host gets them, and on
the GPU their tensors take what they would."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from torch import nn

import bfc

MIB = 1 << 20


def allocated() -> int:
    return torch.cuda.memory_allocated()


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A file of safetensors, as others wrote it."""
    path = tmp_path / "model.safetensors"
    tensors = {
        "weight": torch.arange(512 * 512, dtype=torch.float32).reshape(512, 512),
        "half": torch.full((8,), 1.5, dtype=torch.bfloat16),
        "steps": torch.tensor(7),
        "empty": torch.zeros(0, 3),
    }
    safetensors.torch.save_file(tensors, path, {"format": "pt"})
    return path


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A file of torch.save, as others wrote it."""
    path = tmp_path / "model.pt"
    layer = nn.Linear(512, 512, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(512 * 512).reshape(512, 512))
    labels = torch.arange(5000) % 77
    torch.save({"model": layer.state_dict(), "labels": labels, "steps": torch.tensor(7)}, path)
    return path


def test_a_file_of_safetensors_has_values_on_the_host(weights: Path) -> None:
    with bfc.predict("a100") as run:
        found = safetensors.torch.load_file(weights)
        assert found["steps"].item() == 7
        assert found["weight"][1, 2:4].tolist() == [514.0, 515.0]
        assert found["weight"].numpy()[2, 0] == 1024
        assert found["half"].float().tolist() == [1.5] * 8
        assert found["empty"].shape == (0, 3)
        with safetensors.safe_open(weights, framework="pt") as file:
            assert (sorted(file.keys()), file.metadata()) == (sorted(found), {"format": "pt"})
            assert file.get_tensor("weight")[0, 1].item() == 1
            assert file.get_slice("weight").get_shape() == [512, 512]
            assert file.get_slice("weight")[1:, 511:].shape == (511, 1)
            assert file.get_slice("weight")[511, -1:].tolist() == [512 * 512 - 1]
        assert safetensors.torch.load(weights.read_bytes())["weight"][0, 3].item() == 3
        assert allocated() == 0
    assert run.assumptions == []


@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0])
def test_a_file_of_safetensors_takes_memory_on_the_gpu(weights: Path, device: Any) -> None:
    """Its compiled code writes where the tensor says that its memory is: a segmentation fault."""
    with bfc.predict("a100"):
        found = safetensors.torch.load_file(weights, device=device)
        assert found["weight"].is_cuda
        assert allocated() == MIB + 2 * 512
        del found
        with safetensors.safe_open(weights, "pt", device=device) as file:
            assert allocated() == 0
            weight = file.get_tensor("weight")
            assert (weight.is_cuda, allocated()) == (True, MIB)
            assert file.get_slice("weight")[:256].shape == (256, 512)
            layer = nn.Linear(512, 512, bias=False, device="meta")
            layer.load_state_dict({"weight": weight}, assign=True)
            layer(torch.randn(1, 512, device="cuda")).sum().backward()
            assert layer.weight.grad.is_cuda


def test_functions_that_a_module_has_imported_before_know_of_the_prediction(weights: Path) -> None:
    from safetensors import safe_open as opened_before

    globals()["put_aside"] = opened_before
    with bfc.predict("a100"), put_aside(weights, "pt", device="cuda") as file:  # noqa: F821
        assert file.get_tensor("steps").is_cuda
    assert globals().pop("put_aside") is opened_before


@pytest.mark.parametrize("options", [{}, {"mmap": True}, {"weights_only": False}])
def test_a_checkpoint_has_values_on_the_host(checkpoint: Path, options: Any) -> None:
    with bfc.predict("a100") as run:
        found = torch.load(checkpoint, **options)
        assert found["model"]["weight"][1, :2].tolist() == [512.0, 513.0]
        assert found["steps"].item() == 7
        assert int(found["labels"].max()) + 1 == 77
        layer = nn.Linear(512, 512, bias=False)
        layer.load_state_dict(found["model"])
        assert layer.weight[2, 0].item() == 1024
        assert layer.to(torch.float16).weight[0, 1].item() == 1
    assert run.assumptions == []


def test_a_checkpoint_in_an_open_file_has_values(checkpoint: Path) -> None:
    with bfc.predict("a100"):
        with open(checkpoint, "rb") as file:
            assert torch.load(file)["steps"].item() == 7
        assert torch.load(io.BytesIO(checkpoint.read_bytes()))["steps"].item() == 7


@pytest.mark.parametrize(
    "location",
    ["cuda", {"cpu": "cuda:0"}, lambda storage, place: storage.cuda(), torch.device("cuda", 0)],
)
def test_a_checkpoint_that_is_loaded_onto_the_gpu_takes_memory_at_once(
    checkpoint: Path, location: Any
) -> None:
    """It took none until an operator saw the tensors; and a function raised."""
    with bfc.predict("a100"):
        found = torch.load(checkpoint, map_location=location)
        assert found["model"]["weight"].is_cuda
        assert allocated() == MIB + 40448 + 512
        del found
        assert allocated() == 0


def test_a_function_may_leave_a_checkpoint_on_the_host(checkpoint: Path) -> None:
    with bfc.predict("a100"):
        found = torch.load(checkpoint, map_location=lambda storage, place: storage)
        assert (found["steps"].item(), allocated()) == (7, 0)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_storages_become_tensors(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    np.arange(24, dtype=np.float32).tofile(path)
    typed = torch.FloatStorage([1.0, 2.0])
    with bfc.predict("a100") as run:
        storage = torch.UntypedStorage.from_file(str(path), False, 96)
        assert torch.asarray(storage, dtype=torch.uint8).shape == (96,)
        assert torch.asarray(storage, dtype=torch.uint8).view(torch.float32)[5].item() == 5
        assert torch.asarray(storage, dtype=torch.uint8, device="cuda").is_cuda
        assert torch.empty(0).set_(storage)[7].item() == 7
        assert torch.empty(0).set_(storage, 2, (2, 3), (3, 1)).tolist() == [[2, 3, 4], [5, 6, 7]]
        assert torch.asarray(typed).tolist() == [1.0, 2.0]
        assert torch.asarray(torch.ones(3).untyped_storage(), dtype=torch.uint8).shape == (12,)
        assert torch.from_file(str(path), size=24, dtype=torch.float32)[23].item() == 23
    assert run.assumptions == []


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning")
def test_arrays_become_tensors_with_values(tmp_path: Path) -> None:
    """Of more numbers than PyTorch itself keeps of a tensor without values."""
    path = tmp_path / "numbers"
    numbers = np.arange(10_000, dtype=np.int32)
    numbers.tofile(path)
    with bfc.predict("a100") as run:
        for made in (
            torch.from_numpy(np.memmap(path, dtype=np.int32, mode="r")),
            torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.int32),
            torch.from_dlpack(numbers),
            torch.tensor(numbers),
            torch.as_tensor(numbers),
            torch.asarray(numbers),
        ):
            assert made[9_999].item() == 9_999
            assert made.reshape(100, 100)[1].tolist() == list(range(100, 200))
            assert made.numpy()[1:].sum() == numbers.sum()
            assert int(made.max()) == 9_999
            assert made.cuda().is_cuda
    assert run.assumptions == []


def test_values_end_when_a_tensor_is_written_to(checkpoint: Path) -> None:
    with bfc.predict("a100") as run:
        weight = torch.load(checkpoint)["model"]["weight"]
        row = weight[1]
        weight.mul_(2)
        assert row[1].item() == 1.0  # made up
        weight.zero_()
        assert row[1].item() == 0.0
    assert [one["what"] for one in run.assumptions] == [".item()"]


def test_a_file_may_go_once_it_is_read(weights: Path, checkpoint: Path) -> None:
    with bfc.predict("a100", real_files=True):
        found = safetensors.torch.load_file(weights) | torch.load(checkpoint)["model"]
        checkpoint.unlink()
        weights.unlink()
        assert found["weight"][1, 0].item() == 512
        assert found["steps"].item() == 7
