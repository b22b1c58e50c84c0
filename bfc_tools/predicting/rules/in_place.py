"""What gradients do in place on a GPU, and not for subclasses of tensors, as fake ones are
(`isTensorSubclassLike`): the recorder lets the new memory take the place of the old one.
"""

from __future__ import annotations

from bfc_tools.predicting.rules.operators import changes_in, file, mark

#: Functions whose gradient does not fill its zeros in place.
FILLS_NO_ZEROS = frozenset(("ScatterReduceBackward0",))
#: The function that changes a part of a tensor in place.
COPY_SLICES = "torch::autograd::CopySlices"

FORMULAS = file("torch/csrc/autograd/FunctionsManual.cpp", read="2.6.0")

# two gradients of one tensor are added up
mark(
    "adds_gradients",
    "aten::add.Tensor",
    source=file("torch/csrc/autograd/input_buffer.cpp", "accumulate", read="2.6.0"),
)
mark("makes_zeros", "aten::new_zeros", "aten::zeros", "aten::zeros_like", source=FORMULAS)
mark(
    "fills_zeros",
    *("aten::scatter", "aten::scatter_add", "aten::index_put", "aten::index_add"),
    *("aten::index_fill", "aten::masked_scatter", "aten::put"),
    source=FORMULAS,
)
changes_in(
    ("BinaryCrossEntropyWithLogitsBackward0",),
    *("aten::sub", "aten::mul"),
    source=file(
        "torch/csrc/autograd/FunctionsManual.cpp",
        "binary_cross_entropy_with_logits_backward",
        read="2.6.0",
    ),
)
changes_in(
    ("MaxBackward1", "MinBackward1", "MedianBackward0"),
    "aten::logical_and",
    source=file(
        "torch/csrc/autograd/FunctionsManual.cpp", "evenly_distribute_backward", read="2.6.0"
    ),
)
# Gradients of views take no memory, unless the view was changed in place after it was made. Of
# tensors that are no subclasses PyTorch only knows then how the view lies in its base, and copies
# the gradient.
mark(
    "is_view",
    *("aten::view", "aten::_unsafe_view", "aten::permute", "aten::transpose", "aten::t"),
    *("aten::squeeze", "aten::unsqueeze"),
    source=(
        file("torch/csrc/autograd/variable.cpp", "grad_fn", read="2.6.0"),
        file("torch/csrc/autograd/FunctionsManual.cpp", "as_strided_backward", read="2.6.0"),
    ),
)
