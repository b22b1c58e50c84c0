"""The device that PyTorch asks is laid out without its headers, which say here if it is right."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bfc.pytorch import _fake_device
from bfc.pytorch.extension import torch_version
from bfc_tools.predicting import guard
from bfc_tools.predicting.releases import release_of

ROOT = Path(__file__).parents[2]
#: Whose table has each virtual function of the base, its own and inherited.
SHOWN = """
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <type_traits>
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override;
  c10::Device exchangeDevice(c10::Device) const override;
  c10::Device getDevice() const override;
  void setDevice(c10::Device) const override;
  void uncheckedSetDevice(c10::Device) const noexcept override;
  c10::Stream getStream(c10::Device) const override;
  c10::Stream exchangeStream(c10::Stream) const override;
  c10::DeviceIndex deviceCount() const noexcept override;
};
Guard guard;
at::CUDAHooksInterface hooks;
// They are passed in registers.
static_assert(sizeof(c10::Device) == 2 && std::is_trivially_copyable_v<c10::Device>);
static_assert(sizeof(c10::Stream) == 16 && std::is_trivially_copyable_v<c10::Stream>);
static_assert(static_cast<int>(c10::DeviceType::CUDA) == 1);
"""


def table(dump: str, name: str) -> list[str]:
    """The functions of a table of virtual functions, as GCC prints it."""
    text = dump.partition(f"\nVtable for {name}\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^\d+ +(.+)$", text.replace("(int (*)(...))", ""), re.MULTILINE)
    functions = entries[2:]  # in front of them stand an offset, and the type
    return [one.partition("(")[0].rpartition("::")[2] for one in functions]


@pytest.mark.skipif(shutil.which("g++") is None, reason="GCC prints tables of virtual functions")
def test_the_tables_are_those_of_this_pytorch(tmp_path: Path) -> None:
    (tmp_path / "shown.cpp").write_text(SHOWN)
    headers = Path(torch.__file__).parent / "include"
    told = ["g++", "-std=c++20", "-c", "-o", "/dev/null", "-fdump-lang-class=shown.class"]
    subprocess.run([*told, "-isystem", headers, "shown.cpp"], cwd=tmp_path, check=True)
    dump = (tmp_path / "shown.class").read_text()
    release = release_of(torch_version(torch))
    assert table(dump, "Guard") == [*release.guard, "~Guard", "~Guard"]
    hooks = table(dump, "at::CUDAHooksInterface")
    assert len(hooks) == release.hooks
    for name, slot in (guard.FIRST_HOOKS | guard.LAST_HOOKS).items():
        assert hooks[slot] == name


def test_a_pytorch_that_is_built_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_size", lambda address: 8 * 1000)
    with pytest.raises(RuntimeError, match="its hooks have 998 functions"):
        guard.load()
    monkeypatch.setattr(guard, "REGISTRY", "of_another_name")
    with pytest.raises(RuntimeError, match=r"not built as .* release are: .*name"):
        guard.load()


def test_a_table_that_is_not_known_is_not_put_together() -> None:
    with pytest.raises(RuntimeError, match="has 999 words"):
        _fake_device.prepare(0, 0, 0, 999, {}, {})
    one = torch.zeros(40).data_ptr()  # memory that is read, and never installed
    with pytest.raises(RuntimeError, match="has no function 'fly'"):
        _fake_device.prepare(one, one, one, 1, {"fly": 0}, {})
    with pytest.raises(RuntimeError, match="has no function 'type'"):
        _fake_device.prepare(one, one, one, 1, {"type": 1000}, {})
    guard.load()  # what others go on with


def test_what_the_device_cannot_do_is_an_error_of_python() -> None:
    device = guard.load()
    device.install(0, 1)
    try:
        with pytest.raises(RuntimeError, match="a predicted device cannot do this"):
            torch._C.Stream(device="cuda")
    finally:
        device.remove()


def test_a_prediction_needs_no_compiler(tmp_path: Path) -> None:
    """Nothing is on the path, and nothing is compiled into the cache."""
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Linear(100, 100).cuda()\n"
        "model(torch.randn(8, 100, device='cuda')).sum().backward()\n"
    )
    environment = {"PATH": "/nowhere", "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    predict = ["-m", "bfc", "predict", str(script), "--device", "24GiB", "--no-advice"]
    done = subprocess.run(
        [sys.executable, *predict], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("It fits on a GPU of 24.00 GiB"), done.stdout
    assert not list(tmp_path.rglob("*.so"))
