"""`bfc predict`: what it prints, when it stops, and what it says of what goes wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import bfc
from bfc_tools.cli import main

ROOT = Path(__file__).parents[2]

TRAIN = """
import argparse
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--device", default="cuda")
arguments = parser.parse_args()
print("epochs", arguments.epochs, arguments.device)
model = torch.nn.Linear(1024, 1024).to(arguments.device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(1_000_000):
    model(torch.randn(8, 1024, device=arguments.device)).sum().backward()
    optimizer.step()
"""


def test_a_training_is_stopped_and_told(script, capsys, tmp_path) -> None:
    words = ["predict", script(TRAIN), "--epochs", "3", "--device", "24GiB", "--save", "t.npz"]
    assert main([*words, "--", "--device", "cuda:0"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("It fits on a GPU of 24.00 GiB: it reserves at most ")
    assert "stopped after 2 steps" in out
    assert "optimizer state" in out
    assert "CUDA context" in out
    assert "epochs 3 cuda:0" in err
    trace = bfc.Trace.load(tmp_path / "t.npz")
    assert "Linear" in trace.owners
    assert any(frame.filename.endswith("train.py") for frame in trace.frames)


def test_a_device_of_the_scripts_is_left_to_it(script, capsys) -> None:
    assert main(["predict", script(TRAIN), "--device", "cuda", "--json", "--steps", "1"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert "epochs 1 cuda\n" in err
    assert (found["fits"], found["steps"], found["stopped"]) == (True, 1, True)
    assert found["peak_reserved"] >= found["peak_allocated"] >= found["peak_requested"]
    assert found["device"]["name"] == "NVIDIA H100 80GB HBM3"


OWN = """
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
parser.add_argument("words", nargs="*")
arguments = parser.parse_args()
print("steps", arguments.steps, arguments.words)
torch.ones(arguments.steps or 1, device="cuda")
"""


@pytest.mark.parametrize(
    ("before", "after", "said", "note"),
    [
        ([], ["--steps", "7"], "steps 7 []", "--steps left to train.py"),
        ([], ["--steps=7"], "steps 7 []", "--steps left to train.py"),
        (["--steps", "3"], ["--steps", "7", "a"], "steps 7 ['a']", "--steps left to train.py"),
        (
            [],
            ["--device", "a100", "--json"],
            "steps None []",
            "--device, --json taken as bfc's own",
        ),
        (["--json"], ["--", "--steps", "7", "--", "x"], "steps 7 ['x']", ""),
        ([], ["--by=op", "a"], "steps None ['a']", "--by taken as bfc's own"),
    ],
)
def test_an_option_that_the_script_has_is_left_to_it(
    script, capsys, before, after, said, note
) -> None:
    assert main(["predict", *before, script(OWN), *after]) == 0
    err = capsys.readouterr().err
    assert said in err
    assert note in err
    assert ("bfc: " in err) == bool(note)


def test_an_option_that_is_nearly_ours_goes_to_the_script_with_a_word(script, capsys) -> None:
    """A script that looks at none was predicted for another device than was meant."""
    text = "import sys, torch\ntorch.ones(3, device='cuda')\nprint(sys.argv[1:], '--second')\n"
    file = script(text)
    assert main(["predict", "--json", file, "--devcie", "a100", "--second=1"]) == 0
    err = capsys.readouterr().err
    assert "['--devcie', 'a100', '--second=1']" in err
    assert err.count("Did you mean") == 1
    assert "--devcie goes to train.py. Did you mean bfc's own '--device'?" in err
    assert main(["predict", "--json", file, "--", "--devcie"]) == 0
    assert "Did you mean" not in capsys.readouterr().err


def test_a_module_is_run_as_python_runs_it(script, capsys, tmp_path) -> None:
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(
        "import sys, torch\nfrom . import other\nprint(sys.argv[1:], __package__)\n"
    )
    (package / "other.py").write_text("import torch\ntorch.ones(3, device='cuda')\n")
    assert main(["predict", "-m", "pack", "--json", "one"]) == 0
    assert "['one'] pack" in capsys.readouterr().err


def test_the_arguments_of_a_module_may_begin_with_an_option(script, capsys, tmp_path) -> None:
    (tmp_path / "parcel").mkdir()
    (tmp_path / "parcel" / "train.py").write_text(
        "import sys, torch\n'--steps'\ntorch.ones(3, device='cuda')\nprint(sys.argv[1:])\n"
    )
    options = ["--lr", "1", "--cc", "9.0", "--steps", "3"]
    assert main(["predict", "--json", "-m", "parcel.train", *options]) == 0
    err = capsys.readouterr().err
    assert "['--lr', '1', '--steps', '3']" in err
    assert "--steps left to parcel.train" in err
    assert "--cc taken as bfc's own" in err


@pytest.mark.parametrize("before", [[], ["--lr", "1"]])
def test_what_stands_behind_two_dashes_is_the_modules(script, capsys, tmp_path, before) -> None:
    (tmp_path / "box").mkdir()
    (tmp_path / "box" / "train.py").write_text(
        "import sys, torch\ntorch.ones(3, device='cuda')\nprint(sys.argv[1:])\n"
    )
    assert main(["predict", "--json", "-m", "box.train", *before, "--", "--steps", "3"]) == 0
    assert str([*before, "--steps", "3"]) in capsys.readouterr().err


def test_a_snapshot_that_a_library_could_write_is_not_waited_for(script, capsys, tmp_path) -> None:
    library = tmp_path / ".venv" / "lib" / "python3.11" / "site-packages"
    library.mkdir(parents=True)
    (library / "some_library.py").write_text("# torch.cuda.memory._dump_snapshot\n")
    text = f"import sys\nsys.path.insert(0, {str(library)!r})\nimport some_library\n{TRAIN}"
    assert main(["predict", script(text), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 2


def test_a_thread_that_raises_is_a_failure(script, capsys, monkeypatch) -> None:
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)  # not that of pytest
    text = (
        "import threading, torch\nkept = torch.ones(3, device='cuda')\n"
        "thread = threading.Thread(target=lambda: 1 / 0)\nthread.start()\nthread.join()\n"
    )
    assert main(["predict", script(text), "--json"]) == 2
    out, err = capsys.readouterr()
    assert json.loads(out)["fits"] is None
    assert "raised ZeroDivisionError" in err


def test_how_far_it_is_is_told(script, capsys, monkeypatch) -> None:
    from bfc_tools.cli import predict

    monkeypatch.setattr(predict, "EVERY", 0.0)
    text = "import torch\nx = torch.ones(3, device='cuda')\nfor _ in range(3000): x = x + 1\n"
    assert main(["predict", script(text), "--json"]) == 0
    assert "0 optimizer steps, 0 forward passes, 1.50 KiB live" in capsys.readouterr().err.replace(
        "24 B", "1.50 KiB"
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("open('nothing.bin')", "needs that file here, too"),
        ("raise ConnectionError('no route')", "needs the network here, too"),
        ("import urllib.request as u; u.urlopen('http://127.0.0.1:9')", "the network here, too"),
        ("torch.ones(1, device='cuda:3')", "there is no cuda:3"),
        ("torch.ops.bfc_no_fake.run(x)", "torch.library.register_fake('bfc_no_fake::run')"),
    ],
)
def test_what_is_not_there_is_named(script, capsys, line, said) -> None:
    text = "import torch\nx = torch.ones(1 << 20, device='cuda')\n"
    if "no_fake" in line:
        text += (
            "library = torch.library.Library('bfc_no_fake', 'FRAGMENT')\n"
            "library.define('run(Tensor x) -> Tensor')\n"
        )
    assert main(["predict", script(f"{text}{line}\n")]) == 2
    out, err = capsys.readouterr()
    assert out.startswith("Until it failed: It fits")
    assert said in err


def test_settings_that_are_wrong_are_told(script, capsys, monkeypatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:potatoes")
    assert main(["predict", script("import torch\n")]) == 2
    assert "PYTORCH_CUDA_ALLOC_CONF" in capsys.readouterr().err


def test_operators_whose_memory_only_a_gpu_knows_are_printed_once(script, capsys) -> None:
    text = (
        "import torch\nlayer = torch.nn.Conv2d(3, 8, 3).cuda()\n"
        "for _ in range(3): layer(torch.ones(1, 3, 8, 8, device='cuda')).sum().backward()\n"
    )
    assert main(["predict", script(text)]) == 0
    out = capsys.readouterr().out
    assert out.count("aten::convolution, aten::convolution_backward: cuDNN's workspace") == 1
    assert "cuDNN's workspaces: " not in out, "they are in the figures"


def test_what_does_not_fit_is_refused(script, capsys) -> None:
    text = "import torch\na = torch.empty(3 << 30, dtype=torch.uint8, device='cuda')\n"
    assert main(["predict", "--device", "2GiB", "--no-advice", script(text)]) == 1
    assert capsys.readouterr().out.startswith("It does not fit on a GPU of 2.00 GiB")
    assert (
        main(["predict", "--device", "2GiB", "--no-advice", "--oom", script(f"{text}x = 1")]) == 1
    )
    _out, err = capsys.readouterr()
    assert "CUDA out of memory" in err


def test_a_script_that_raises_is_told_with_the_figures_until_then(script, capsys) -> None:
    text = "import torch\nx = torch.ones(1 << 20, device='cuda')\nopen('nothing-there.bin')\n"
    assert main(["predict", script(text)]) == 2
    out, err = capsys.readouterr()
    assert out.startswith("Until it failed: It fits on")
    assert "live       4.00 MiB" in out
    assert 'File "train.py", line 3' in err
    assert "runpy" not in err
    assert "train.py raised FileNotFoundError" in err
    assert "needs that file here, too" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["predict", "nothing.py"], "no such script: nothing.py"),
        (["predict"], "which script?"),
        (["predict", "train.py", "--device", "h1000"], "no GPU named 'h1000'"),
        (
            ["predict", "--device", "cuda", "train.py"],
            "behind it: bfc predict train.py --device cuda",
        ),
        (["predict", "train.py", "--device", "24"], "Write 24GiB"),
        (["predict", "notebook.ipynb"], "jupyter nbconvert --to script notebook.ipynb"),
        (["predict", "train.py", "--settings", "no_such_key:1"], "no_such_key"),
        (["predict", "train.py", "--steps", "-1"], "--steps is 0"),
        (["predict", "train.py", "--forwards", "0"], "--forwards is 1 or more"),
        (["predict", "train.py", "--seconds", "nan"], "--seconds is more than 0"),
        (["predict", "train.py", "--save", "model.pt"], "an .npz trace, not model.pt"),
    ],
)
def test_a_wrong_call_is_told(script, capsys, words, said) -> None:
    script("import torch\ntorch.ones(1, device='cuda')\n")
    Path("notebook.ipynb").write_text("{}")
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_powers_of_1000_are_said(script, capsys) -> None:
    assert main(["predict", script(TRAIN), "--device", "24GB", "--steps", "1"]) == 0
    assert "If you mean powers of 1024, write 24GiB" in capsys.readouterr().err


def test_a_script_without_work_on_the_gpu_is_told(script, capsys) -> None:
    assert main(["predict", script("import torch\ntorch.ones(3)\n")]) == 2
    assert "allocated nothing on the GPU" in capsys.readouterr().err


def test_a_program_that_catches_everything_is_stopped_at_each_step(script, capsys) -> None:
    text = TRAIN.replace("range(1_000_000)", "range(5)").replace(
        "    optimizer.step()\n",
        "    try:\n        optimizer.step()\n    except BaseException:\n        print('caught')\n",
    )
    assert "caught" in text
    assert main(["predict", script(text)]) == 0
    assert capsys.readouterr().err.count("caught") == 4


def test_it_waits_for_the_snapshot_that_the_script_writes(script, capsys) -> None:
    text = TRAIN.replace("range(1_000_000)", "range(4)") + (
        "    if _ == 2: torch.cuda.memory._record_memory_history()\n"
        "torch.cuda.memory._dump_snapshot('s.pickle')\n"
    )
    assert main(["predict", script(text), "--json"]) == 0
    told = capsys.readouterr()
    assert told.err.count("until the program writes a snapshot") == 1
    found = json.loads(told.out)
    assert (found["steps"], found["stopped"], found["snapshots"]) == (4, False, ["s.pickle"])
    assert len(bfc.Trace.from_torch("s.pickle")) > 5


SERVE = """
import time, torch
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).cuda()
x = torch.randn(8, 64, device="cuda")
for _ in range(1_000_000):
    model(x)
"""


def test_a_program_without_an_optimizer_is_stopped_after_calls_of_its_model(script, capsys) -> None:
    assert main(["predict", script(SERVE), "--forwards", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["forwards"], found["stopped_after"]) == (3, "3 forward passes")
    assert (found["fits"], found["stopped"], found["steps"]) == (True, True, 0)
    assert main(["predict", script(SERVE), "--forwards", "1"]) == 0
    assert "it was stopped after 1 forward pass\n" in capsys.readouterr().out


def test_what_a_checkpoint_computes_again_is_no_call_of_a_model(script, capsys) -> None:
    text = (
        "import torch\nfrom torch.utils.checkpoint import checkpoint\n"
        "model = torch.nn.Linear(64, 64).cuda()\nx = torch.randn(8, 64, device='cuda')\n"
        "for _ in range(3): checkpoint(model, x, use_reentrant=False).sum().backward()\n"
    )
    assert main(["predict", script(text), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["forwards"] == 3


@pytest.mark.parametrize(
    "loop",
    [
        "    model(x)",
        "    time.sleep(60)",
        "    sum(range(1000))",
        "    try:\n        time.sleep(60)\n    except BaseException:\n        time.sleep(60)",
        "    model(x).sum().backward()",
    ],
)
def test_a_program_is_stopped_after_seconds(script, capsys, loop: str) -> None:
    text = SERVE.replace("    model(x)\n", f"{loop}\n")
    assert main(["predict", script(text), "--seconds", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["stopped"], found["stopped_after"]) == (True, "2 seconds")
    assert found["peak_requested"] > 0


HOSTILE = """
import atexit, os, sqlite3, sys, threading, time
import torch

class Late:
    def __del__(self):
        open("late.txt", "w").write("x")

late = Late()
late.me = late
atexit.register(lambda: open("log.txt", "w").write("at the exit"))

def work():
    while True:
        open("log.txt", "w").write("a thread")
        time.sleep(0.01)

threading.Thread(target=work, daemon=True).start()
cached = os.environ["MY_CACHE_DIR"] + "/features.pt"
torch.save(torch.randn(8, 64), cached + ".tmp")
os.replace(cached + ".tmp", cached)
assert torch.load(cached).shape == (8, 64)
assert os.listdir(os.environ["MY_CACHE_DIR"]) == ["features.pt"]
try:
    os.execv(sys.executable, [sys.executable, "-c", "open('log.txt', 'w')"])
    print("not refused")
except PermissionError as error:
    assert "prediction" in str(error)
for base in (sqlite3.dbapi2.connect("base"), sqlite3.connect("file:base", uri=True)):
    base.execute("create table if not exists t (x)")
    base.close()
assert sqlite3.connect(":memory:").execute("select 1").fetchone() == (1,)
if os.fork() == 0:
    sys.exit(0)
os.wait()
torch.nn.Linear(64, 64).cuda()(torch.ones(8, 64).cuda()).sum().backward()
"""


def test_files_stay_as_they_are_until_the_process_has_ended(script, tmp_path: Path) -> None:
    """What other threads, functions at the exit and finalisers write; what only a prediction could
    read, in a cache; ways to a database; another program in the place of this one; a forked
    child, which says nothing."""
    (tmp_path / "log.txt").write_text("the user's")
    (tmp_path / "cache").mkdir()
    (tmp_path / "scratch").mkdir()
    command = [sys.executable, "-m", "bfc", "predict", "--no-advice", "--save", "run.npz"]
    places = {"MY_CACHE_DIR": str(tmp_path / "cache"), "TMPDIR": str(tmp_path / "scratch")}
    done = subprocess.run(
        [*command, script(HOSTILE)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | places,
    )
    assert done.returncode == 0, done.stderr
    assert "not refused" not in done.stderr
    assert done.stdout.count("live") == done.stdout.count("reserved") == 1, done.stdout
    assert (tmp_path / "log.txt").read_text() == "the user's"
    names = {path.name for path in tmp_path.rglob("*")}
    assert names == {"cache", "log.txt", "run.npz", "scratch", "train.py"}
    files = {frame.filename for frame in bfc.Trace.load(tmp_path / "run.npz").frames}
    assert "train.py" in {Path(file).name for file in files}
    assert [file for file in files if file.startswith(f"{ROOT}/bfc")] == []


STOPPED = """
import os, signal, sys, torch
open("log.txt", "w").write("x")
x = torch.ones(1 << 20, device="cuda")
try:
    torch.jit.load("nothing/there.pt")
except ValueError as error:
    assert str(error).endswith("nothing/there.pt does not exist"), error
    assert "bfc-predict" not in str(error)
os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_program_that_is_told_to_end_leaves_nothing(script, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "bfc", "predict", "--no-advice", script(STOPPED)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "scratch")},
    )
    assert done.stdout.startswith("Until it was interrupted: It fits on"), done.stderr
    assert done.returncode == 128 + signal.SIGTERM
    assert list((tmp_path / "scratch").iterdir()) == []
    assert not (tmp_path / "log.txt").exists()


SWALLOWED = """
import os, signal, sys, time, torch
x = torch.ones(1 << 20, device="cuda")
class Dropped:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
sys.unraisablehook = lambda lost: print("lost", lost.exc_type.__name__, flush=True)
Dropped()
try:
    time.sleep(600)
except SystemExit:
    print("caught", flush=True)
time.sleep(600)
"""


def test_a_signal_ends_a_program_that_loses_or_catches_its_exception(script, tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "bfc", "predict", "--no-advice", script(SWALLOWED)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert "lost SystemExit\ncaught\n" in done.stdout + done.stderr, done
    assert "Until it was interrupted: It fits on" in done.stdout, done.stderr
    assert done.returncode == 128 + signal.SIGTERM


LEFT = """
import os, torch
torch.ones(1 << 20, device="cuda")
open("log.txt", "w").write("x")
os._exit(0)
"""


def test_a_program_that_ends_its_process_is_told(script, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "bfc", "predict", "--no-advice", script(LEFT)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "scratch")},
    )
    assert done.stdout.startswith("It fits on"), done.stderr
    assert done.returncode == 0
    assert list((tmp_path / "scratch").iterdir()) == []
    assert not (tmp_path / "log.txt").exists()


def test_a_package_of_another_build_is_told_from_one_that_is_missing(script, capsys) -> None:
    """transformers says "Could not import module" of it, and the hint was to install a package."""
    text = """
try:
    raise RuntimeError("operator torchvision::nms does not exist")
except RuntimeError as error:
    raise ModuleNotFoundError("Could not import module 'PreTrainedModel'") from error
"""
    assert main(["predict", script(text)]) == 2
    err = capsys.readouterr().err
    assert "torchvision and torchaudio load theirs only beside the PyTorch" in err
    assert "needs that package" not in err


def test_graphs_that_no_backward_pass_uses_are_told(script, capsys) -> None:
    text = """
import torch

model = torch.nn.Sequential(*[torch.nn.Linear(256, 256), torch.nn.ReLU()] * 8).cuda()
kept = [model(torch.randn(4096, 256, device="cuda")).mean() for _ in range(4)]
"""
    assert main(["predict", script(text), "--device", "16MiB", "--no-advice"]) == 1
    assert "Under `with torch.no_grad():` they keep none of it." in capsys.readouterr().out
    assert main(["predict", script(text + "kept[0].backward()\n")]) == 0
    assert "torch.no_grad()" not in capsys.readouterr().out
    with_none = text.replace("kept = [", "with torch.no_grad(): kept = [")
    assert main(["predict", script(with_none)]) == 0
    assert "torch.no_grad()" not in capsys.readouterr().out
