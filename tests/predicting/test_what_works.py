"""What PyTorch decides and a program reads, as on a GPU: each choice by what it costs in memory."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
import torch.nn.utils.prune
from torch import nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import bfc
from bfc_tools.predicting import recorder as recorders
from bfc_tools.predicting import session
from bfc_tools.predicting.rules import recurrent, tensors

MIB = 1 << 20
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))


def sizes(run: Any) -> list[int]:
    """The allocations in their order."""
    trace = run.trace
    return [int(size) for op, size in zip(trace.op, trace.size, strict=True) if op == 0]


def assumed(run: Any) -> dict[str, Any]:
    return {one["what"]: one["value"] for one in run.assumptions}


def heads(dtype: torch.dtype = torch.bfloat16, length: int = 128) -> torch.Tensor:
    made = torch.randn(2, length, 8, 64, device="cuda", dtype=dtype)
    return made.transpose(1, 2).requires_grad_()


@pytest.mark.parametrize(
    ("device", "dtype", "name"),
    [
        ("a100", torch.bfloat16, "Flash"),
        # since the release whose cuDNN is new enough
        ("h100", torch.bfloat16, "Cudnn" if TORCH >= (2, 11) else "Flash"),
        ("a100", torch.float32, "Efficient"),
        ("t4", torch.float16, "Efficient"),
    ],
)
def test_attention_takes_the_gpu_s_kernel(device: str, dtype: torch.dtype, name: str) -> None:
    with bfc.predict(device) as run:
        query = heads(dtype, 1024)
        found = functional.scaled_dot_product_attention(query, query, query, is_causal=True)
        assert f"ScaledDotProduct{name}Attention" in found.grad_fn.name()
        found.sum().backward()
    assert max(sizes(run)) < 2 * 8 * 1024 * 1024  # no scores


def test_attention_lets_its_sums_go_before_the_state_of_random_numbers() -> None:
    """As a tuple of C++ does: what is not kept goes in the order of the results."""
    with bfc.predict("a100") as run, torch.no_grad():
        query = heads()
        functional.scaled_dot_product_attention(query, query, query)
    trace = run.trace
    events = list(zip(trace.op, trace.id, trace.size, strict=True))
    births = {int(one): int(size) for op, one, size in events if not op}
    freed = [births[int(one)] for op, one, _ in events if op == 1]
    assert freed.index(2 * 8 * 128 * 4) < freed.index(8)


@pytest.mark.skipif(TORCH < (2, 11), reason="takes another kernel")
def test_cudnn_sums_rows_only_for_a_gradient() -> None:
    with bfc.predict("h100") as run, torch.no_grad():
        query = heads()
        functional.scaled_dot_product_attention(query, query, query)
    assert 2 * 8 * 128 * 4 not in sizes(run)


def test_attention_adds_its_mask_in_place() -> None:
    """Where all scores are held, there are two of them: before and after the softmax."""
    with bfc.predict("a100") as run, nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        query = heads(torch.float32)
        mask = torch.empty(2, 8, 128, 128, device="cuda")
        functional.scaled_dot_product_attention(query, query, query, mask)
    assert sizes(run).count(2 * 8 * 128 * 128 * 4) == 3  # with the mask itself


@pytest.mark.parametrize("name", ["silu", "mish"])
def test_gradients_of_activations_are_one_kernel(name: str) -> None:
    """Though PyTorch could compose them of six results: both have a kernel for CUDA."""
    with bfc.predict("a100") as run:
        tensor = torch.ones(MIB, device="cuda", requires_grad=True)
        getattr(functional, name)(tensor).backward(torch.ones(MIB, device="cuda"))
    assert sizes(run) == [4 * MIB] * 4


@pytest.mark.skipif(TORCH < (2, 9), reason="has no kernel of its own")
def test_rms_norm_is_one_kernel() -> None:
    with bfc.predict("a100") as run:
        norm = nn.RMSNorm(1024, device="cuda", dtype=torch.bfloat16)
        norm(torch.empty(8, 128, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True))
    assert sizes(run) == [2 * 1024, 2 * MIB, 2 * MIB, 8 * 128 * 4]


def test_gradients_of_a_convolution_come_with_a_workspace_each() -> None:
    """As cuDNN's two calls on an H200, but for 131 bytes of one: the weight's gradient is not
    there yet when that of the images is computed."""
    with bfc.predict("h200") as run:
        images = torch.empty(4, 128, 64, 64, device="cuda", requires_grad=True)
        conv = nn.Conv2d(128, 128, 3, padding=1, bias=False, device="cuda")
        made = conv(images)
        before = len(run.trace)
        made.backward(torch.empty_like(made))
    image, weight = 4 * 4 * 128 * 64 * 64, 4 * 128 * 128 * 9
    work = 2 * image + weight + 16
    found = sizes(run)[-5:]
    work_too = pytest.approx(work, abs=131)  # where cuDNN is asked, these bytes are there
    assert found == [image, image, work_too, weight, pytest.approx(25625255, abs=64)]
    assert len(run.trace) - before == 5 + 3  # what was freed: both workspaces, and the gradient


def test_without_cudnn_an_image_becomes_columns() -> None:
    """For which the copy of images whose channels lie side by side is put in order first."""
    with bfc.predict("a100") as run, torch.backends.cudnn.flags(enabled=False):
        images = torch.empty(4, 16, 34, 34, device="cuda", requires_grad=True)
        conv = nn.Conv2d(16, 32, 3, bias=False, device="cuda")
        before = len(sizes(run))
        made = conv(images.to(memory_format=torch.channels_last))
        middle = len(sizes(run))
        assert made.is_contiguous()
        made.backward(torch.empty_like(made))
    image, weight, columns = 4 * 4 * 16 * 34 * 34, 4 * 32 * 16 * 9, 4 * 16 * 9 * 32 * 32
    result = 4 * 4 * 32 * 32 * 32
    workspace = 8519680
    assert sizes(run)[before:middle] == [image, image, result, columns, workspace]
    assert sizes(run)[middle:][:5] == [result, image, image, weight, columns]


def test_a_library_that_cannot_be_asked_is_named(monkeypatch) -> None:
    monkeypatch.setenv("BFC_CUDNN_LIBRARY", "/nowhere/libcudnn.so.9")
    with bfc.predict("h100") as run:
        nn.Conv2d(64, 64, 3, device="cuda")(torch.empty(4, 64, 32, 32, device="cuda"))
    assert "/nowhere/libcudnn.so.9" in run.unknown["aten::convolution"]


def test_a_network_allocates_in_the_order_of_cudnn_s_calls() -> None:
    """As on an H200: the workspace between results and reserve, and zeros for states whose
    gradients nobody asks for, two workspaces in the backward pass."""
    with bfc.predict("h200") as run:
        network = nn.LSTM(64, 64, device="cuda")
        data = torch.empty(10, 8, 64, device="cuda", requires_grad=True)
        before = len(sizes(run))
        output, _state = network(data)
        middle = len(sizes(run))
        output.backward(torch.empty_like(output))
    state, row = 8 * 64 * 4, 10 * 8 * 64 * 4
    weights = 4 * 64 * (64 + 64 + 2) * 4
    reserve = recurrent.reserve_bytes("lstm", 80, 64, 1, 1, 4, 0)
    network_of = ("lstm", weights, 80, 8, 64, 64, 1, 1, 4)
    work = recurrent.workspace_bytes(*network_of, train=True, dropout=False, packed=False)
    assert sizes(run)[before:middle] == [state, state, row, state, state, work, reserve]
    found = sizes(run)[middle + 1 :]
    assert found == [state, state, row, state, state, work, weights, work]


def test_a_network_of_sequences_first_turns_them_for_cudnn() -> None:
    """As on an H100: the first dropout makes a seed and a state, cuDNN gets the steps first, and
    gives them back first, so that the next layer copies them."""
    with bfc.predict("h100") as run:
        network = nn.GRU(64, 64, 2, batch_first=True, dropout=0.1, device="cuda")
        head = nn.Linear(64, 64, device="cuda")
        data = torch.empty(8, 10, 64, device="cuda", requires_grad=True)
        before = len(sizes(run))
        output, _state = network(data)
        assert output.transpose(0, 1).is_contiguous()
        middle = len(sizes(run))
        output.backward(torch.empty(8, 10, 64, device="cuda"))
        end = len(sizes(run))
        network(data)
        again = sizes(run)[end:]
        head(output)
    state, row = 2 * 8 * 64 * 4, 10 * 8 * 64 * 4
    weights = 2 * 3 * 64 * (64 + 64 + 2) * 4
    reserve = recurrent.reserve_bytes("gru", 80, 64, 2, 1, 4, 80)
    network_of = ("gru", weights, 80, 8, 64, 64, 2, 1, 4)
    work = recurrent.workspace_bytes(*network_of, train=True, dropout=True, packed=False)
    forward = [row, row, state, work, reserve]
    assert sizes(run)[before:middle] == [state, 8, 132 * 48 * 1024, *forward]
    # the gradient of the data has its steps first, so that it is copied
    backward = [state, row, row, row, state, work, row, weights, work, row]
    assert sizes(run)[middle + 1 : end] == backward
    assert again == [state, *forward]
    assert sizes(run)[end + len(again)] == row


def test_gradients_of_single_channels_begin_with_the_weight() -> None:
    """PyTorch convolves them itself, without a workspace."""
    with bfc.predict("h100") as run:
        conv = nn.Conv2d(32, 32, 3, padding=1, groups=32, bias=False, device="cuda")
        made = conv(torch.empty(4, 32, 64, 64, device="cuda", requires_grad=True))
        made.backward(torch.empty_like(made))
    assert sizes(run)[-3:] == [2 * MIB, 4 * 32 * 9, 2 * MIB]


def test_weights_of_one_pixel_tell_their_layout_to_a_convolution() -> None:
    """As on an H100: both layouts lie alike, but the strides are those of channels last."""
    with bfc.predict("h100") as run:
        layer = nn.Conv2d(64, 128, 1, bias=False, device="cuda", dtype=torch.bfloat16)
        images = torch.empty(4, 64, 8, 8, device="cuda", dtype=torch.bfloat16)
        assert layer(images).is_contiguous()
        layer = layer.to(memory_format=torch.channels_last)
        before = len(sizes(run))
        made = layer(images)
        assert made.is_contiguous(memory_format=torch.channels_last)
    assert sizes(run)[before:][:2] == [4 * 64 * 64 * 2, 4 * 128 * 64 * 2]


@pytest.mark.parametrize("dims", [2, 3])
def test_strides_suggest_the_layout_that_pytorch_takes_them_for(dims: int) -> None:
    """A conversion of what has gaps keeps the layout that PyTorch sees: for all orders."""
    layout = torch.channels_last if dims == 2 else torch.channels_last_3d
    pixels = list(itertools.product((1, 2), repeat=dims))
    shapes = [(*begin, *end) for begin in ((3, 2), (1, 2), (3, 1)) for end in pixels]
    for shape, order in itertools.product(shapes, itertools.permutations(range(dims + 2))):
        strides, step = [0] * len(shape), 2
        for dim in order:
            strides[dim], step = step, step * shape[dim]
        made = torch.empty_strided(shape, strides)
        last = torch.empty(shape, memory_format=layout).stride()
        if last != torch.empty(shape).stride():
            kept = made.to(torch.float64).stride() == last
            assert tensors.suggests_channels_last(made) == kept, (shape, strides)


def test_the_gradient_of_what_was_concatenated_is_copied() -> None:
    """A part of the channels of a gradient is not contiguous, and the kernel wants it so."""
    with bfc.predict("a100") as run:
        small = torch.empty(2, 8, 16, 16, device="cuda", requires_grad=True)
        large = functional.interpolate(small, scale_factor=2, mode="bilinear")
        both = torch.cat([large, torch.empty_like(large)], 1)
        before = len(sizes(run))
        both.backward(torch.empty_like(both))
    small, large = 2 * 8 * 16 * 16 * 4, 2 * 8 * 32 * 32 * 4
    assert sizes(run)[before:] == [2 * large, small, large]


def test_the_gradient_of_binary_cross_entropy_changes_what_it_has() -> None:
    with bfc.predict("a100") as run:
        logits = torch.empty(MIB, device="cuda", requires_grad=True)
        loss = functional.binary_cross_entropy_with_logits(logits, torch.empty_like(logits))
        before = len(sizes(run))
        loss.backward()
    assert sizes(run)[before:] == [4, 4 * MIB]


def test_a_mask_becomes_places() -> None:
    """Of two dimensions in one tensor, before the elements; one number of the host needs none."""
    with bfc.predict("a100") as run:
        tensor = torch.empty(64, 1024, device="cuda")
        mask = torch.empty(64, 1024, device="cuda", dtype=torch.bool)
        before = len(sizes(run))
        tensor[mask] = 0.0
        assert len(sizes(run)) == before
        tensor[mask]
        found = sizes(run)[before:]
        torch.masked_select(tensor, mask)
        again = sizes(run)[before + len(found) :]
    assert found[0] == 4
    assert found[2::2] == [2 * 8 * 65536, 4 * 65536]
    assert found == again
    assert list(assumed(run)) == ["a mask, or nonzero: all elements"]


def test_flash_keeps_its_sums_and_the_state_of_random_numbers() -> None:
    with bfc.predict("a100") as run:
        query = heads()
        before = len(sizes(run))
        found = functional.scaled_dot_product_attention(query, query, query)
        assert sizes(run)[before:] == [2 * 8 * 128 * 64 * 2, 2 * 8 * 128 * 4, 16, 8]
        del found


def test_attention_under_autocast_and_of_odd_heads() -> None:
    with bfc.predict("a100") as run, torch.autocast("cuda", dtype=torch.bfloat16):
        one = torch.randn(2, 4, 64, 36, device="cuda", requires_grad=True)
        found = functional.scaled_dot_product_attention(one, one, one)
        assert (found.dtype, found.shape) == (torch.bfloat16, one.shape)
        found.float().sum().backward()
        assert one.grad is not None
    assert 2 * 4 * 64 * 40 * 2 in sizes(run)


def test_causal_biases_take_the_gpu_s_kernels() -> None:
    with bfc.predict("a100") as run:
        for dtype, flash in ((torch.bfloat16, True), (torch.float32, False)):
            query, short = heads(dtype, 1024), heads(dtype, 256)
            for bias, given, fast in (
                (causal_upper_left(1024, 1024), query, flash),
                (causal_lower_right(256, 1024), short, flash),
                (causal_upper_left(256, 1024), short, False),
            ):
                found = functional.scaled_dot_product_attention(given, query, query, bias)
                assert ("Flash" if fast else "Efficient") in found.grad_fn.next_functions[0][
                    0
                ].name() + found.grad_fn.name()
                found.sum().backward()
    assert max(sizes(run)) < 2 * 8 * 256 * 1024 * 4  # no scores


@pytest.mark.parametrize(
    ("as_torch", "dropout", "bytes_"), [("2.11", 0.0, 0), ("2.15", 0.0, 1024), ("2.15", 0.1, 0)]
)
def test_the_efficient_kernel_keeps_its_seeds(as_torch: str, dropout: float, bytes_: int) -> None:
    """Of which nothing is drawn without dropout: since 2.14 they lie on the GPU then."""
    with bfc.predict("t4", as_torch=as_torch):
        x = torch.empty(2, 8, 64, 32, device="cuda", requires_grad=True)
        before = torch.cuda.memory_allocated()
        made = torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=dropout)
        sums = 2 * 8 * 64 * 4
        assert torch.cuda.memory_allocated() - before == made.nbytes + sums + bytes_


def test_a_mask_of_booleans_is_padded_for_the_efficient_kernel() -> None:
    with bfc.predict("a100") as run:
        query, mask = heads(), torch.ones(2, 1, 128, 127, dtype=torch.bool, device="cuda")
        key = heads(length=127)
        functional.scaled_dot_product_attention(query, key, key, attn_mask=mask)
    assert {2 * 128 * 127 * 2, 2 * 128 * 128 * 2} <= set(sizes(run))


def test_a_kernel_that_the_program_forbids_is_not_taken() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with bfc.predict("a100") as run:
        query = heads(torch.bfloat16, 256)
        with sdpa_kernel(SDPBackend.MATH):
            functional.scaled_dot_product_attention(query, query, query)
    assert 2 * 8 * 256 * 256 * 4 in sizes(run)


def test_attention_in_a_module_asks_the_same() -> None:
    with bfc.predict("a100") as run:
        layer = nn.MultiheadAttention(512, 8, batch_first=True, device="cuda")
        tokens = torch.randn(2, 512, 512, device="cuda")
        layer(tokens, tokens, tokens, need_weights=False)[0].sum().backward()
    assert 2 * 8 * 512 * 512 * 4 not in sizes(run)


def peak_of_step(**options: Any) -> int:
    with bfc.predict("a100"):
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4))).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), **options)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
        return torch.cuda.max_memory_allocated() - before


def test_optimizers_work_on_lists_unless_they_are_told_otherwise() -> None:
    each = 4 * MIB
    assert peak_of_step(fused=True) == 0
    assert peak_of_step(foreach=False) <= 3 * each
    assert peak_of_step() == peak_of_step(foreach=True) >= 4 * each


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
        (torch.optim.Adagrad, {}),
        (torch.optim.RMSprop, {}),
        (torch.optim.Adafactor, {}),
        (torch.optim.Adam, {"capturable": True}),
        (torch.optim.LBFGS, {}),
    ],
)
def test_optimizers_make_a_step(kind: Any, options: dict[str, Any]) -> None:
    with bfc.predict("a100"):
        layer = nn.Linear(8, 8).cuda()
        optimizer = kind(layer.parameters(), **options)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = layer(torch.randn(2, 8, device="cuda")).sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        assert optimizer.state


def test_a_scaler_makes_its_steps() -> None:
    with bfc.predict("a100"):
        layer = nn.Linear(64, 64).cuda()
        optimizer, scaler = torch.optim.Adam(layer.parameters()), torch.amp.GradScaler("cuda")
        with torch.autocast("cuda", dtype=torch.float16):
            loss = layer(torch.randn(2, 64, device="cuda")).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        assert len(optimizer.state) == 2


def test_images_whose_channels_lie_side_by_side_stay_so() -> None:
    with bfc.predict("a100") as run:
        layer = nn.Conv2d(8, 16, 3, bias=False).cuda().to(memory_format=torch.channels_last)
        images = torch.randn(2, 8, 10, 10, device="cuda")
        count = len(sizes(run))
        found = layer(images)  # cuDNN is given a copy
        assert found.is_contiguous(memory_format=torch.channels_last)
        assert sizes(run)[count:] == [2 * 8 * 100 * 4, 2 * 16 * 64 * 4]
    assert "aten::convolution" in run.unknown


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_network_is_one_call_of_cudnn(kind: Any) -> None:
    with bfc.predict("a100") as run:
        layer = kind(32, 64, 2, batch_first=True, bidirectional=True, dropout=0.1).cuda()
        found, _ = layer(torch.randn(4, 100, 32, device="cuda"))
        assert "CudnnRnn" in found.grad_fn.name()
        found.sum().backward()
        assert all(one.grad.shape == one.shape for one in layer.parameters())
    assert max(sizes(run)) > 4 * 100 * 64 * 2 * 2 * 4  # the reserve


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_one_step_of_a_recurrent_network(kind: Any) -> None:
    with bfc.predict("a100"):
        cell = kind(32, 64).cuda()
        found = cell(torch.randn(4, 32, device="cuda"))
        state = found[0] if isinstance(found, tuple) else found
        assert state.shape == (4, 64)
        state.sum().backward()
        assert all(one.grad.shape == one.shape for one in cell.parameters())


@pytest.mark.parametrize(("kind", "allocated"), [(nn.LSTMCell, [4, 1, 1]), (nn.GRUCell, [5, 1])])
def test_a_cell_allocates_what_it_keeps_before_its_state(kind: Any, allocated: list[int]) -> None:
    """As RNN.cu does, which returns it last."""
    with bfc.predict("a100") as run:
        kind(32, 64).cuda()(torch.randn(4, 32, device="cuda"))
    state = 4 * 64 * 4
    assert sizes(run)[-len(allocated) :] == [state * times for times in allocated]


def test_the_state_of_an_optimizer_is_copied_and_loaded() -> None:
    """Copies of its host tensors were once made of memory that fake tensors do not have."""
    with bfc.predict("a100"):
        layer = nn.Linear(64, 64).cuda()
        for options in ({}, {"fused": True}, {"capturable": True}):
            optimizer = torch.optim.Adam(layer.parameters(), **options)
            layer(torch.randn(2, 64, device="cuda")).sum().backward()
            optimizer.step()
            before = torch.cuda.memory_allocated()
            held = copy.deepcopy(optimizer.state_dict())
            assert torch.cuda.memory_allocated() - before >= 2 * 64 * 64 * 4
            optimizer.load_state_dict(held)
            del held
        twin = copy.deepcopy(layer)
        assert isinstance(twin.weight, nn.Parameter)
        assert twin.weight.grad is None  # as of parameters on a GPU
        tied = nn.ParameterList([layer.weight, layer.weight])
        copied = copy.deepcopy(tied)
        assert copied[0] is copied[1]


def test_scores_of_a_softmax_take_their_size_again_in_the_backward_pass() -> None:
    with bfc.predict("a100") as run:
        scores = torch.randn(64, 1024, device="cuda", requires_grad=True)
        loss = scores.softmax(-1).pow(2).sum()
        before = len(sizes(run))
        loss.backward()
    assert sizes(run)[before:].count(64 * 1024 * 4) >= 3  # two gradients, and their product


def test_what_is_composed_of_other_operators_is_taken_apart() -> None:
    with bfc.predict("a100") as run, torch.no_grad():
        logits, target = (torch.rand(64, 1024, device="cuda") for _ in range(2))
        before = len(sizes(run))
        functional.binary_cross_entropy_with_logits(logits, target)
        assert sizes(run)[before:].count(64 * 1024 * 4) >= 2
        before = len(sizes(run))
        logits.logsumexp(1)
        assert 64 * 1024 * 4 in sizes(run)[before:]


def test_a_binary_cross_entropy_keeps_the_memory_of_all_its_elements() -> None:
    with bfc.predict("a100"):
        given = torch.rand(64, 1024, device="cuda")
        before = torch.cuda.memory_allocated()
        loss = functional.binary_cross_entropy(given, given)
        assert loss.shape == ()
        assert torch.cuda.memory_allocated() - before == 64 * 1024 * 4


@pytest.mark.parametrize("known", [True, False])
def test_packed_sequences_are_as_long_as_said_or_as_the_longest(known) -> None:
    with bfc.predict("a100") as run:
        layer = nn.LSTM(32, 64).cuda()
        lengths = torch.tensor([16, 12, 8, 4])
        if not known:
            lengths = (lengths.cuda() * torch.rand((), device="cuda")).long().cpu()
        data = torch.randn(16, 4, 32, device="cuda", requires_grad=True)
        for first, given in ((False, data), (True, data.transpose(0, 1))):
            layer.batch_first = first
            packed = nn.utils.rnn.pack_padded_sequence(given, lengths, batch_first=first)
            assert packed.data.shape == (40 if known else 64, 32)
            padded, long = nn.utils.rnn.pad_packed_sequence(layer(packed)[0], batch_first=first)
            assert padded.shape == ((4, 16, 64) if first else (16, 4, 64))
            assert long.tolist() == ([16, 12, 8, 4] if known else [16] * 4)
            padded.sum().backward()
        assert data.grad.shape == data.shape  # what leads to it once failed
    assert any("packed" in what for what in assumed(run)) == (not known)
    reserve = recurrent.reserve_bytes("lstm", 40 if known else 64, 64, 1, 1, 4, 0)
    assert sizes(run).count(reserve) == 2


def test_masks_select_at_most_all() -> None:
    with bfc.predict("a100") as run:
        tensor = torch.randn(8, 16, device="cuda", requires_grad=True)
        mask = tensor > 0
        assert tensor[mask].shape == (128,)
        assert mask.nonzero().shape == (128, 2)
        assert torch.masked_select(tensor, mask).shape == (128,)
        assert torch.where(mask)[0].shape == (128,)
        assert torch.unique(torch.arange(10, device="cuda")).shape == (10,)
        tensor[mask].sum().backward()
        tensor.detach()[mask] = 1.0
    noted = {one["where"].rpartition(":")[0] for one in run.assumptions}
    assert __file__ in noted


def test_what_is_read_is_made_up_and_said() -> None:
    with bfc.predict("a100") as run:
        tensor = torch.randn(2, 3, device="cuda")
        assert tensor.sum().item() == 1.0
        assert not tensor.sum().isnan()
        assert torch.isfinite(tensor.sum())  # or programs stop, or skip the step
        assert tensor.cpu().numpy().tolist() == [[0.0] * 3] * 2
        assert tensor.tolist() == [[1.0] * 3] * 2
        assert f"{tensor.sum():.3f}" == "1.000"
        assert f"{tensor}".startswith("FakeTensor(")
        with pytest.raises(TypeError, match=r"Use Tensor\.cpu"):
            tensor.numpy()
    assert {".item()", ".numpy()", ".tolist()"} <= set(assumed(run))


def test_a_loop_that_waits_for_a_value_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorders, "MOST_ANSWERS", 20)

    def wait() -> None:
        mask = torch.rand(4, device="cuda") > 0.5
        while not mask.all():
            pass

    with bfc.predict("a100"), pytest.raises(RuntimeError, match=r"what_works\.py:\d+: the program"):
        wait()


def test_generators_and_copies_and_files(tmp_path: Path) -> None:
    with bfc.predict("a100") as run:
        generator = torch.Generator(device="cuda")
        generator.manual_seed(1)
        assert generator.device.type == "cuda"
        layer = nn.Linear(4, 4).cuda()
        torch.randn(4, device="cuda", generator=generator)
        copy.deepcopy(layer)
        torch.save(layer.state_dict(), tmp_path / "model.pt")
        torch.save(layer.state_dict(), io.BytesIO())
    assert not (tmp_path / "model.pt").exists()
    assert "torch.save" in assumed(run)


@pytest.mark.filterwarnings("ignore:The argument 'device' of Tensor:DeprecationWarning")
def test_a_loader_loads_here() -> None:
    from torch.utils.data import DataLoader, TensorDataset

    with bfc.predict("a100"):
        data = TensorDataset(torch.randn(32, 8), torch.arange(32))
        loader = DataLoader(data, 8, shuffle=True, num_workers=2, pin_memory=True, timeout=5)
        batches = [(x.cuda(non_blocking=True), y.to("cuda")) for x, y in loader]
        assert [tuple(x.shape) for x, _ in batches] == [(8, 8)] * 4


def test_threads_of_the_program_are_recorded() -> None:
    from concurrent.futures import ThreadPoolExecutor

    def make(number: int) -> torch.Tensor:
        made = torch.ones(256, 1024, device="cuda")
        for _ in range(50):
            made = torch.relu(made @ torch.ones(1024, 1024, device="cuda")) + number
        return made

    with bfc.predict("a100"):
        with ThreadPoolExecutor(4) as pool:
            kept = list(pool.map(make, range(8)))
        assert {one.device.type for one in kept} == {"cuda"}
        assert torch.cuda.memory_allocated() == 8 * MIB + 4 * 8519680  # a workspace each


def test_a_layer_in_inference_takes_what_its_one_operator_takes() -> None:
    with bfc.predict("a100") as run:
        layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True).cuda().eval()
        attention = nn.MultiheadAttention(64, 4, batch_first=True).cuda().eval()
        tokens = torch.randn(2, 128, 64, device="cuda")
        with torch.inference_mode():
            before = len(sizes(run))
            assert layer(tokens).shape == tokens.shape
            made = sizes(run)[before:]
            assert 2 * 128 * 3 * 64 * 4 in made  # queries, keys and values
            assert made.count(2 * 128 * 256 * 4) == 1  # within the network of two layers
            before = len(sizes(run))
            _, weights = attention(tokens, tokens, tokens, average_attn_weights=False)
            assert weights.shape == (2, 4, 128, 128)
            assert sizes(run)[before:].count(2 * 4 * 128 * 128 * 4) == 1  # scores, then weights


def test_a_checkpoint_s_memory_is_that_of_its_modules() -> None:
    """They run again in the thread of the backward pass, which counts operators for itself."""
    from torch.utils.checkpoint import checkpoint

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor, reentrant: bool) -> torch.Tensor:
            for layer in (self.first, self.second):
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return x

    for reentrant in (False, True):
        with bfc.predict("a100") as run:
            net = Net().cuda()
            x = torch.randn(4, 64, device="cuda", requires_grad=True)
            net(x, reentrant).sum().backward()
        trace = run.trace
        of_weights = {
            trace.owners[trace.owner[event]]
            for event in range(len(trace))
            if trace.op[event] == 0 and trace.size[event] == 64 * 64 * 4
        }
        assert of_weights == {"first", "second"}


def test_weights_that_are_shared_stay_so() -> None:
    made_before = nn.Linear(8, 8)
    tied = nn.Sequential(made_before, nn.Linear(8, 8))
    tied[1].weight = made_before.weight
    optimizer = torch.optim.SGD(tied.parameters(), lr=0.1)
    with bfc.predict("a100"):
        tied.cuda()
        assert tied[0].weight is tied[1].weight
        tied(torch.randn(2, 8, device="cuda")).sum().backward()
        with pytest.raises(RuntimeError, match="made before the prediction"):
            optimizer.step()


def test_models_without_memory_become_models_on_the_device() -> None:
    with bfc.predict("a100"):
        with torch.device("meta"):
            layer = nn.Linear(64, 64)
        layer.to_empty(device="cuda")
        assert layer.weight.is_cuda
        assert torch.cuda.memory_allocated() == 64 * 64 * 4 + 512
        layer.to("meta")
        assert torch.cuda.memory_allocated() == 0


def test_a_profiler_sees_nothing(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """PyTorch's own wrote a page for each operator, and ended the process."""
    with bfc.predict("a100") as run:
        layer = nn.Linear(8, 8).cuda()
        kinds = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=kinds, profile_memory=True) as seen:
            with torch.profiler.record_function("a step"):
                layer(torch.randn(2, 8, device="cuda")).sum().backward()
            seen.step()
        print(seen.key_averages().table(sort_by="cuda_time_total", row_limit=10))
        seen.export_chrome_trace(str(tmp_path / "trace.json"))
        assert list(seen.events()) == []
    assert "Failed to record CUDA" not in capfd.readouterr().err
    assert assumed(run)["a profiler"] == "sees nothing"


def test_an_operator_that_takes_functions_is_refused_in_words() -> None:
    with bfc.predict("a100"):
        numbers = torch.randn(8, device="cuda")
        with pytest.raises(NotImplementedError, match=r"does not know what cond does"):
            torch.cond(numbers.sum() > 0, torch.sin, torch.cos, (numbers,))


def test_what_is_taken_for_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    with bfc.predict("a100") as run:
        logits = torch.randn(32, 4, device="cuda", requires_grad=True)
        torch.distributions.Categorical(logits=logits).entropy().mean().backward()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            logits.detach().record_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits.detach() * 2
        graph.replay()
    assert any(what.startswith("a CUDA graph") for what in assumed(run))


def run_checkpointed(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64)).cuda()
    tokens = torch.randn(4, 64, device="cuda", requires_grad=True)
    checkpoint(layers, tokens, use_reentrant=reentrant).sum().backward()
    assert layers[0].weight.grad is not None


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_compute_again(reentrant: bool) -> None:
    with bfc.predict("a100"):
        run_checkpointed(reentrant)


def test_an_encoder_with_padding() -> None:
    with bfc.predict("a100"):
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 2).cuda()
        tokens = torch.randn(2, 10, 64, device="cuda")
        padding = torch.zeros(2, 10, dtype=torch.bool, device="cuda")
        encoder(tokens, src_key_padding_mask=padding).sum().backward()
        encoder.eval()
        with torch.no_grad():
            encoder(tokens, src_key_padding_mask=padding)


@pytest.mark.parametrize(("known", "rows"), [(True, 320), (False, 400)])
def test_an_encoder_takes_the_padding_out(known: bool, rows: int) -> None:
    """In inference. An H100 takes 863,696 bytes where 320 of 400 rows are none; 1,501,776 were
    predicted."""
    workspaces = (33_554_432, 1_048_576)
    with bfc.predict("h100") as run, torch.inference_mode():
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 2).cuda().eval()
        tokens = torch.randn(8, 50, 64, device="cuda")
        padding = torch.arange(50, device="cuda").expand(8, 50) >= (40 if known else 0)
        padding = padding if known else padding ^ padding
        assert encoder(tokens, src_key_padding_mask=padding).shape == tokens.shape
        taken = run.peak_allocated - sum(one for one in sizes(run) if one in workspaces)
        assert encoder.half()(tokens.half(), src_key_padding_mask=padding).shape == tokens.shape
        assert encoder(tokens.half()).shape == tokens.shape
    row = 64 * 4
    found = [one for one in sizes(run) if one not in workspaces]
    first = found.index(rows * 3 * row)
    assert found[first : first + 4] == [rows * 3 * row, 36, 36, rows * row]
    assert found.count(36) == 8
    if known:
        assert abs(taken - 863_696) < 30 * 512  # in blocks


def test_a_network_of_its_own_kernel_under_autocast() -> None:
    """A PyTorch for CUDA once asked the driver."""
    with bfc.predict("h100"):
        layer = nn.LSTM(4, 8).cuda()
        with torch.autocast("cuda", torch.bfloat16):
            found = layer(torch.randn(3, 2, 4, device="cuda"))[0]
        assert found.dtype == torch.bfloat16
        found.sum().backward()


def test_a_mask_of_the_host_on_the_device() -> None:
    """It was once filled as one of the device, which raised."""
    with bfc.predict("h100"):
        layer = nn.Linear(4, 4).cuda()
        torch.nn.utils.prune.random_structured(layer, "weight", amount=0.5, dim=0)
        layer(torch.randn(2, 4, device="cuda")).sum().backward()


def test_distributions_that_draw_until_all_is_right() -> None:
    with bfc.predict("h100"):
        chances = torch.rand(4, device="cuda")
        assert torch.distributions.Geometric(chances).sample().shape == (4,)
        ones = torch.ones(4, device="cuda")
        assert torch.distributions.VonMises(ones, ones).sample().shape == (4,)
    with pytest.raises(ValueError, match="positive"):
        torch.distributions.Geometric(torch.zeros(4))


def test_a_kernel_that_has_no_fake_form_is_named() -> None:
    library = torch.library.Library("bfc_test", "FRAGMENT")
    library.define("unfaked(Tensor x) -> Tensor")
    try:
        with bfc.predict("a100"):
            tensor = torch.ones(3, device="cuda")
            with pytest.raises(
                NotImplementedError, match=r"bfc_test::unfaked.*library\.register_fake"
            ):
                torch.ops.bfc_test.unfaked(tensor)
        torch.library.register_fake("bfc_test::unfaked", torch.empty_like)
        with bfc.predict("a100") as run:
            torch.ops.bfc_test.unfaked(torch.ones(3, device="cuda"))
        assert "bfc_test::unfaked" in run.unknown
    finally:
        library._destroy()


def test_a_kernel_whose_fake_form_has_no_size_is_named() -> None:
    """As bitsandbytes', which finds columns with outliers: that a fake form is missing was said."""
    library = torch.library.Library("bfc_test", "FRAGMENT")
    library.define("outliers(Tensor x) -> Tensor")

    def outliers(x: torch.Tensor) -> torch.Tensor:
        return x.new_empty(torch.library.get_ctx().new_dynamic_size())

    torch.library.register_fake("bfc_test::outliers", outliers)
    try:
        with (
            bfc.predict("a100"),
            pytest.raises(NotImplementedError, match="how large a result of bfc_test::outliers is"),
        ):
            torch.ops.bfc_test.outliers(torch.ones(3, device="cuda"))
    finally:
        library._destroy()


@pytest.fixture
def group() -> Any:
    """Rank 0 of four."""

    def begin() -> None:
        torch.distributed.init_process_group("nccl", rank=0, world_size=4)

    yield begin
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_one_of_four_processes_has_buckets_of_gradients(group: Callable[[], None]) -> None:
    with bfc.predict("a100") as run:
        group()
        layer = nn.parallel.DistributedDataParallel(nn.Linear(1024, 1024).cuda())
        layer(torch.randn(2, 1024, device="cuda")).sum().backward()
        assert torch.cuda.memory_allocated() >= 3 * 4 * MIB  # weights, gradients, buckets
    assert "a process group of 4 that sends nothing" in assumed(run)


def test_ddp_sends_parameters_in_two_buckets_at_a_time(group: Callable[[], None]) -> None:
    """As beside processes of gloo, whose tensors were followed. A bucket ends beyond 250 MiB."""
    with bfc.predict("a100") as run:
        group()
        layers = [nn.Linear(8192, 4096, bias=False) for _ in range(7)]  # of 128 MiB
        nn.parallel.DistributedDataParallel(nn.Sequential(*layers).cuda())
    trace = run.trace
    buckets = {
        number for number, size in zip(trace.id, trace.size, strict=True) if size == 256 * MIB
    }
    ops = [op for op, number in zip(trace.op, trace.id, strict=True) if number in buckets]
    assert ops == [0, 0, 1, 0, 1, 1]  # two are made, and one ends before the third is made


def test_a_process_may_keep_its_gradients_for_a_while(group: Callable[[], None]) -> None:
    with bfc.predict("a100"):
        group()
        layer = nn.parallel.DistributedDataParallel(nn.Linear(64, 64).cuda())
        for number in range(3):
            with layer.no_sync() if number == 0 else contextlib.nullcontext():
                layer(torch.randn(2, 64, device="cuda")).sum().backward()


def test_one_of_four_shards_holds_a_fourth(group: Callable[[], None]) -> None:
    from torch.distributed.fsdp import fully_shard

    with bfc.predict("a100"):
        group()
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4))).cuda()
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        gc.collect()
        assert torch.cuda.memory_allocated() == 4 * MIB  # a fourth of four layers
        optimizer = torch.optim.AdamW(model.parameters())
        peaks = []
        for _ in range(3):
            model(torch.randn(2, 1024, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            peaks.append(torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()
        gc.collect()
        # the parameters, two states of each, and 2 workspaces of cuBLAS
        assert torch.cuda.memory_allocated() == (4 + 2 * 4) * MIB + 2 * 8519680
        # beside these a gradient of each, whole layers and a whole gradient: never all at once
        assert peaks[0] <= peaks[1] == peaks[2] < (4 + 2 * 4 + 4 + 6 * 4) * MIB + 2 * 8519680


def test_host_memory_may_be_pinned_as_it_is_made() -> None:
    with bfc.predict("a100"):
        for make in (torch.randn, torch.empty, torch.zeros, torch.ones):
            assert make(4, pin_memory=True).cuda(non_blocking=True).is_cuda


def test_lazy_modules_are_refused_in_words() -> None:
    with bfc.predict("a100"), pytest.raises(NotImplementedError, match="give the layer its sizes"):
        nn.LazyLinear(3)


def test_a_step_of_several_optimizers_ends_with_the_last() -> None:
    """Else the last step has what is made once, and a hundred steps make it a hundred times."""
    with bfc.predict("a100") as run:
        one, other = (nn.Linear(1024, 1024, device="cuda") for _ in range(2))
        optimizers = [torch.optim.Adam(layer.parameters()) for layer in (one, other)]
        for _ in range(2):
            for layer, optimizer in zip((one, other), optimizers, strict=True):
                optimizer.zero_grad()
                layer(torch.randn(8, 1024, device="cuda")).sum().backward()
                optimizer.step()
    assert run.reserved_after() == run.peak_reserved


@pytest.mark.parametrize("rules", ["2.11", "2.15"])
def test_what_is_reserved_depends_on_addresses_before_2_13(rules, monkeypatch) -> None:
    memory = session.Memory
    monkeypatch.setattr(session, "Memory", lambda *given: memory(*given[:-2], rules))
    order, held = random.Random(3), {}
    with bfc.predict("a100") as run:
        for _ in range(60):
            place = order.randrange(12)
            held.pop(place, None)
            nbytes = order.choice((3, 5, 9, 11, 12, 12, 14, 19, 25, 30)) << 20
            held[place] = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    low, high = run.reserved_range()
    assert low <= run.peak_reserved <= high
    assert (low < high) == (rules == "2.11")
    assert run.to_dict()["peak_reserved_range"] == (low, high)


def test_the_default_device_may_be_the_gpu(request: pytest.FixtureRequest) -> None:
    """What bfc makes on the host once went there, too."""
    request.addfinalizer(lambda: torch.set_default_device(None))
    with bfc.predict("a100"):
        torch.set_default_device("cuda")
        assert torch.distributions.Normal(torch.zeros(3), torch.ones(3)).rsample().is_cuda
        assert torch.cuda.get_rng_state().device.type == "cpu"
        assert torch.randperm(4, device="cpu").random_().sum().item() >= 0
        assert isinstance(torch.empty((), dtype=torch.int64, device="cpu").random_().item(), int)


def test_a_mask_that_learns_is_not_for_cudnn() -> None:
    """A bias of positions, as an H100 computes it: cuDNN's kernel has no gradient for it. The
    prediction raised once, where a checkpoint computed its part again."""
    with bfc.predict("h100") as run:
        query = torch.randn(2, 8, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        bias = torch.zeros(1, 8, 128, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        with torch.no_grad():
            functional.scaled_dot_product_attention(query, query, query, bias)
        functional.scaled_dot_product_attention(query, query, query, bias).sum().backward()
        assert bias.grad.shape == bias.shape
    assert not [name for name in run.unknown if "cudnn" in name]
