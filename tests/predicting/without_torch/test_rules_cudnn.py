"""What cuDNN 9.19 asked for on an H200, which rules estimate."""

from __future__ import annotations

from typing import Any

import pytest
from rule_calls import Shape, call, of, sizes

from bfc_tools.predicting.cudnn import Plan
from bfc_tools.predicting.rules import interface, recurrent
from bfc_tools.predicting.rules.columns import gradients, without_cudnn
from bfc_tools.predicting.rules.convolution import by_kernels_of_pytorch
from bfc_tools.predicting.rules.convolution_workspaces import Convolution


def convolution(
    images: tuple[int, ...],
    channels: int,
    kernel: int,
    stride: int = 1,
    dtype: str = "float32",
    *,
    last: bool = False,
    groups: int = 1,
) -> Convolution:
    """Of square images, with padding that keeps their size."""
    weight = (channels, images[1] // groups, kernel, kernel)
    result = (images[0], channels, *(size // stride for size in images[2:]))
    shapes = (Shape(one, dtype) for one in (images, weight, result))
    return Convolution(*shapes, groups, (stride, stride), last, 132)


#: Images, channels, kernel, stride, type, channels last: what the three passes took, where that is
#: estimated to the last KiB.
MEASURED: list[tuple[Any, list[int]]] = [
    (((4, 128, 64, 64), 128, 3), [17367187, 17367056, 25625255]),
    (((32, 256, 14, 14), 256, 3), [15204368, 15204368, 22282847]),
    (((32, 64, 56, 56), 256, 1), [0, 0, 2097152]),
    (((32, 256, 56, 56), 128, 1), [400, 400, 4194704]),
    (((32, 512, 7, 7), 2048, 1), [16056336, 16056336, 16056336]),
    (((4, 128, 32, 32), 256, 3, 1, "bfloat16"), [3735568, 3735568, 3735568]),
    (((32, 128, 28, 28), 512, 1, 1, "bfloat16"), [0, 272, 8388608]),
    (((32, 64, 56, 56), 64, 3), [25837584 + 25690112, 51527696, 53592743]),
]


@pytest.mark.parametrize(("shape", "measured"), MEASURED)
def test_the_workspaces_of_a_convolution(shape, measured) -> None:
    made = convolution(*shape)
    found = [made.forward(), made.gradient_of_images(), made.gradient_of_weight()]
    assert found == pytest.approx(measured, abs=1024)


#: Images, channels, kernel, stride: what the gradient of the weight took on an H100, or an H200.
SUMMED: list[tuple[Any, int]] = [
    (((32, 1024, 14, 14), 2048, 1, 2), 38535184),  # one part is no sum
    (((2, 1024, 50, 50), 2048, 1, 2), 30720016),
    (((2, 256, 100, 100), 3, 1), 6144),  # of each image, though rows are no 16 bytes
    (((2, 512, 25, 25), 2048, 1), 8388608),
    (((32, 2048, 7, 7), 512, 1), 16056336),
    (((2, 256, 200, 200), 12, 1), 86423696),  # of the batch: few weights, many pixels
    (((2, 64, 200, 200), 64, 1), 42221712),
    (((32, 3, 128, 128), 64, 7, 2), 45806736),  # padded to four channels
    (((2, 3, 800, 800), 64, 7, 2), 104256656),
]


@pytest.mark.parametrize(("shape", "measured"), SUMMED)
def test_the_parts_of_a_gradient_of_the_weight(shape, measured) -> None:
    assert convolution(*shape).gradient_of_weight() == pytest.approx(measured, rel=0.03)


def test_channels_that_lie_side_by_side_need_only_sums_of_weights() -> None:
    made = convolution((32, 128, 56, 56), 128, 3, 2, last=True)
    assert (made.forward(), made.gradient_of_images()) == (0, 0)
    assert made.gradient_of_weight() == pytest.approx(8258199, abs=1024)
    made = convolution((32, 128, 28, 28), 512, 1, last=True)
    assert made.gradient_of_weight() == pytest.approx(17301760, abs=1024)


def test_few_channels_are_padded_to_eight_in_16_bits() -> None:
    made = convolution((32, 3, 224, 224), 64, 7, 2, "bfloat16", last=True)
    assert made.forward() == 25740304
    made = convolution((32, 3, 224, 224), 64, 7, 2, "bfloat16")
    assert made.forward() == 77120528
    patches = convolution((32, 3, 224, 224), 384, 16, 16, "bfloat16")
    assert patches.forward() == 0
    assert patches.gradient_of_weight() == pytest.approx(41517200, rel=0.2)


def test_each_channel_for_itself_keeps_sums_for_each_image() -> None:
    made = convolution((16, 96, 56, 56), 96, 7, 1, "bfloat16", last=True, groups=96)
    assert made.gradient_of_weight() == 2408448
    assert made.forward() == made.gradient_of_images() == 0
    # a plan of another engine than the GPU takes
    assert made.on_device("weight", Plan(626350711, 10)) == 2408448
    made = convolution((128, 144, 56, 56), 144, 3, 2, "bfloat16", last=True, groups=144)
    assert made.gradient_of_weight() == 5898240  # padded to 160 channels
    made = convolution((4, 480, 14, 14), 480, 3, 2, "bfloat16", last=True, groups=480)
    assert made.gradient_of_weight() == 0
    made = convolution((64, 672, 14, 14), 672, 5, 1, "float16", last=True, groups=672)
    assert made.on_device("weight", Plan(1929938, 61)) == 1929938


@pytest.mark.parametrize(
    ("kind", "steps", "hidden", "layers", "directions", "masked", "measured"),
    [
        ("lstm", 4096, 512, 2, 1, 0, 92274944),
        ("lstm", 4096, 512, 1, 1, 0, 41943296),
        ("lstm", 1024, 256, 2, 2, 1024, 23200000),
        ("lstm", 256 * 192, 128, 3, 1, 256 * 192, 429392128),
        ("lstm", 3104, 256, 2, 2, 64 * 80, 70582528),  # packed sequences of 17 to 80 steps
        ("gru", 4096, 512, 2, 1, 0, 109052160),
        ("rnn_tanh", 4096, 512, 1, 1, 0, 8388864),
        ("lstm", 1280, 1024, 3, 1, 0, 89129216),
        ("lstm", 80, 128, 1, 1, 0, 205056),
    ],
)
def test_the_reserve_of_a_network(kind, steps, hidden, layers, directions, masked, measured):
    found = recurrent.reserve_bytes(kind, steps, hidden, layers, directions, 4, masked)
    assert found == measured


#: A network, its steps, sequences, inputs, units, layers, directions and bytes of a number; whether
#: it is trained, with dropout, packed; and what an H100 took.
NETWORKS: list[tuple[Any, ...]] = [
    ("lstm", 16384, 128, 128, 320, 2, 2, 4, (True, False, False), 357827840),
    ("lstm", 2048, 32, 128, 256, 1, 1, 4, (True, False, False), 21824000),
    ("lstm", 65536, 256, 512, 100, 3, 2, 2, (True, True, False), 721063936),  # few units
    ("lstm", 4096, 32, 512, 100, 2, 2, 4, (False, False, False), 94474752),
    ("gru", 6400, 64, 16, 320, 1, 1, 2, (True, False, False), 26032896),
    ("lstm", 3104, 64, 200, 256, 2, 2, 4, (True, True, True), 83820800),
    ("gru", 700, 20, 64, 32, 1, 2, 4, (True, False, False), 19754400),
    ("gru", 12800, 256, 64, 650, 2, 1, 4, (True, True, False), 208821536),
    ("gru", 64, 1, 1312, 1024, 1, 2, 4, (False, False, True), 76849408),
    ("rnn_tanh", 12800, 64, 512, 100, 3, 2, 4, (True, False, False), 296703616),
    ("rnn_relu", 140, 4, 1312, 400, 1, 1, 2, (False, False, False), 10359456),
]
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


@pytest.mark.parametrize(
    (
        "kind",
        "steps",
        "batch",
        "inputs",
        "hidden",
        "layers",
        "directions",
        "element",
        "how",
        "took",
    ),
    NETWORKS,
)
def test_the_workspace_of_a_network(
    kind, steps, batch, inputs, hidden, layers, directions, element, how, took
) -> None:
    weights = sum(
        directions * GATES[kind] * hidden * (width + hidden + 2)
        for width in [inputs, *[hidden * directions] * (layers - 1)]
    )
    shape = (weights * element, steps, batch, inputs, hidden, layers, directions, element)
    train, dropout, packed = how
    found = recurrent.workspace_bytes(kind, *shape, train=train, dropout=dropout, packed=packed)
    assert found == pytest.approx(took, rel=0.02)


#: Shapes of images and weight, stride, type, groups, channels last, what is computed, and what an
#: H100 took: convolutions of each kind whose rule is right to the byte.
CLASSES: list[tuple[Any, ...]] = [
    ((64, 256, 56, 56), (128, 256, 4, 4), 1, "float32", 1, False, "result", 314081296),
    ((24, 128, 24, 24), (128, 128, 3, 3), 2, "float32", 1, False, "images", 9437200),
    ((64, 320, 16, 16), (320, 320, 3, 3), 2, "float32", 1, False, "weight", 29900816),
    ((32, 256, 28, 28), (256, 256, 3, 3), 2, "float16", 1, False, "result", 17235984),
    ((2, 64, 32, 32), (128, 64, 3, 3), 2, "bfloat16", 1, False, "weight", 540688),
    ((1, 1024, 64, 64), (1024, 64, 3, 3), 1, "float32", 16, False, "images", 35913744),
    ((12, 256, 7, 7), (256, 32, 3, 3), 1, "float16", 8, False, "images", 749584),
    ((1, 512, 128, 128), (512, 64, 3, 3), 1, "float32", 8, False, "weight", 68288528),
    ((8, 64, 224), (64, 4, 7), 1, "float16", 16, False, "result", 462352),
    ((16, 1152, 7, 7), (1152, 1, 3, 3), 2, "float16", 1152, True, "weight", 5308416),
    ((2, 5, 129, 129), (32, 5, 1, 1), 1, "float32", 1, False, "result", 0),
    ((64, 64, 50), (1, 64, 1), 1, "float32", 1, False, "images", 0),
    ((64, 2048, 7, 7), (1024, 2048, 1, 1), 1, "float32", 1, False, "weight", 38535184),
    ((16, 64, 56, 56), (256, 64, 1, 1), 1, "float32", 1, False, "weight", 1048576),
    ((4, 3, 224, 224), (64, 3, 7, 7), 2, "float32", 1, True, "result", 2446096),
    ((128, 3, 32, 32), (64, 3, 7, 7), 1, "float16", 1, False, "result", 18924560),
]


@pytest.mark.parametrize(
    ("images", "weight", "stride", "dtype", "groups", "last", "gradient", "took"), CLASSES
)
def test_each_kind_of_convolution(
    images, weight, stride, dtype, groups, last, gradient, took
) -> None:
    dims = len(weight) - 2
    padding = [2 * (size // 2) for size in weight[2:]]
    sizes = [
        (size + more - kernel) // stride + 1
        for size, kernel, more in zip(images[2:], weight[2:], padding, strict=True)
    ]
    result = (images[0], weight[0], *sizes)
    shapes = (Shape(one, dtype) for one in (images, weight, result))
    made = Convolution(*shapes, groups, (stride,) * dims, last, 132)
    assert made.estimate(gradient) == took


#: Images, kernel, stride, dilation, type of channels that are convolved for themselves; whether an
#: H100 does it in cuDNN. Each was seen there, or differs from one that was in what is named first.
ALONE: list[tuple[tuple[int, ...], int, int, int, str, bool]] = [
    ((4, 192, 224, 224), 5, 1, 1, "float16", True),
    ((4, 192, 224, 224), 5, 1, 1, "bfloat16", False),
    ((2, 320, 96, 96), 3, 1, 2, "float16", False),
    ((32, 512, 28, 28), 7, 1, 1, "float16", False),
    ((8, 24, 28, 28), 3, 1, 1, "float16", False),  # few channels
    ((8, 240, 13, 13), 3, 3, 1, "float16", False),
    ((2, 768, 6, 6), 3, 1, 1, "float16", False),  # few pixels
    ((16, 128, 224, 224), 3, 2, 1, "float16", False),
    ((16, 256, 28, 28), 3, 2, 1, "float16", True),
    ((16, 512, 19, 19), 3, 2, 1, "float16", True),
    ((1, 128, 56, 56), 3, 2, 1, "float16", True),
    ((1, 128, 56, 56), 1, 2, 1, "float16", False),
    ((8, 128, 7, 7), 1, 2, 1, "float16", True),
    ((8, 64, 7, 7), 1, 2, 1, "float16", False),
    ((16, 240, 256), 7, 1, 1, "float16", True),
    ((12, 2048, 1000), 3, 3, 1, "float16", False),
    ((2, 64, 28, 28, 28), 3, 1, 1, "float16", False),
]


@pytest.mark.parametrize(("images", "kernel", "stride", "dilation", "dtype", "in_cudnn"), ALONE)
def test_cudnn_convolves_some_single_channels(
    images, kernel, stride, dilation, dtype, in_cudnn
) -> None:
    dims = len(images) - 2
    weight = Shape((images[1], 1, *(kernel,) * dims), dtype)
    made = call("convolution(input, weight, transposed=False)", Shape(images, dtype), weight)
    shapes = (made.args[0], weight, made.args[0])
    steps = (stride,) * dims, False, 132, (dilation,) * dims
    assert by_kernels_of_pytorch(made, Convolution(*shapes, images[1], *steps)) is not in_cudnn
    last = Convolution(*shapes, images[1], steps[0], True, 132)
    assert not by_kernels_of_pytorch(made, last)
    transposed = call(
        "convolution(input, weight, transposed=True)", *made.args, result=None, transposed=True
    )
    assert not by_kernels_of_pytorch(transposed, Convolution(*shapes, images[1], *steps))


VOLUMES = "convolution(input, weight, bias, stride, padding, dilation, transposed, padded, groups)"
BACKWARD = VOLUMES.replace("convolution(", "convolution_backward(gradient, ")


def volumes(dtype: str, kernel: int, torch: tuple[int, int], **others: Any) -> interface.Call:
    """Of the size in PyTorch's issue 166643."""
    images, weight = Shape((1, 96, 6, 626, 626), dtype), Shape((192, 96, *(kernel,) * 3), dtype)
    side = 626 - kernel + 1
    made = Shape((1, 192, 7 - kernel, side, side), dtype)
    steps = ([1] * 3, [0] * 3, [1] * 3, False, [0] * 3, 1)
    return call(VOLUMES, images, weight, None, *steps, result=made, torch=torch, **others)


def test_pytorch_2_9_makes_columns_of_volumes_in_16_bits() -> None:
    """It printed 8.5288 GiB there, of which these columns are 7.52; 1.96 were predicted."""
    columns = 2 * 96 * 27 * 4 * 624 * 624
    for dtype in ("bfloat16", "float16"):
        assert of(volumes(dtype, 3, (2, 9), gpu="h100")) == [0, columns, 32 << 20]
    for other in (("bfloat16", 3, (2, 10)), ("bfloat16", 1, (2, 9)), ("float32", 3, (2, 9))):
        assert not without_cudnn(volumes(*other), *volumes(*other).args[:2])
    last = Shape((1, 96, 6, 626, 626), "bfloat16", (6 * 626**2 * 96, 1, 626**2 * 96, 626 * 96, 96))
    made = volumes("bfloat16", 3, (2, 9))
    assert not without_cudnn(made, last, made.args[1])


@pytest.mark.parametrize("transposed", [False, True])
def test_columns_are_those_of_one_image(transposed: bool) -> None:
    """As where a program switches cuDNN off: gradients share them."""
    large, small = Shape((4, 8, 16, 16)), Shape((4, 6, 8, 8))
    weight = Shape((6, 8, 2, 2))
    images, made = (small, large) if transposed else (large, small)
    steps = ([2] * 2, [0] * 2, [1] * 2, transposed, [0] * 2, 1)
    forward = call(VOLUMES, images, weight, None, *steps, result=made)
    backward = call(BACKWARD, made, images, weight, None, *steps)
    forward.cudnn = backward.cudnn = False
    columns, workspace = 4 * 8 * 2 * 2 * 8 * 8, 8519680
    assert of(forward) == [0, columns, workspace]
    both, *rest = gradients(backward, (True, False, False))
    assert isinstance(both, interface.Result)
    assert sizes(rest) == [columns, workspace, -columns]


def test_groups_have_columns_and_gradients_of_their_own() -> None:
    """Their channels are copied, and their results joined (Convolution.cpp)."""
    images, weight, made = Shape((4, 8, 16, 16)), Shape((8, 2, 3, 3)), Shape((4, 8, 14, 14))
    steps = ([1] * 2, [0] * 2, [1] * 2, False, [0] * 2, 4)
    forward = call(VOLUMES, images, weight, None, *steps, result=made)
    backward = call(BACKWARD, made, images, weight, None, *steps)
    forward.cudnn = backward.cudnn = False
    columns, workspace = 4 * 2 * 9 * 14 * 14, 8519680
    of_images, of_made, of_weight = 4 * 4 * 8 * 16 * 16, 4 * 4 * 8 * 14 * 14, 4 * 8 * 2 * 9
    assert of(forward) == [0, of_made, of_images // 4, columns, workspace]
    steps_back = list(gradients(backward, (True, True, False)))
    made_by = [one for one in steps_back if not isinstance(one, interface.Result)]
    assert sizes(made_by) == [
        *(of_images, of_weight, of_made // 4, of_images // 4, columns, workspace),
        *(-columns, -of_images // 4, -of_made // 4, -of_weight, -of_images),
    ]
    results = [at for at, one in enumerate(steps_back) if isinstance(one, interface.Result)]
    assert results == [9, 10]  # between what groups work in and what they are joined from


def test_single_pixels_of_planes_are_columns_already() -> None:
    images, weight, made = Shape((4, 8, 16, 16)), Shape((6, 8, 1, 1)), Shape((4, 6, 16, 16))
    forward = call(
        VOLUMES, images, weight, None, [1] * 2, [0] * 2, [1] * 2, False, [0] * 2, 1, result=made
    )
    forward.cudnn = False
    assert of(forward) == [0, 0, 8519680]


#: Channels last, each for itself: images, kernel, stride, dilation, type, pass; what is planned
#: without a device, and what an H100 took.
WITHOUT_A_DEVICE: list[tuple[tuple[int, ...], int, int, int, str, str, Plan, int]] = [
    ((4, 672, 224, 224), 5, 1, 1, "bfloat16", "images", Plan(2158507024, 22), 0),
    ((3, 40, 512, 512), 3, 1, 1, "bfloat16", "result", Plan(503328016, 22), 0),
    ((32, 512, 56, 56), 3, 1, 4, "bfloat16", "weight", Plan(826952111, 10), 826952111),
    ((16, 40, 128, 128), 2, 2, 1, "bfloat16", "weight", Plan(112335871, 10), 112335871),
    ((8, 1024, 128, 128), 3, 3, 1, "bfloat16", "weight", Plan(0, 0), 0),
    ((3, 24, 128, 128), 1, 2, 1, "bfloat16", "weight", Plan(13731215, 10), 13731215),
    ((8, 40, 256, 256), 7, 7, 1, "bfloat16", "result", Plan(171152656, 22), 171152656),
    ((2, 320, 96, 96), 3, 1, 2, "float16", "result", Plan(23604638, 57), 23604638),
]


@pytest.mark.parametrize(
    ("images", "kernel", "stride", "dilation", "dtype", "gradient", "plan", "took"),
    WITHOUT_A_DEVICE,
)
def test_a_gpu_has_other_engines_for_single_channels(
    images, kernel, stride, dilation, dtype, gradient, plan, took
) -> None:
    weight = (images[1], 1, kernel, kernel)
    result = (*images[:2], *(size // stride for size in images[2:]))
    shapes = (Shape(one, dtype) for one in (images, weight, result))
    made = Convolution(*shapes, images[1], (stride,) * 2, True, 132, (dilation,) * 2)
    assert made.on_device(gradient, plan) == took


@pytest.mark.parametrize(
    ("images", "channels", "kernel", "plan", "took"),
    [
        ((32, 96, 56, 56), 96, 3, Plan(155938615, 10), 0),
        ((128, 384, 56, 56), 384, 5, Plan(2466557968, 9), 0),
        ((3, 64, 96, 96), 64, 3, Plan(7351218, 61), 7351218),
        ((128, 64, 65, 65), 64, 2, Plan(552675311, 10), 552675311),
        ((3, 64, 96, 96), 256, 3, Plan(7351218, 10), 7351218),  # four results of a channel
    ],
)
def test_single_channels_in_planes(images, channels, kernel, plan, took) -> None:
    shapes = (images, (channels, 1, kernel, kernel), (images[0], channels, *images[2:]))
    made = Convolution(*(Shape(one, "float16") for one in shapes), images[1], (1, 1), False, 132)
    assert made.on_device("weight", plan) == took


#: Gradients of weights of one pixel in cublasLt: images, channels of the result, type, channels
#: last; what an H100 took.
IN_CUBLAS: list[tuple[tuple[int, ...], int, str, bool, int]] = [
    ((4, 112, 16, 16), 512, "float32", False, 917504),
    ((128, 112, 64, 64), 320, "float32", False, 18350480),
    ((64, 72, 14, 14), 116, "float32", True, 3274240),
    ((128, 256, 28, 28), 64, "float32", True, 8651728),
    ((8, 512, 56, 56), 256, "float32", True, 17301760),
    ((8, 1024, 16, 16), 240, "float32", True, 15728896),  # parts of 128 pixels
    ((64, 480, 20, 20), 160, "float16", True, 3686672),
    ((32, 288, 14, 14), 896, "float16", True, 3096848),
    ((12, 768, 18, 18), 1344, "float16", True, 0),  # one part
]


@pytest.mark.parametrize(("images", "channels", "dtype", "last", "took"), IN_CUBLAS)
def test_weights_of_pixels_are_summed_in_cublas(images, channels, dtype, last, took) -> None:
    made = convolution(images, channels, 1, dtype=dtype, last=last)
    assert made.by_cublas("weight") == pytest.approx(took, abs=1024)


#: What is computed of single pixels in cublasLt; images, channels of the result, type, channels
#: last; what an H100 took.
BESIDE: list[tuple[str, tuple[int, ...], int, str, bool, int]] = [
    ("result", (32, 128, 56, 56), 192, "float16", True, 272),
    ("result", (4, 176, 128, 128), 88, "float16", False, 272),
    ("result", (1, 88, 64, 64), 1344, "float32", False, 400),
    ("images", (16, 672, 18, 18), 232, "float32", False, 400),
    ("weight", (16, 672, 18, 18), 232, "float32", False, 9978256),
    ("weight", (24, 160, 96, 96), 320, "float16", False, 4915472),
    ("result", (3, 2048, 24, 24), 116, "bfloat16", False, 0),  # few tiles
    ("images", (2, 384, 30, 30), 192, "float32", False, 0),
    ("weight", (2, 384, 30, 30), 192, "float32", False, 589824),
    ("images", (6, 32, 9, 9), 32, "float32", True, 0),
    ("images", (128, 832, 30, 30), 288, "bfloat16", False, 0),  # rows of 1,800 bytes
]


@pytest.mark.parametrize(("gradient", "images", "channels", "dtype", "last", "took"), BESIDE)
def test_kernels_of_cublas_for_many_tiles_take_a_little(
    gradient, images, channels, dtype, last, took
) -> None:
    made = convolution(images, channels, 1, dtype=dtype, last=last)
    assert made.by_cublas(gradient) == took


def test_single_pixels_run_in_cublas_unless_an_order_says_otherwise() -> None:
    made = convolution((64, 32, 15, 15), 1344, 1, dtype="float16", last=True)
    assert made.in_cublas("images", Plan(100, 67))
    assert made.in_cublas("images")
    assert not made.in_cublas("weight")
    other = convolution((64, 32, 15, 15), 1344, 3, dtype="float16", last=True)
    assert not other.in_cublas("images", Plan(100, 67))
    assert not convolution((4, 3, 15, 15), 64, 1, last=True).in_cublas("images")


def test_an_order_of_engines_tells_what_a_gpu_takes_for_single_pixels() -> None:
    made = convolution((12, 480, 10, 10), 160, 1, dtype="bfloat16")
    kept = Plan(1536016, 65, order=(65,) * 39 + (33,))
    assert not made.in_cublas("weight", kept)
    assert made.in_cublas("images", kept)  # it is of another pass,
    last = convolution((12, 480, 10, 10), 160, 1, dtype="bfloat16", last=True)
    assert last.in_cublas("weight", kept)  # or layout

    made = convolution((8, 640, 56, 56), 640, 1)
    without = (
        *(71, 74, 71, 71, 71, 71, 71, 71, 76, 58, 76, 58, 76, 28, 76, 76, 76, 65, 76, 71),
        *(71, 56, 28, 25, 28, 65, 60),
    )
    for order, took in (((), 400), (without, 0)):
        plan = Plan(128450707, 71, order=order)
        assert made.in_cublas("images", plan)
        assert made.by_cublas("images", plan) == took


def test_the_longest_known_beginning_tells_of_an_order_that_nobody_has_seen() -> None:
    """An H100 kept the plan of 9.6 MB; the sums of all images would be 134 MB."""
    made = convolution((16, 1024, 7, 7), 2048, 1)
    order = (68, 68, 48, 68, 68, 68, 68, 50, 68, 34, 34, 23, 68, 67, 1, 20)
    for unseen in (order, (*order, 99), (*order[:13], 99)):
        assert not made.in_cublas("weight", Plan(9633939, 68, order=unseen))
    assert made.in_cublas("weight", Plan(9633939, 68, order=(99, *order)))


#: Orders in which cuDNN 9.19 names engines for the gradient of a weight of 3 by 3: (64, 64, 14, 14)
#: and (128, 128, 24, 24) by 64 channels.
WINOGRAD = (50, 34, 20, 40, 40, 30, 68, 34, 68, 68, 68, 68, 68, 48, 68, 23, 68, 67, 1, 0)
FOURIER = (68, 68, 68, 68, 50, 30, 34, 68, 20, 34, 48, 1, 68, 68, 23, 68, 67)


@pytest.mark.parametrize(
    ("images", "channels", "kernel", "order", "took"),
    [
        ((64, 64, 14, 14), 64, 3, WINOGRAD, 19464192),
        ((16, 384, 16, 16), 192, 3, WINOGRAD, 31850496),
        ((3, 80, 37, 75), 192, 5, WINOGRAD, 142771200),
        ((1, 3, 48, 48), 64, 5, WINOGRAD, 26217984),
        ((64, 64, 14, 14), 64, 3, (50, 0, *WINOGRAD[1:]), 19464192),  # not all have this engine
        ((64, 64, 14, 14), 64, 3, WINOGRAD[1:], 100),
        ((64, 64, 14, 14), 64, 4, WINOGRAD, 100),
        ((4, 144, 56, 56), 480, 3, FOURIER, 2359787520),
        ((128, 128, 24, 24), 64, 3, FOURIER, 232783872),
        ((8, 672, 32, 32), 32, 7, FOURIER, 727711744),
        ((16, 112, 8, 16), 48, 5, FOURIER, 47185920),
        ((8, 112, 64, 64), 48, 3, FOURIER, 100),  # too large
    ],
)
def test_gradients_of_weights_are_transformed(images, channels, kernel, order, took) -> None:
    plan = Plan(100, 50, order=order)
    made = convolution(images, channels, kernel)
    assert made.on_device("weight", plan) == took
    assert made.on_device("result", plan) == 100
    for other in (
        convolution(images, channels, kernel, last=True),
        convolution(images, channels, kernel, dtype="float16"),
        convolution((*images[:2], 64, 64), channels, kernel, 2),
    ):
        assert other.on_device("weight", plan) == 100
