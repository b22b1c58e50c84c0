"""What operators return is kept by their arguments: it is what PyTorch says without that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import bfc

CALLS: list[Callable[[Any], Any]] = [
    lambda x: x + 1,
    lambda x: x + 1.5,
    lambda x: x + True,
    lambda x: x * x,
    lambda x: x.t(),
    lambda x: x.view(torch.int32),
    lambda x: x.reshape(-1),
    lambda x: x.detach(),
    lambda x: x.clone(),
    lambda x: x.contiguous(),
    lambda x: x.as_strided((2, 2), (1, 2), 1),
    lambda x: x.expand(3, *x.shape),
    lambda x: x[1:],
    lambda x: torch.empty_like(x),
    lambda x: x.to("cpu"),
    lambda x: x.conj(),
    lambda x: x.imag,
    lambda x: torch.cat([x, x]),
    lambda x: torch.cat((x, x), 1),
    lambda x: x.split(2),
    lambda x: x.max(0),
    lambda x: torch.ops.aten._unsafe_view(x, (x.numel(),)),
    lambda x: x.add_(1),
    lambda x: x.sum(dtype=torch.float64),
]


def tensors() -> Iterator[torch.Tensor]:
    """Tensors that differ in one thing from another one."""
    for dtype in (torch.float32, torch.float16, torch.complex64, torch.int64):
        yield torch.empty(4, 4, dtype=dtype, device="cuda")
    yield torch.empty(4, 4)
    yield torch.empty(4, 6, device="cuda")
    yield torch.empty(4, 4, device="cuda").t()
    yield torch.empty(5, 4, device="cuda")[1:]
    yield torch.empty(5, 4, device="cuda")[:4]
    yield torch.empty(4, 4, device="cuda", requires_grad=True)
    yield torch.empty(4, 4, device="cuda", requires_grad=True) * 2
    yield torch.empty(4, 4, dtype=torch.complex64, device="cuda").conj()
    yield torch.empty(4, 4, dtype=torch.complex64, device="cuda").conj().imag
    yield torch.empty(4, 4, dtype=torch.complex64, device="cuda").imag
    yield torch.tensor([[1.0] * 4] * 4)
    with torch.inference_mode():
        yield torch.empty(4, 4, device="cuda")


def seen(value: Any, given: torch.Tensor) -> Any:
    """All that is to be seen of a result."""
    if not isinstance(value, torch.Tensor):
        return [seen(one, given) for one in value]
    storage = value.untyped_storage()
    shape = (value.dtype, value.shape, value.stride(), value.storage_offset())
    where = (value.device, storage.nbytes(), storage._cdata == given.untyped_storage()._cdata)
    marks = (value.is_conj(), value.is_neg(), value.is_inference(), value.requires_grad)
    attributes = {name for name, one in vars(value).items() if one is not None}
    return shape, where, marks, value is given, type(value), attributes, value.constant is None


def outcome(call: Callable[[Any], Any], given: torch.Tensor) -> Any:
    try:
        return seen(call(given), given)
    except (RuntimeError, TypeError, ValueError) as error:  # cannot be viewed, say
        return type(error)


@pytest.mark.parametrize("inference", [False, True])
def test_what_is_kept_is_what_pytorch_says(inference: bool) -> None:
    with bfc.predict("h100"), torch.inference_mode(inference):
        mode = torch.empty(1, device="cuda").fake_mode
        hits, given = mode.cache_hits, list(tensors())
        for call in CALLS:
            mode.cache_enabled = False
            expected = [outcome(call, one) for one in given]
            mode.cache_enabled = True
            for _ in range(2):
                assert [outcome(call, one) for one in given] == expected
        assert mode.cache_hits > hits + len(CALLS) * len(given) // 2
