"""The table of GPUs, and how one is named."""

from __future__ import annotations

import pytest

from bfc_tools.predicting import devices


@pytest.mark.parametrize(
    "text", ["rtx4090", "RTX 4090", "NVIDIA GeForce RTX 4090", "rtx-4090", "GeForce_RTX_4090"]
)
def test_a_name_is_found_however_it_is_written(text: str) -> None:
    assert devices.find(text) is devices.DEVICES["rtx4090"]


def test_other_names_are_those_of_the_table() -> None:
    assert set(devices.ALIASES.values()) <= set(devices.DEVICES)
    assert devices.find("a100-80gb") is devices.find("A100")


def test_bytes_are_all_usable_and_the_class_can_be_said() -> None:
    gpu = devices.find("24GiB", cc="8.6", sms=82)
    assert (gpu.memory, gpu.usable, gpu.cc, gpu.sms) == (24 << 30, 24 << 30, (8, 6), 82)
    assert gpu.threads_per_sm == 1536
    assert devices.find(7 << 30).sms == devices.TYPICAL.sms


def test_a_named_gpu_leaves_room_for_the_context() -> None:
    for gpu in devices.DEVICES.values():
        assert gpu.memory - gpu.usable == devices.CONTEXT
        assert gpu.threads_per_sm in (1024, 1536, 2048)


@pytest.mark.parametrize(
    ("text", "near"), [("h10", "h100"), ("rtx 409", "rtx4090"), ("a10o", "a100"), ("L40", "l40s")]
)
def test_an_unknown_name_lists_near_ones(text: str, near: str) -> None:
    with pytest.raises(ValueError, match=rf"near names are .*\b{near}\b.*--cc 8.9"):
        devices.find(text)


def test_a_name_that_is_like_none_lists_a_few() -> None:
    with pytest.raises(ValueError, match=r"such are a100, .*, rtx4090, and bfc predict --help"):
        devices.find("xyzzy")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("24 GiBs",), "is not a size"),
        ((0,), "0 bytes holds nothing"),
        (("4090",), r"4090 bytes\? Write 4090MiB, or the name of a GPU: rtx4090"),
        (("24",), r"24 bytes\? Write 24GiB"),
        ((-1,), "between 0"),
        (("h100", "nine"), "write it as 9.0"),
        (("h100", "9"), "write it as 9.0"),
        (("h100", "99.0"), "not a compute capability that"),
        (("h100", None, 0), "at least 1 multiprocessor"),
    ],
)
def test_a_wrong_number_is_said(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        devices.find(*arguments)  # type: ignore[arg-type]
