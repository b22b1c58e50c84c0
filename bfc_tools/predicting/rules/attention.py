"""What the kernels of `scaled_dot_product_attention` take beside their results.

From PyTorch's ATen/native/transformers/cuda/flash_attn/flash_api.cpp (mha_fwd, set_params_splitkv,
mha_bwd), attention.cu and attention_backward.cu (the memory-efficient kernel), and
mem_eff_attention/kernel_forward.h and kernel_backward.h (its accumulators, and the list of kernels
in mem_eff_attention/kernels). The workspace of cuDNN's own kernel is not known.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bfc.libraries import torch
from bfc_tools.predicting.devices import GPU
from bfc_tools.predicting.rules.interface import Call, Release, Workspace
from bfc_tools.predicting.rules.operators import before, file, kernel, order, rule
from bfc_tools.predicting.rules.tensors import argument, div_up, is_contiguous, nbytes, type_name

FLASH_API_MHA_BWD = file(
    "ATen/native/transformers/cuda/flash_attn/flash_api.cpp", "mha_bwd", read="2.6.0"
)
ATTENTION_BACKWARD = file("ATen/native/transformers/cuda/attention_backward.cu", read="2.6.0")
ATTENTION = file("ATen/native/transformers/cuda/attention.cu", read="2.6.0")
SEEN = "an H200 with cuDNN 9.19"
SEEN_ON_DRIVER = "the emulated driver, with PyTorch 2.11 and 2.15"

FLOAT = 4
#: The rows of a block of FlashAttention, which its buffers are rounded to.
FLASH_ROWS = 128
MOST_SPLITS = 128
#: The head from which the efficient kernel cannot keep its output in registers.
IN_REGISTERS = 128


def _rounded(size: int, step: int) -> int:
    return div_up(size, step) * step


# -- FlashAttention ---------------------------------------------------------------------------


def splits(batch: int, heads: int, queries: int, keys: int, head: int, sms: int) -> int:
    """In how many parts FlashAttention goes over the keys, so that all multiprocessors work."""
    block = 256 if head <= 64 else 128 if head <= 128 else 64
    blocks = div_up(keys, block)
    tasks = batch * heads * div_up(queries, 64)
    places = 2 * sms
    if tasks >= 0.8 * places:
        return 1
    most = min(MOST_SPLITS, places, blocks)
    efficiency = {}
    for count in range(1, most + 1):
        if count == 1 or div_up(blocks, count) != div_up(blocks, count - 1):
            waves = tasks * count / places
            efficiency[count] = waves / -(-waves // 1)
    best = max(efficiency.values(), default=0.0)
    return next((count for count, one in efficiency.items() if one >= 0.85 * best), 1)


def _flash_head(head: int) -> int:
    return _rounded(_rounded(head, 8), 32 if head <= 128 else 64)


@rule(
    "aten::_scaled_dot_product_flash_attention",
    source=file(
        "ATen/native/transformers/cuda/flash_attn/flash_api.cpp",
        "mha_fwd",
        "set_params_splitkv",
        read="2.6.0",
    ),
)
def flash(call: Call) -> Iterator[Workspace | Release]:
    """Partial sums, where the keys are split; not with dropout."""
    query, key = call.args[0], call.args[1]
    batch, heads, queries, head = query.shape
    if argument(call, "dropout_p", 0.0):
        return
    count = splits(batch, heads, queries, key.shape[2], head, call.gpu.sms)
    if count > 1:
        rows = count * batch * heads * queries * FLOAT
        yield Workspace(rows, what="sums of the splits")
        yield Workspace(rows * _flash_head(head), what="outputs of the splits")


def _rows_first(tensor: Any) -> Any:
    """The same tensor with the sequence before the heads, as the kernels see it."""
    return tensor.transpose(1, 2)


@before(
    "aten::_scaled_dot_product_flash_attention_backward",
    "aten::_scaled_dot_product_efficient_attention_backward",
    source=(FLASH_API_MHA_BWD, ATTENTION_BACKWARD),
)
def in_order(call: Call) -> Iterator[Workspace | Release]:
    """Copies of the gradient and of the output, where they have other strides."""
    names = [("grad_out" if "grad_out" in _names(call) else "grad_out_"), "out"]
    if "efficient" in call.func._schema.name:
        names = names[:1]
    for name in names:
        tensor = argument(call, name)
        if tensor is not None and not is_contiguous(_rows_first(tensor)):
            yield Workspace(nbytes(tensor), what=f"{name.rstrip('_')} in order")


def _names(call: Call) -> set[str]:
    return {one.name for one in call.func._schema.arguments}


@rule("aten::_scaled_dot_product_flash_attention_backward", source=FLASH_API_MHA_BWD)
def flash_backward(call: Call) -> Iterator[Workspace | Release]:
    """The gradient of the queries in 32 bits, and of each head where heads share keys."""
    query, key = argument(call, "query"), argument(call, "key")
    batch, heads, queries, head = query.shape
    rows = batch * heads * _rounded(queries, FLASH_ROWS)
    yield Workspace(rows * FLOAT, what="sums of rows")
    yield Workspace(rows * _flash_head(head) * FLOAT, what="gradient of queries")
    if key.shape[1] != heads:
        size = batch * key.shape[2] * heads * _rounded(head, 8) * int(query.element_size())
        yield Workspace(size, what="gradient of keys for each head")
        yield Workspace(size, what="gradient of values for each head")


# -- the memory-efficient kernel --------------------------------------------------------------


@rule(
    "aten::_scaled_dot_product_efficient_attention",
    source=(
        ATTENTION,
        file("ATen/native/transformers/cuda/mem_eff_attention/kernel_forward.h", read="2.15.0"),
    ),
)
def efficient(call: Call) -> Iterator[Workspace | Release]:
    """The output in 32 bits, where a head does not fit into registers."""
    query, value = call.args[0], call.args[2]
    head = value.shape[-1]
    if head > IN_REGISTERS and type_name(query) != "float32":
        batch, heads, queries, _ = query.shape
        yield Workspace(batch * heads * queries * head * FLOAT, what="output in 32 bits")


@kernel(
    "aten::_scaled_dot_product_efficient_attention",
    source=ATTENTION,
    seen=SEEN_ON_DRIVER,
)
def efficient_results(call: Call) -> Any:
    """The state of the random numbers lies on the host, or, since 2.14, on the GPU if nothing is
    dropped."""
    output, sums, *_ = call.func(*call.args, **call.kwargs)
    on_gpu = call.release.shares_heads_efficiently and not argument(call, "dropout_p")
    place = output.device if on_gpu else "cpu"
    seed, offset = (torch.empty((), dtype=torch.int64, device=place) for _ in range(2))
    return output, sums, seed, offset


order({"aten::_scaled_dot_product_efficient_attention": (2, 3, 0, 1)}, seen=SEEN_ON_DRIVER)


# the state of the random numbers first; from attention.cu and ATen/native/cudnn/MHA.cpp
order(
    {"aten::_scaled_dot_product_cudnn_attention": (6, 7, 0, 1)},
    source=file("ATen/native/transformers/cuda/attention.cu", read="2.6.0"),
)


@kernel(
    "aten::_scaled_dot_product_cudnn_attention",
    source=file(
        "ATen/native/transformers/cuda/attention.cu",
        "_scaled_dot_product_cudnn_attention_cuda",
        read="2.6.0",
    ),
)
def cudnn_results(call: Call) -> Any:
    """The sums of rows are there only for a gradient (attention.cu, compute_logsumexp)."""
    output, sums, *others = call.func(*call.args, **call.kwargs)
    if not argument(call, "compute_log_sumexp"):
        sums = sums.new_empty(0)
    return output, sums, *others


#: What cuDNN 9.19 asked for in each pass on an H200, in the backward pass beside its sums.
CUDNN_AT_LEAST = 256


@rule("aten::_scaled_dot_product_cudnn_attention", seen=SEEN)
def cudnn_forward(call: Call) -> Iterator[Workspace | Release]:
    """A workspace of cuDNN's; the one query of a text that is generated needs none."""
    if call.args[0].shape[2] > 1:
        yield Workspace(CUDNN_AT_LEAST, what="cuDNN's workspace")


@rule("aten::_scaled_dot_product_cudnn_attention_backward", seen=SEEN)
def cudnn_backward(call: Call) -> Iterator[Workspace | Release]:
    """The gradient of the queries in 32 bits, and a sum for each row; the gradients of keys and
    values for each head, where heads share them: as measured there."""
    query, key, value = (argument(call, name) for name in ("query", "key", "value"))
    batch, heads, queries, head = query.shape
    size = batch * heads * queries * (head + 1) * FLOAT
    if key.shape[1] != heads:
        each = int(key.shape[3]) + int(value.shape[3])
        size += batch * heads * key.shape[2] * each * int(key.element_size())
    yield Workspace(size + CUDNN_AT_LEAST, what="cuDNN's workspace")


@dataclass(frozen=True)
class Block:
    """The kernel of a backward pass: rows of queries and of keys that it works on at once."""

    queries: int
    keys: int
    largest_head: int
    capability: int
    half: bool

    @property
    def in_registers(self) -> bool:
        """Whether the gradients of keys and values stay in registers."""
        return self.half and self.largest_head <= self.queries

    @property
    def splits_keys(self) -> bool:
        """Whether several blocks can share the queries."""
        return self.capability >= 70


def backward_block(gpu: GPU, half: bool, head: int, dropout: bool) -> Block:
    """The first kernel of the list that the GPU has the shared memory for."""
    cc = gpu.cc[0] * 10 + gpu.cc[1]
    generation = 80 if cc >= 80 else 75 if cc >= 75 else 70 if cc >= 70 else 50
    little_memory = cc < 80 or cc in (86, 87, 89, 120, 121)
    sizes = [(32, 64, 64), (64, 64, 64)]
    if half and cc in (86, 89) and not dropout:
        sizes.append((96, 128, 64))
    if cc >= 80 and not little_memory:
        sizes.append((128, 128, 128 if half else 64))
    if generation == 70 and half:
        sizes.append((128, 128, 64))
    sizes.append((128, 64, 64))
    sizes.append((65536, 64 if little_memory else 128, 64))
    largest, queries, keys = next(one for one in sizes if one[0] >= head)
    return Block(queries, keys, largest, generation, half)


def backward_workspace(
    block: Block, batch: int, heads: int, queries: int, keys: int, head: int, value_head: int
) -> int:
    """The accumulators of the efficient kernel's backward pass, in bytes."""
    count = div_up(keys, block.keys) if block.splits_keys else 1
    if batch * heads >= 256 and keys <= 2 * block.keys:
        count = 1
    accumulates = block.half and not block.in_registers
    if accumulates:
        count = min(count, 200 // (batch * heads))
    count = max(count, 1)
    elements = 0
    if accumulates:
        elements += count * block.keys * _rounded(head, block.queries)
        elements += count * block.keys * _rounded(value_head, block.queries)
    if block.splits_keys or block.half:
        tile = 4 + block.queries * block.keys  # a lock, a counter, and the sums
        elements += div_up(queries, block.queries) * div_up(head, block.keys) * tile
    return batch * heads * _rounded(elements, 4) * FLOAT


@rule(
    "aten::_scaled_dot_product_efficient_attention_backward",
    source=(
        ATTENTION_BACKWARD,
        file("ATen/native/transformers/cuda/mem_eff_attention/kernel_backward.h", read="2.15.0"),
    ),
)
def efficient_backward(call: Call) -> Iterator[Workspace | Release]:
    """A sum for each row, and accumulators; where heads share keys, gradients of each head, as the
    parameters of the kernel say (nHq in kernel_backward.h): no GPU was asked."""
    query, key, value = (argument(call, name) for name in ("query", "key", "value"))
    batch, heads, queries, head = query.shape
    half = type_name(query) != "float32"
    largest = max(head, value.shape[-1])
    block = backward_block(call.gpu, half, largest, bool(argument(call, "dropout_p", 0.0)))
    rows = batch * heads * queries
    sums = Workspace(rows * FLOAT, what="sums of rows")
    if half and (block.in_registers or block.capability != 70):
        yield sums
    else:
        yield from _sums_of_rows(rows, value.shape[-1], sums)
    if key.shape[1] != heads:
        for one, what in ((key, "keys"), (value, "values")):
            size = nbytes(one) // one.shape[1] * heads
            yield Workspace(size, what=f"gradient of {what} for each head")
    size = backward_workspace(block, batch, heads, queries, key.shape[2], head, value.shape[-1])
    yield Workspace(size, what="accumulators")
    yield Release(sums)


@kernel("aten::_scaled_dot_product_efficient_attention_backward", source=ATTENTION_BACKWARD)
def efficient_gradients(call: Call) -> Any:
    """Keys and values that heads share have gradients like themselves: a build before 2.14, asked
    for later rules, gives those of each head."""
    found = call.func(*call.args, **call.kwargs)
    given = argument(call, "key"), argument(call, "value")
    shared = [
        gradient if gradient is None or gradient.shape == one.shape else _like(one)
        for gradient, one in zip(found[1:3], given, strict=True)
    ]
    return found[0], *shared, *found[3:]


def _like(tensor: Any) -> Any:
    """A new tensor of that shape, with the sequence before the heads."""
    return _rows_first(tensor.new_empty(_rows_first(tensor).shape))


def _sums_of_rows(rows: int, head: int, in_order: Workspace) -> Iterator[Workspace | Release]:
    """The products of gradient and output, their sums, and these in order."""
    product = Workspace(rows * head * FLOAT, what="gradient times output")
    sums = Workspace(rows * FLOAT, what="sums of rows out of order")
    yield product
    yield sums
    yield in_order
    yield Release(sums)
    yield Release(product)


# -- flex_attention, which is made to be compiled -----------------------------------------------


@rule(
    "higher_order::flex_attention",
    "higher_order::flex_attention_backward",
    source=file("torch/_inductor/kernel/flex/flex_attention.py", read="2.15.0"),
)
def flex(call: Call) -> Iterator[Workspace | Release]:
    """As the compiled kernel, which holds no scores; for the gradient a sum of each row. From
    torch/_inductor/kernel/flex/flex_attention.py."""
    call.assume("flex_attention: as its compiled kernel", "no scores")
    if call.func.name().endswith("_backward"):
        batch, heads, queries, _ = call.args[0].shape
        yield Workspace(batch * heads * queries * FLOAT, what="sums of rows")
