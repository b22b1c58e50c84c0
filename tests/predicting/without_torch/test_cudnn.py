"""cuDNN itself, which is asked for its plans without a GPU."""

from __future__ import annotations

import os
import resource
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from rule_calls import Shape

from bfc_tools.predicting import cudnn
from bfc_tools.predicting.cudnn import Cudnn, Kernel, Plan, Question
from bfc_tools.predicting.rules.convolution_workspaces import Convolution


def question(
    images: tuple[int, ...],
    channels: int,
    kernel: int,
    gradient: str = "result",
    type: str = "float32",
    *,
    stride: int = 1,
    dilation: int = 1,
    groups: int = 1,
    last: bool = False,
    tf32: bool = True,
) -> Question:
    """Of an H100, with padding that keeps the size of the images."""
    dims = len(images) - 2
    padding = dilation * (kernel // 2)
    reach = 2 * padding - dilation * (kernel - 1) - 1
    return Question(
        gradient=gradient,
        images=images,
        weight=(channels, images[1] // groups, *(kernel,) * dims),
        result=(images[0], channels, *((size + reach) // stride + 1 for size in images[2:])),
        last=last,
        type=type,
        padding=(padding,) * dims,
        strides=(stride,) * dims,
        dilation=(dilation,) * dims,
        tf32=tf32,
        deterministic=False,
        name="NVIDIA H100 80GB HBM3",
        cc=(9, 0),
        sms=132,
        memory=85029158912,
    )


SOME = question((4, 128, 64, 64), 128, 3)

#: What PyTorch allocated on an H100 with cuDNN 9.19, to the byte, for convolutions of each kind.
MEASURED: list[tuple[Question, int]] = [
    (SOME, 17367187),
    (question((4, 32, 32, 32, 32), 16, 3, "images"), 25221267),
    (question((8, 128, 112, 112), 16, 3, type="float16", stride=2), 26529808),
    (question((32, 96, 56, 56), 96, 7, "weight", groups=96, last=True), 318219895),
    (question((8, 512, 112, 112), 512, 3, "weight", groups=32), 411336720),
    (question((16, 128, 56, 56), 128, 3, "weight", dilation=12, last=True), 55509136),
    (question((4, 64, 32, 32, 32), 64, 3), 33996816),
    (question((2, 1, 48, 48, 48), 128, 3, "weight"), 114177807),
    (question((8, 128, 112, 112), 32, 5, stride=2, last=True, tf32=False), 55001104),
    (question((3, 768, 65, 65), 1, 5, "images"), 16900),
]


@pytest.fixture(scope="module")
def asked():
    with Cudnn() as found:
        if found.plan(SOME) is None or found.version != 91900:
            pytest.skip("cuDNN 9.19 and cublasLt are not installed: nvidia-cudnn-cu13==9.19.0.56")
        yield found


@pytest.mark.parametrize(("asking", "measured"), MEASURED)
def test_plans_take_what_was_measured_on_a_gpu(asked, asking, measured) -> None:
    assert asked.plan(asking).workspace == measured


def test_what_cannot_be_planned_is_none_and_the_next_question_is_answered(asked) -> None:
    assert asked.plan(replace(SOME, cc=(2, 0))) is None
    assert asked.plan(replace(SOME, result=(4, 128, 63, 64))) is None
    assert asked.plan(SOME).workspace == 17367187


def test_of_numbers_that_it_does_not_know_cudnn_is_not_asked(asked) -> None:
    """An integer or complex convolution ended the process, and all later ones were estimated."""
    for name in ("complex64", "int32", "float8_e4m3fn"):
        assert asked.plan(replace(SOME, type=name)) is None
    assert asked.plan(replace(SOME, padding=(2, 2), result=(4, 128, 66, 66))) is not None


def test_a_library_is_found_among_the_packages_with_what_it_loads(tmp_path, monkeypatch) -> None:
    for name in (
        *("cudnn/lib/libcudnn.so.9", "cu13/lib/libcublasLt.so.13", "cu13/lib/libnvrtc.so.13"),
        "cublas/lib/libcublasLt.so.12",
    ):
        path = tmp_path / "nvidia" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    monkeypatch.delenv(cudnn.VARIABLE, raising=False)
    monkeypatch.setattr(sys, "path", ["/nowhere", str(tmp_path)])
    found = cudnn.libraries()
    assert found[0] == str(tmp_path / "nvidia/cudnn/lib/libcudnn.so.9")
    assert {path.rpartition("/")[2] for path in found[1:]} == {
        *("libcublasLt.so.12", "libcublasLt.so.13", "libnvrtc.so.13")
    }
    monkeypatch.setenv(cudnn.VARIABLE, found[0])
    monkeypatch.setattr(sys, "path", [])
    assert sorted(cudnn.libraries()) == sorted(found)
    monkeypatch.setenv(cudnn.VARIABLE, "")
    assert cudnn.libraries() == []


@pytest.mark.parametrize(
    "program",
    [
        "",  # ends at once
        "print(91900)",  # ends before it answers
        "print(90700); print(100, 1)",  # is too old
        "import os; print(91900, flush=True); input(); os.abort()",
        "print('nothing')",
        "print(91900, flush=True); input(); print(100, 68, 0)",
        "print(91900, flush=True); input(); print('no number')",
        "import time; print(91900, flush=True); time.sleep(600)",
    ],
)
def test_without_an_answer_the_rules_are_left(tmp_path, monkeypatch, program) -> None:
    script = tmp_path / "script.py"
    script.write_text(program)
    monkeypatch.setattr(cudnn, "PROGRAM", str(script))
    monkeypatch.setattr(cudnn, "libraries", lambda: ["libcudnn.so.9"])
    if "sleep" in program:
        monkeypatch.setattr(cudnn, "LONGEST", 1.0)
    with Cudnn() as found:
        assert found.plan(SOME) is None
        assert found.plan(replace(SOME, gradient="weight")) is None  # it is not started again
        assert found.version == 0


def test_a_file_that_is_no_library(tmp_path, monkeypatch) -> None:
    path = tmp_path / "libcudnn.so.9"
    path.write_text("nothing")
    monkeypatch.setenv(cudnn.VARIABLE, str(path))
    with Cudnn() as found:
        assert found.plan(SOME) is None


COUNTS = "print(91900, flush=True)\nfor at in range(9): input(); print(at, 7, flush=True)"


@pytest.fixture
def counting(tmp_path, monkeypatch):
    """A program that answers 0, 1, 2 and so on."""
    script = tmp_path / "script.py"
    script.write_text(COUNTS)
    monkeypatch.setattr(cudnn, "PROGRAM", str(script))
    monkeypatch.setattr(cudnn, "libraries", lambda: ["libcudnn.so.9"])


def test_each_question_is_asked_once(counting) -> None:
    with Cudnn() as found:
        other = replace(SOME, last=True)
        assert [found.plan(one) for one in (SOME, other, SOME)] == [
            *(Plan(0, 7), Plan(1, 7), Plan(0, 7))
        ]
        assert found.version == 91900
    assert found.plan(replace(SOME, tf32=False)) is None  # the prediction is over


def test_after_an_exception_between_question_and_answer_it_is_started_anew(
    counting, monkeypatch
) -> None:
    """Else each question would get the answer of the one before."""
    with Cudnn() as found:
        assert found.plan(SOME) == Plan(0, 7)
        with monkeypatch.context() as patched:
            patched.setattr(cudnn.select, "poll", lambda: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                found.plan(replace(SOME, last=True))
        assert found.plan(replace(SOME, tf32=False)) == Plan(0, 7)  # another process was asked
        assert found.plan(SOME) == Plan(0, 7)


def test_a_program_may_have_more_than_a_thousand_open_files(counting) -> None:
    """`select` knows no descriptor above 1023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2048)), hard))
    files: list[int] = []
    try:
        while not files or files[-1] < 1100:
            files.append(os.open(os.devnull, os.O_RDONLY))
        with Cudnn() as found:
            assert found.plan(SOME) == Plan(0, 7)
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_signal_handler_that_convolves_meanwhile_gets_the_rules(counting, monkeypatch) -> None:
    with Cudnn() as found:
        assert found.plan(SOME) == Plan(0, 7)
        monkeypatch.setattr(cudnn, "LONGEST", 0.1)
        with found._lock:  # as while this thread waits for an answer
            assert found.plan(replace(SOME, last=True)) is None
        assert found.plan(replace(SOME, last=True)) == Plan(1, 7)


def test_a_process_that_was_forked_neither_asks_nor_is_waited_for(counting) -> None:
    """It holds the input of the asking process open, and may live on."""
    ready, done = os.pipe(), os.pipe()
    with Cudnn() as found:
        assert found.plan(SOME) == Plan(0, 7)
        child = os.fork()
        if child == 0:
            try:
                asked = found.plan(replace(SOME, last=True)) is None
                found.__exit__()
                os.write(ready[1], b"y" if asked else b"n")
                os.read(done[0], 1)
            finally:
                os._exit(0)
        assert os.read(ready[0], 1) == b"y"
        assert found.plan(replace(SOME, tf32=False)) == Plan(1, 7)
    os.write(done[1], b"x")
    os.waitpid(child, 0)
    for end in (*ready, *done):
        os.close(end)


def test_threads_get_the_answers_to_their_own_questions(counting) -> None:
    asked = [replace(SOME, sms=count) for count in range(1, 9)]
    with Cudnn() as found, ThreadPoolExecutor(8) as pool:
        plans = list(pool.map(found.plan, asked))
        assert sorted(plan.workspace for plan in plans) == list(range(8))
        assert [found.plan(one) for one in asked] == plans


def test_it_is_no_program_that_the_script_has_started(counting, tmp_path) -> None:
    from bfc_tools.predicting.file_layer import laid_over

    programs: list[str] = []
    with laid_over(str(tmp_path), programs.append):
        sys.audit("subprocess.Popen", "python", ["python", "-I", cudnn.PROGRAM], None, None)
        assert programs == []
        sys.audit("subprocess.Popen", "python", ["python", "train.py"], None, None)
        sys.audit("subprocess.Popen", "python", b"python", None, None)
        sys.audit("os.system", b"python")
    assert programs == ["python"] * 3


#: What is asked, the plan without a GPU, and what an H100 took: convolutions with one wave of
#: tiles, whose sums are split in few or many parts, or in none; and with several waves.
SHARED: list[tuple[Question, Plan, int]] = [
    (
        question((1, 1024, 14, 14), 1, 3, last=True),
        Plan(380171, 67, Kernel(True, 5, 0, 7, 1)),
        1068467,
    ),
    (
        question((1, 1, 28, 28), 480, 3, "images", "float16", last=True),
        Plan(81680, 67, Kernel(True, 5, 1, 8, 1)),
        1130607,
    ),
    (
        question((4, 16, 7, 7), 1024, 3, "images", last=True),
        Plan(491739, 71, Kernel(True, 1, 0, 5, 1)),
        1311019,
    ),
    (
        question((4, 64, 65, 65), 3, 3, "weight", last=True),
        Plan(574739, 68, Kernel(True, 5, 0, 1, 1)),
        2344679,
    ),
    (
        question((2, 48, 128, 128), 192, 3, "weight", "bfloat16"),
        Plan(15894544, 65, Kernel(True, 4, 1, 1, 5)),
        23104143,
    ),
    (
        question((3, 320, 16, 16), 320, 3, "weight", last=True),
        Plan(131, 68, Kernel(True, 1, 0, 1, 2)),
        393399,
    ),
    (
        question((8, 48, 48, 48), 112, 5, type="float16"),
        Plan(6167187, 62, Kernel(True, 0, 1, 8, 1)),
        14032111,
    ),
    (
        question((2, 1024, 32, 32), 384, 5, "images", last=True),
        Plan(131, 71, Kernel(True, 0, 0, 4, 1)),
        7864959,
    ),
    (
        question((4, 1024, 64, 64), 96, 3, type="bfloat16", last=True),
        Plan(131, 62, Kernel(True, 0, 1, 4, 2)),
        4194659,
    ),
    (
        question((16, 512, 38, 38), 512, 5, "weight"),
        Plan(121897187, 68, Kernel(True, 0, 0, 1, 1)),
        129499907,
    ),
    (
        question((16, 24, 56, 56), 384, 5, type="float16", last=True),
        Plan(1048771, 62, Kernel(True, 0, 0, 8, 1)),
        131,
    ),
    (  # 29 parts would leave one with nothing
        replace(
            question((64, 64, 1, 1000), 64, 3, "weight", "float16"),
            weight=(64, 64, 1, 3),
            result=(64, 64, 1, 500),
            padding=(0, 1),
            strides=(1, 2),
        ),
        Plan(12607735, 65, Kernel(True, 5, 1, 1, 3)),
        13689343,
    ),
    (  # of this kernel no tile is split after many waves
        question((12, 64, 32, 32, 32), 672, 3, "weight", stride=3, last=True),
        Plan(131, 68, Kernel(True, 1, 0, 1, 2)),
        3539535,
    ),
    (  # nor of any that may not
        question((8, 48, 14, 14), 672, 3, type="bfloat16", last=True),
        Plan(131, 62, Kernel(False, 6, 0, 7, 1)),
        0,
    ),
    (  # groups of channels: each in tiles of its own,
        question((64, 512, 16, 16), 1024, 3, "weight", groups=16),
        Plan(136577171, 68, Kernel(True, 5, 0, 1, 1)),
        138740463,
    ),
    (  # two in a tile,
        question((32, 1024, 19, 19), 480, 3, "weight", "bfloat16", groups=32),
        Plan(47906963, 65, Kernel(True, 5, 1, 1, 3)),
        48791835,
    ),
    (  # four, of 15 channels each,
        question((12, 480, 64, 64), 64, 3, "weight", "bfloat16", groups=32, last=True),
        Plan(100810899, 65, Kernel(True, 5, 1, 1, 3)),
        100810768,
    ),
    (  # eight, of three,
        question((12, 96, 28, 28), 256, 3, "weight", "float16", groups=32),
        Plan(9670803, 65, Kernel(True, 5, 1, 1, 5)),
        10981711,
    ),
    (
        question((1, 320, 19, 19), 480, 3, stride=2, groups=32, last=True),
        Plan(1239056, 67, Kernel(False, 8, 0, 1, 1)),
        1239056,
    ),
    (  # and some that are padded to 16, or to four
        question((8, 64, 14, 14), 480, 3, dilation=2, groups=32),
        Plan(6717587, 67, Kernel(False, 16, 0, 2, 1)),
        6717456,
    ),
    (
        question((16, 64, 13, 13), 64, 3, groups=32),
        Plan(2787475, 67, Kernel(False, 16, 0, 2, 1)),
        2787344,
    ),
    (question((3, 48, 64, 64), 512, 3, "weight"), Plan(31948944, 50), 31948944),
]


@pytest.mark.parametrize(("asking", "plan", "measured"), SHARED)
def test_sums_are_those_of_all_multiprocessors(asking, plan, measured) -> None:
    named = (asking.images, asking.weight, asking.result)
    shapes = (Shape(one, asking.type) for one in named)
    groups = asking.images[1] // asking.weight[1]
    made = Convolution(*shapes, groups, asking.strides, asking.last, asking.sms, asking.dilation)
    assert made.on_device(asking.gradient, plan) == measured


@pytest.mark.parametrize(("asking", "plan"), [shared[:2] for shared in SHARED])
def test_a_plan_says_what_its_kernel_shares(asked, asking, plan) -> None:
    assert replace(asked.plan(asking), order=()) == plan


#: What an H100 took where it has other engines than the plan's: cublasLt for single pixels, with or
#: without a workspace, Winograd's algorithm and FFTs; and where it keeps to the plan.
ORDERED: list[tuple[Question, int]] = [
    (question((128, 832, 30, 30), 288, 1, "images", "bfloat16"), 0),
    (question((6, 112, 9, 9), 336, 1, "images", "float16"), 435472),
    (question((16, 96, 35, 35), 200, 1, "images"), 0),
    (question((6, 2304, 14, 14), 768, 1, "images"), 14450704),
    (question((8, 640, 56, 56), 640, 1, "images"), 400),
    (question((8, 640, 56, 56), 640, 1), 400),
    (question((256, 116, 14, 14), 464, 1), 400),
    (question((24, 576, 18, 18), 1024, 1, type="bfloat16"), 24883216),
    (question((1, 32, 19, 19), 80, 1, "weight"), 0),
    (question((12, 96, 28, 28), 32, 1, "weight"), 147456),
    (question((16, 64, 64, 64), 1, 1, "weight"), 4096),
    (question((2, 1536, 1, 1), 1536, 1, "weight"), 0),
    (question((32, 64, 64, 64), 3, 1, "weight"), 35714192),
    (question((64, 32, 15, 15), 1344, 1, "weight", "float16"), 11010048),
    (question((12, 480, 10, 10), 160, 1, "weight", "bfloat16"), 1536016),
    (question((64, 72, 14, 14), 116, 1, "weight", last=True), 3274240),
    (question((4, 1, 128, 128), 1024, 1, "weight", last=True), 269879855),
    (question((32, 288, 14, 14), 896, 1, "weight", "float16", last=True), 3096848),
    (question((16, 1056, 1, 1), 184, 1, "weight", "float16", last=True), 0),
    (question((16, 480, 14, 19), 64, 3, "weight"), 29491200),
    (question((16, 384, 16, 16), 192, 3, "weight"), 31850496),
    (question((128, 128, 32, 32), 64, 3, "weight"), 864026624),
    (question((256, 32, 32, 32), 32, 3, "weight"), 587202560),
    (question((2, 320, 32, 32), 64, 5, "weight"), 692584448),
    (question((8, 112, 16, 16), 64, 7, "weight"), 62914560),
    (question((16, 32, 28, 28), 512, 3, "weight"), 30245008),
]


@pytest.mark.parametrize(("asking", "measured"), ORDERED)
def test_the_order_of_engines_tells_which_others_a_gpu_takes(asked, asking, measured) -> None:
    shapes = (Shape(one, asking.type) for one in (asking.images, asking.weight, asking.result))
    made = Convolution(*shapes, 1, asking.strides, asking.last, asking.sms, asking.dilation)
    plan = asked.plan(asking)
    of = made.by_cublas if made.in_cublas(asking.gradient, plan) else made.on_device
    assert of(asking.gradient, plan) == measured


def test_engines_that_a_program_leaves_out_stand_in_the_order(asked) -> None:
    """Without them it was another order, and a weight transformed in 3.6 MB was expected."""
    asking = question((8, 16, 32, 32), 32, 3, "weight")
    plan = asked.plan(replace(asking, deterministic=True))
    assert plan.order == asked.plan(asking).order
    shapes = (Shape(one, asking.type) for one in (asking.images, asking.weight, asking.result))
    made = Convolution(*shapes, 1, asking.strides, asking.last, asking.sms, asking.dilation)
    assert made.on_device("weight", plan) == 1757719


def test_the_workspace_of_another_kernel_is_left_as_it_is() -> None:
    """Its tiles are others, if it takes less than they would."""
    shapes = [Shape(shape, "float32") for shape in ((4, 64, 65, 65), (3, 64, 3, 3), (4, 3, 65, 65))]
    made = Convolution(*shapes, 1, (1, 1), True, 132)
    assert made.on_device("weight", Plan(131, 68, Kernel(True, 5, 0, 1, 1))) == 131
    assert made.on_device("weight", Plan(574739, 68, Kernel(True, 99, 0, 1, 1))) == 574739
    assert made.on_device("weight", Plan(574739, 68, Kernel(True, 5, 0, 8, 8))) == 574739
    assert made.on_device("weight", Plan(574739, 68, Kernel(True, 5, 0, 0, 0))) == 574739
