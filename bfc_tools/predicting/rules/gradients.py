"""Gradients that PyTorch computes in another way for subclasses of tensors, as fake ones are.

From torch/csrc/autograd/FunctionsManual.cpp (prod_backward) and ATen/native/ReduceOps.cpp
(cumprod_backward): on a GPU they ask
whether there is a zero, and divide if there is none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bfc.libraries import torch
from bfc_tools.predicting.rules.interface import on_cuda
from bfc_tools.predicting.rules.operators import around, file
from bfc_tools.predicting.rules.stand_ins import standing_in


@around(
    source=(
        file("torch/csrc/autograd/FunctionsManual.cpp", "prod_backward", read="2.6.0"),
        file("ATen/native/ReduceOps.cpp", "cumprod_backward", read="2.6.0"),
    )
)
@contextmanager
def of_products(recorder: Any) -> Iterator[None]:
    """No element is zero: the gradient of a product, or of a running one, is a quotient."""
    product = functools.partial(_with_gradient, _of_product, recorder)
    running = functools.partial(_with_gradient, _of_running_product, recorder)
    with (
        standing_in("prod", torch, torch.Tensor, of=product),
        standing_in("cumprod", torch, torch.Tensor, of=running),
    ):
        yield


def _with_gradient(gradient: Any, recorder: Any, build: Callable[..., Any]) -> Callable[..., Any]:
    class Product(torch.autograd.Function):  # type: ignore[misc]
        """The same operator with the gradient that it has on a GPU."""

        @staticmethod
        def forward(ctx: Any, tensor: Any, args: Any, kwargs: Any) -> Any:
            found = build(tensor, *args, **kwargs)
            ctx.save_for_backward(tensor, found)
            ctx.given = args, kwargs
            return found

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            args, kwargs = ctx.given
            recorder.assume("the gradient of a product: elements that are zero", 0)
            return gradient(grad, *ctx.saved_tensors, *args, **kwargs), None, None

    def call(*args: Any, **kwargs: Any) -> Any:
        tensor: Any = args[0] if args else kwargs.get("input")
        if (
            not on_cuda(tensor)
            or not tensor.dim()
            or not (tensor.requires_grad and torch.is_grad_enabled())
            or not {"dim", "keepdim", "input"}.issuperset(kwargs)
            or torch._C._are_functorch_transforms_active()
        ):
            return build(*args, **kwargs)
        named = {name: one for name, one in kwargs.items() if name != "input"}
        return Product.apply(tensor, args[1:], named)

    return call


def _of_product(
    grad: Any, tensor: Any, product: Any, dim: int | None = None, keepdim: bool = False
) -> Any:
    zeros = tensor == 0
    if dim is None:
        del zeros
        return grad * (product / tensor)
    if not keepdim:
        grad, product = grad.unsqueeze(dim), product.unsqueeze(dim)
    count = zeros.sum(dim, keepdim=True)
    count.sum()
    return grad * (product / tensor)


def _of_running_product(grad: Any, tensor: Any, product: Any, dim: int) -> Any:
    if tensor.numel() <= 1 or tensor.shape[dim] == 1:
        return grad
    weighted = product * grad
    zeros = tensor == 0
    zeros.any()
    backwards = weighted.flip(dim)
    sums = backwards.cumsum(dim)
    forwards = sums.flip(dim)  # in C++ all of a chain of calls live until its end
    del backwards, sums
    return forwards.div(tensor)
