"""cuDNN itself, asked what a convolution will work in, without a GPU.

Since release 9.8 cuDNN plans for a device that is only described: its heuristics choose the
algorithm, and the plan says how large its workspace is ("Deviceless ahead-of-time compilation" in
NVIDIA's documentation; the descriptors are those of cudnn_graph.h). PyTorch takes the first plan
that works (ATen/native/cudnn/Conv_v8.cpp, without `torch.backends.cudnn.benchmark`), so the first
is asked for. A wheel of PyTorch for CUDA brings the libraries, on a machine without a GPU, too;
else they are in the packages nvidia-cudnn-cu13 and nvidia-cublas.

This file is also the program that asks, in a process of its own: what happens to cuDNN there does
not happen to the prediction, and no GPU is touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

#: Where the library is, if it is not found among the installed packages; "" for no library.
VARIABLE = "BFC_CUDNN_LIBRARY"
LIBRARY = "libcudnn.so.9"
#: The first release that plans without a device.
OLDEST = 90800
#: Seconds after which an answer is no longer waited for.
LONGEST = 60.0
#: What is run to ask: this file.
PROGRAM = __file__


@dataclass(frozen=True)
class Question:
    """A convolution that is not transposed, and the pass that is to be planned."""

    gradient: str  # what is computed: "result", "images" or "weight"
    images: tuple[int, ...]  # shapes
    weight: tuple[int, ...]
    result: tuple[int, ...]
    last: bool  # whether the channels of a pixel lie side by side
    type: str  # such as "bfloat16"
    padding: tuple[int, ...]
    strides: tuple[int, ...]
    dilation: tuple[int, ...]
    tf32: bool  # whether tensor cores may compute with 32 bits
    deterministic: bool
    name: str  # of the GPU
    cc: tuple[int, int]
    sms: int
    memory: int


@dataclass(frozen=True)
class Kernel:
    """A kernel that can share its sums, by choices that cuDNN calls knobs."""

    splits: bool  # whether it does
    tile: int  # cuDNN's number of the shape of a tile
    depth: int  # its number of how far a step goes
    cluster_rows: int  # tiles of the blocks that run together
    cluster_columns: int

    @property
    def cluster(self) -> int:
        """Blocks that run together."""
        return self.cluster_rows * self.cluster_columns


@dataclass(frozen=True)
class Plan:
    """What cuDNN would do."""

    workspace: int  # bytes
    engine: int  # cuDNN's number of what computes it
    kernel: Kernel | None = None  # None if it shares no sums
    order: tuple[int, ...] = ()  # the engines that the first heuristic names


class Cudnn:
    """A process that asks cuDNN; use it as a context. It is started by the first question, which a
    thread of the process that made this one asks."""

    def __init__(self) -> None:
        self.version = 0  # 91900 is 9.19; 0 while nothing was asked, or if there is no cuDNN
        self._process: subprocess.Popen[str] | None = None
        self._found: dict[Question, Plan | None] = {}
        self._over = False
        self._owner = os.getpid()
        self._lock = threading.Lock()

    def __enter__(self) -> Cudnn:
        return self

    def __exit__(self, *raised: object) -> None:
        if os.getpid() == self._owner:
            self._end()

    def plan(self, question: Question) -> Plan | None:
        """The plan; None if cuDNN is not there, is too old, or has none, as of complex numbers; and
        in a process that was forked."""
        if os.getpid() != self._owner or question.type not in NUMBERS:
            return None
        if not self._lock.acquire(timeout=LONGEST):
            return None  # a signal handler convolves while its own thread waits for an answer
        try:
            if question not in self._found:
                self._found[question] = self._ask(question)
            return self._found[question]
        finally:
            self._lock.release()

    def _ask(self, question: Question) -> Plan | None:
        if self._over:
            return None
        try:
            if self._process is None:
                self._start()
            if self._process is None:
                return None
            answer = self._said(json.dumps(asdict(question)))
        except BaseException:  # the next answer would be that of this question
            self._stop()
            raise
        if len(answer) != 2 and len(answer) < 2 + len(KNOBS):  # it died
            self.version = 0
            self._end()
            return None
        workspace, engine, *more = answer
        knobs, order = more[: len(KNOBS)], tuple(more[len(KNOBS) :])
        kernel = Kernel(knobs[0] == 0, *knobs[1:]) if min(knobs, default=-1) >= 0 else None
        return Plan(workspace, engine, kernel, order) if workspace >= 0 else None

    def _start(self) -> None:
        paths = libraries()
        if paths:
            environment = {
                name: value for name, value in os.environ.items() if not name.startswith("CUDNN_")
            }
            with contextlib.suppress(OSError):
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", PROGRAM, *paths],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    env=environment | {"CUDA_VISIBLE_DEVICES": ""},
                )
                self.version = next(iter(self._said()), 0)
        if self.version < OLDEST:
            self.version = 0
            self._end()

    def _said(self, line: str = "") -> list[int]:
        """The numbers that the process writes once it was told a line; none if it is gone, or takes
        too long."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if line:
                process.stdin.write(f"{line}\n")
                process.stdin.flush()
            answers = select.poll()  # select() takes no descriptor above 1023
            answers.register(process.stdout, select.POLLIN)
            if not answers.poll(LONGEST * 1000):
                return []
            return list(map(int, process.stdout.readline().split()))
        except (OSError, ValueError):
            return []

    def _end(self) -> None:
        self._over = True
        self._stop()

    def _stop(self) -> None:
        """It has nothing to lose: a process that the program forked may hold its input open."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with contextlib.suppress(OSError):
                    pipe.close()


def libraries() -> list[str]:
    """The paths of cuDNN, and then of what it loads, among the packages that Python finds."""
    given = os.environ.get(VARIABLE)
    if given == "":
        return []
    folders = [Path(folder or ".", "nvidia") for folder in sys.path]
    if given is not None:
        given = os.path.abspath(given)  # links stay: what it loads lies beside the link
        folders.insert(0, Path(given).parent.parent.parent)
    places = [Path(given)] if given else [folder / "cudnn" / "lib" / LIBRARY for folder in folders]
    for cudnn in places:
        if cudnn.is_file():
            others = [
                path
                for folder in dict.fromkeys((cudnn.parent.parent.parent, *folders))
                for pattern in ("libcublasLt.so.*", "libnvrtc.so.*")
                for path in sorted(folder.glob(f"*/lib/{pattern}"))
            ]
            return [str(cudnn), *map(str, others)]
    return []


#: The choices that make a `Kernel`, as the representation of a plan names them. The first is 0
#: where sums may be split.
KNOBS = tuple(
    f"CUDNN_KNOB_TYPE_{name}"
    for name in ("WORKSPACE", "TILE_SIZE", "TILEK", "TILE_CGA_M", "TILE_CGA_N")
)

# -- the process that asks ----------------------------------------------------------------------

# Numbers of cudnn_graph.h: descriptors,
CONVOLUTION, ENGINE, CONFIG, HEURISTICS, PLAN, GRAPH, TENSOR, DEVICE = 1, 2, 3, 4, 5, 15, 17, 38
#: for what is computed, the operation and its attributes: the convolution, weight, images, result,
#: and the two factors;
OPERATIONS = {
    "result": (10, (702, 703, 704, 705, 700, 701)),
    "images": (12, (708, 709, 710, 711, 706, 707)),
    "weight": (11, (714, 715, 716, 717, 712, 713)),
}
# types of attributes,
NUMBER_TYPE, INTEGERS, FLOAT, DOUBLE, MODE, HEURISTIC, NOTE, DESCRIPTORS, CHARACTERS = (
    *(1, 3, 4, 5, 7, 8, 11, 15, 24),
)
C_TYPES: dict[int, Any] = {
    INTEGERS: ctypes.c_int64,
    FLOAT: ctypes.c_float,
    DOUBLE: ctypes.c_double,
    DESCRIPTORS: ctypes.c_void_p,
    CHARACTERS: ctypes.c_char,
}
# of numbers,
NUMBERS = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 9}
# heuristics in the order in which PyTorch asks them,
INSTANT, FALLBACK = 0, 2
# and the notes by which it leaves out what an engine does.
TENSOR_CORES, ROUNDS_INPUTS, NOT_DETERMINISTIC, MOST_NOTES = 0, 1, 4, 10
CROSS_CORRELATION = 1
ALIGNMENT = 16
#: What the CUDA programming guide says of compute capabilities: the most bytes of shared memory
#: that a block can have.
SHARED = {(7, 0): 96, (7, 5): 64, (8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227}
SHARED_ELSE = 99


class NotSupportedError(Exception):
    """cuDNN did not do it."""


class Descriptor:
    """One of cuDNN's, by number; `library` is the loaded one."""

    library: ctypes.CDLL

    def __init__(self, kind: int) -> None:
        self.pointer = ctypes.c_void_p()
        self._kept: list[object] = []
        _check(self.library.cudnnBackendCreateDescriptor(kind, ctypes.byref(self.pointer)))

    def __del__(self) -> None:
        self.library.cudnnBackendDestroyDescriptor(self.pointer)

    def set(self, attribute: int, kind: int, values: Sequence[Any]) -> Descriptor:
        """Sets an attribute."""
        self._kept.append(values)
        given = [one.pointer for one in values] if kind == DESCRIPTORS else values
        array = (C_TYPES.get(kind, ctypes.c_int) * len(values))(*given)
        count = ctypes.c_int64(len(values))
        _check(
            self.library.cudnnBackendSetAttribute(
                self.pointer, attribute, kind, count, ctypes.byref(array)
            )
        )
        return self

    def done(self) -> Descriptor:
        """Nothing more is set."""
        _check(self.library.cudnnBackendFinalize(self.pointer))
        return self

    def get(self, attribute: int, kind: int, array: Any) -> int:
        """Fills an array (none: counts), and returns how many there are."""
        count = ctypes.c_int64()
        most = ctypes.c_int64(0 if array is None else len(array))
        _check(
            self.library.cudnnBackendGetAttribute(
                *(self.pointer, attribute, kind, most, ctypes.byref(count)),
                None if array is None else ctypes.byref(array),
            )
        )
        return count.value

    def numbers(self, attribute: int, kind: int, most: int = 1) -> list[int]:
        """Numbers of an attribute."""
        array = (C_TYPES.get(kind, ctypes.c_int) * most)()
        count = self.get(attribute, kind, array)
        return list(array)[:count]

    def parts(self, attribute: int, kind: int) -> list[Descriptor]:
        """Descriptors of an attribute, of a kind."""
        made = [Descriptor(kind) for _ in range(self.get(attribute, DESCRIPTORS, None))]
        array = (ctypes.c_void_p * len(made))(*(one.pointer for one in made))
        return made[: self.get(attribute, DESCRIPTORS, array)]


def _check(status: int) -> None:
    if status:
        raise NotSupportedError(status)


def plan(question: Question) -> list[int]:
    """The first plan that PyTorch would take: its workspace, its engine, its choices of KNOBS, and
    the engines that the first heuristic names, in their order, also those that PyTorch leaves out.
    """
    device = _device(question)
    graph = Descriptor(GRAPH).set(801, DESCRIPTORS, [_operation(question)]).done()
    found: list[int] = []
    order: list[int] = []
    for heuristic in (INSTANT, FALLBACK):
        for config in _configs(graph, device, heuristic):
            engine = config.parts(300, ENGINE)[0]
            number = engine.numbers(1301, INTEGERS)
            order += number if heuristic == INSTANT else []
            if not found and not _left_out(question, engine):
                found = _planned(config, device, number)
        if found:
            return [*found, *order]
    raise NotSupportedError


def _planned(config: Descriptor, device: Descriptor, number: list[int]) -> list[int]:
    made = Descriptor(PLAN).set(401, DESCRIPTORS, [config])
    with contextlib.suppress(NotSupportedError):
        made.set(407, DESCRIPTORS, [device]).done()
        return [*made.numbers(402, INTEGERS), *number, *_knobs(made)]
    return []


def _knobs(made: Descriptor) -> list[int]:
    """-1 for each, if one is missing."""
    try:
        text = (ctypes.c_char * made.get(405, CHARACTERS, None))()
        made.get(405, CHARACTERS, text)
        choices = json.loads(text.value)["engine"]["knobChoices"]
        return [int(choices[name]) for name in KNOBS]
    except (NotSupportedError, ValueError, KeyError, TypeError):
        return [-1] * len(KNOBS)


def _configs(graph: Descriptor, device: Descriptor, heuristic: int) -> list[Descriptor]:
    asked = Descriptor(HEURISTICS).set(201, DESCRIPTORS, [graph])
    asked.set(200, HEURISTIC, [heuristic]).set(204, DESCRIPTORS, [device])
    try:
        return asked.done().parts(202, CONFIG)
    except NotSupportedError:
        return []


def _left_out(question: Question, engine: Descriptor) -> bool:
    """filterEngineConfigs in Conv_v8.cpp."""
    notes = engine.numbers(1303, NOTE, MOST_NOTES)
    if question.deterministic and NOT_DETERMINISTIC in notes:
        return True
    if question.type != "float32" and question.tf32:
        return False
    return ROUNDS_INPUTS in notes or (not question.tf32 and TENSOR_CORES in notes)


def _operation(question: Question) -> Descriptor:
    computed = "float64" if question.type == "float64" else "float32"
    convolution = Descriptor(CONVOLUTION).set(100, NUMBER_TYPE, [NUMBERS[computed]])
    convolution.set(101, MODE, [CROSS_CORRELATION]).set(106, INTEGERS, [len(question.strides)])
    convolution.set(105, INTEGERS, question.padding).set(104, INTEGERS, question.padding)
    convolution.set(103, INTEGERS, question.strides).set(102, INTEGERS, question.dilation).done()
    kind, (way, weight, images, result, *factors) = OPERATIONS[question.gradient]
    made = Descriptor(kind).set(way, DESCRIPTORS, [convolution])
    made.set(weight, DESCRIPTORS, [_tensor(ord("w"), question.weight, question)])
    made.set(images, DESCRIPTORS, [_tensor(ord("x"), question.images, question)])
    made.set(result, DESCRIPTORS, [_tensor(ord("y"), question.result, question)])
    for factor, value in zip(factors, (1.0, 0.0), strict=True):
        made.set(factor, DOUBLE if computed == "float64" else FLOAT, [value])
    return made.done()


def _tensor(name: int, shape: Sequence[int], question: Question) -> Descriptor:
    order = list(range(len(shape)))
    if question.last:
        order = [0, *order[2:], 1]
    strides, so_far = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = so_far
        so_far *= shape[dim]
    made = Descriptor(TENSOR).set(901, NUMBER_TYPE, [NUMBERS[question.type]])
    made.set(902, INTEGERS, shape).set(903, INTEGERS, strides)
    return made.set(906, INTEGERS, [name]).set(900, INTEGERS, [ALIGNMENT]).done()


def _device(question: Question) -> Descriptor:
    """What is not in the question does not change what was measured on an H100."""
    major, minor = question.cc
    text = json.dumps(
        {
            "deviceName": question.name,
            "deviceVer": 100 * major + 10 * minor,
            "multiProcessorCount": question.sms,
            "totalGlobalMem": question.memory,
            "maxSharedMemoryPerBlockOptin": SHARED.get((major, minor), SHARED_ELSE) << 10,
            "maxSharedMemoryPerBlock": 48 << 10,
            "reservedSharedMemoryPerBlock": 1 << 10,
            "maxGridSize": [2**31 - 1, 65535, 65535],
            "maxBlockSize": [1024, 1024, 64],
            "maxThreadsPerBlock": 1024,
            "maxThreadsPerSM": 2048,
            "maxCtasPerSM": 32,
            "regsPerBlock": 64 << 10,
            "maxRegistersPerSM": 64 << 10,
            "warpSize": 32,
            "smClockRateKHz": 1_980_000,
            "memClockRateKHz": 2_619_000,
            "l2CacheSize": 50 << 20,
            "supportCoopLaunch": 1,
            "isTccDriver": 0,
            "pciDeviceId": 0,
            "cudaDeviceId": 0,
            "driverVer": 13000,
        }
    )
    return Descriptor(DEVICE).set(2702, CHARACTERS, text.encode()).done()


def _load(paths: Sequence[str]) -> ctypes.CDLL:
    """cuDNN, once what it cannot do without is loaded: it ends the process otherwise."""
    library = ctypes.CDLL(paths[0], mode=ctypes.RTLD_GLOBAL)
    library.cudnnGetVersion.restype = ctypes.c_size_t
    library.cudnnGetCudartVersion.restype = ctypes.c_size_t
    major = library.cudnnGetCudartVersion() // 1000
    for name, needed in ((f"libcublasLt.so.{major}", True), (f"libnvrtc.so.{major}", False)):
        found = next((path for path in paths if Path(path).name == name), name)
        try:
            ctypes.CDLL(found, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            if needed:
                raise
    return library


def _questions(lines: IO[str]) -> Iterator[Question]:
    for line in lines:
        values: dict[str, Any] = json.loads(line)
        for name, value in values.items():
            values[name] = tuple(value) if isinstance(value, list) else value
        yield Question(**values)


def main(paths: Sequence[str]) -> None:
    """Writes the version, and then the numbers of `plan` for each question, or -1 twice if there is
    none. What cuDNN writes goes elsewhere."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        Descriptor.library = _load(paths)
        print(Descriptor.library.cudnnGetVersion(), file=answers, flush=True)
        for question in _questions(sys.stdin):
            try:
                found = plan(question)
            except NotSupportedError:
                found = [-1, -1]
            print(*found, file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
