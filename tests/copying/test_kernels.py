"""The kernels as CUDA gets them: NVRTC compiles them all, which needs no GPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from copy_cases import DTYPES, PAIRS, switched

import bfc
from bfc.copying import cuda_stream, kernels
from bfc.drivers.cuda import nvrtc as compiler
from bfc_torch_opencl import arithmetic

nvrtc = pytest.importorskip("cuda.bindings.nvrtc")


@pytest.fixture(scope="module", autouse=True)
def found(machine) -> None:
    try:
        compiler._nvrtc()
    except bfc.DeviceUnavailableError as error:
        pytest.skip(str(error))


@pytest.mark.long
def test_nvrtc_compiles_every_kernel_for_an_old_device():
    """Each as it is launched: a program for every pair of dtypes, here a destination's in one."""

    def compile_all(to: str) -> bytes:
        return compiler.compiled_for(
            kernels.text_of((source, to) for source in kernels.CODES), "compute_75"
        )

    with ThreadPoolExecutor(4) as workers:
        images = list(workers.map(compile_all, kernels.CODES))
    for to, image in zip(kernels.CODES, images, strict=True):
        for source in kernels.CODES:
            assert f".entry {kernels.kernel_name(source, to)}(".encode() in image


@pytest.mark.long
def test_nvrtc_compiles_every_conversion_for_the_newest_device():
    newest = max(nvrtc.nvrtcGetSupportedArchs()[1])
    text = kernels.HEADER + "".join(map(switched, kernels.CODES))
    assert compiler.compiled(text, newest).startswith(b"\x7fELF")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("in_single", [False, True])
def test_nvrtc_compiles_the_kernels_that_compute(in_single):
    image = compiler.compiled_for(arithmetic.text_of(in_single=in_single), "compute_75")
    names = ["sum", "sum_of_parts", "product"]
    for operation in arithmetic.OPERATIONS:
        names += [f"{operation}_run", f"{operation}_strided"]
    for name in names:
        assert f".entry {name}(".encode() in image


def test_a_device_newer_than_nvrtc_gets_text_that_its_driver_finishes():
    text = kernels.text_of([("f4", "i4")])
    newest = max(nvrtc.nvrtcGetSupportedArchs()[1])
    image = compiler.compiled(text, newest + 70)
    assert f".target sm_{newest}".encode() in image
    assert image.endswith(b"\0")
    with pytest.raises(bfc.DeviceUnavailableError, match="install an older one"):
        compiler.compiled(text, 35)


def test_both_languages_get_the_same_layout():
    opencl_stream = pytest.importorskip("bfc.copying.opencl_stream")
    ours = {
        name: getattr(cuda_stream._Layout, name).offset for name, _ in cuda_stream._Layout._fields_
    }
    assert ours == {name: offset for name, (_, offset) in opencl_stream.LAYOUT.fields.items()}
    assert opencl_stream.LAYOUT.itemsize % 8 == 0


def test_every_dtype_with_arithmetic_has_a_name_and_no_other():
    assert [kernels.code_of(dtype) for dtype in DTYPES] == list(kernels.CODES)
    for dtype in ("g", "G", ">f4", "M8[s]", "S4", "V8", "U2", "i4,i4"):
        assert kernels.code_of(np.dtype(dtype)) is None
    assert len(PAIRS) == 14 * 14
