"""`bfc run`, and what Python does at its start below it. A stand-in for torch says who was there:
the real one is in tests/cuda/test_torch_run.py."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from documents import ROOT

from bfc.errors import SettingsError
from bfc_tools.cli import main
from bfc_tools.cli.serving import Wanted

Run = Callable[..., subprocess.CompletedProcess[str]]
TELLS = """
import os, sys
print(__name__, sys.argv[1:], os.environ["BFC_RUN"])
print([it for it in sys.path if "startup" in it], "sitecustomize" in sys.modules)
sys.exit(7)
"""
#: A torch of which only its version is asked.
TORCH = "from types import SimpleNamespace as S\n__version__, version = {!r}, S(cuda={!r})\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tells.py").write_text(TELLS)
    return tmp_path


@pytest.fixture
def run(folder: Path) -> Run:
    """Runs `bfc run` in a folder that Python imports from, too."""

    def call(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(folder), str(ROOT)])
        return subprocess.run(
            [sys.executable, "-m", "bfc", "run", *words],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": path} | variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    return call


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "words", [("tells.py",), ("--", "tells.py"), ("-m", "tells"), (sys.executable, "tells.py")]
)
def test_a_program_runs_as_ever_and_its_exit_code_is_the_commands(run: Run, words) -> None:
    ran = run("--memory-limit", "3GiB", *words, "--policy", "its own", "-m")
    assert ran.returncode == 7, ran.stderr
    first, second = ran.stdout.splitlines()
    assert first == ("__main__ ['--policy', 'its own', '-m'] caching:stitch,memory_limit=3GiB")
    assert second == "[] True"
    assert ran.stderr == ""


def test_another_sitecustomize_still_runs(run: Run, folder: Path) -> None:
    (folder / "sitecustomize.py").write_text("print('the other')")
    assert run("tells.py").stdout.splitlines()[0] == "the other"
    (folder / "sitecustomize.py").write_text("import no_such_module")
    ran = run("tells.py")
    assert ran.returncode == 7
    assert "No module named 'no_such_module'" in ran.stderr  # as Python says it without bfc


def test_torch_may_be_looked_for_before_it_is_imported(run: Run, folder: Path) -> None:
    """And the refusal comes at each import, so that nobody goes on with PyTorch's own memory."""
    (folder / "torch.py").write_text(TORCH.format("2.15.0", None))
    (folder / "looks.py").write_text(
        textwrap.dedent(
            """
            import importlib.util
            assert importlib.util.find_spec("torch") is not None
            for _ in range(2):
                try:
                    import torch
                except RuntimeError as error:
                    print(error)
            """
        )
    )
    ran = run("looks.py")
    assert ran.stdout.splitlines() == ["this PyTorch (2.15.0) was built without CUDA"] * 2


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("version", "cuda", "words"),
    [
        ("2.15.0+cpu", None, "was built without CUDA"),
        ("2.12.0", "13.0", "bfc.integrations.torch.replace works with it"),
        ("2.99.0", "13.0", "bfc.integrations.torch.replace works with it"),
        ("2.9.1", "12.8", "needs torch 2.11 or newer"),
    ],
)
def test_a_torch_that_cannot_be_served_is_refused_in_words(
    run: Run, folder: Path, version, cuda, words
) -> None:
    (folder / "torch.py").write_text(TORCH.format(version, cuda))
    (folder / "imports.py").write_text("import torch")
    ran = run("imports.py")
    assert ran.returncode == 1
    assert words in "".join(ran.stderr.splitlines()[-2:])


def test_a_python_without_bfc_runs_as_before(run: Run, folder: Path, tmp_path_factory) -> None:
    other = tmp_path_factory.mktemp("other") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", other], check=True)
    (folder / "torch.py").write_text(TORCH.format("2.15.0", "13.0"))
    (folder / "starts.py").write_text(
        "import os, torch\nprint(torch.__version__, 'bfc_tools' in __import__('sys').modules)\n"
    )
    first = os.pathsep.join([str(Path(ROOT, "bfc_tools", "startup")), str(folder)])
    for name in ("none", "bfc", "bfc_tools"):  # in the end the sources, compiled for another Python
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise ImportError('not compiled')")
        ran = subprocess.run(
            [other / "bin" / "python", folder / "starts.py"],
            env=os.environ | {"PYTHONPATH": first, "BFC_RUN": "caching:stitch"},
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (ran.stdout, ran.stderr) == ("2.15.0 False\n", "")


def test_the_start_of_python_is_read_by_old_ones() -> None:
    """Plain enough for a Python 3 of any age; it has no f-strings and no annotations."""
    text = Path(ROOT, "bfc_tools/startup/sitecustomize.py").read_text()
    compile(text, "sitecustomize.py", "exec", dont_inherit=True)
    for word in ("->", 'f"', ":=", "match "):
        assert word not in text


def test_two_variables_say_the_same(monkeypatch, folder, capsys) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{ROOT}")
    for _ in range(2):  # below itself it adds nothing
        assert main(["run", "--memory-limit", "3GiB", "--env"]) == 0
        lines = capsys.readouterr().out.splitlines()
        shell = " && ".join([*lines, f"{sys.executable} {folder / 'tells.py'}"])
        ran = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=False)
        assert ran.stdout.splitlines() == [
            "__main__ [] caching:stitch,memory_limit=3GiB",
            "[] True",
        ]
        path = lines[1].removeprefix("export PYTHONPATH=")
        assert path.count("startup") == 1
        monkeypatch.setenv("PYTHONPATH", path)


WRONG = {
    "nothing": ((), "which program?"),
    "no such file": (("no_such.py",), "no such script"),
    "a notebook": (("some.ipynb",), "is a notebook"),
    "TensorFlow's": (("--policy", "bfc", "tells.py"), "is a CachingAllocator"),
    "a wrong policy": (("--policy", "cashing", "tells.py"), "is a CachingAllocator"),
    "a wrong setting": (("--policy", "caching:max_split:3", "tells.py"), "max_split"),
    "both": (("--policy", "caching:stitch,expandable_segments:True", "tells.py"), "leave one out"),
    "a limit without a unit": (("--memory-limit", "20", "tells.py"), "Write 20GiB"),
    "a page nowhere": (("--report", "nowhere/page.html", "tells.py"), "there is no such folder"),
    "no such plan": (("--plan", "no_such.npz", "tells.py"), "no_such.npz"),
    "a limit of nothing": (("--memory-limit", "0GiB", "tells.py"), "memory_limit"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_call_is_told_before_anything_runs(monkeypatch, folder, capsys, case) -> None:
    words, told = WRONG[case]
    monkeypatch.chdir(folder)
    (folder / "some.ipynb").touch()
    assert main(["run", *words]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "policy", "told"),
    [
        ("backend:cudaMallocAsync", "caching", "backend:cudaMallocAsync"),
        ("expandable_segments:True", "caching:stitch", "leave it out"),
        ("max_split_size_mb:64", "caching:max_split_size_mb:32", "leave one of them out"),
        ("max_split_size_mb:x", "caching:stitch", "PYTORCH_CUDA_ALLOC_CONF"),
    ],
)
def test_settings_of_the_environment_are_followed_or_refused(
    monkeypatch, folder, capsys, settings, policy, told
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", settings)
    assert main(["run", "--policy", policy, "tells.py"]) == 2
    assert told in capsys.readouterr().err


def test_the_text_of_bfc_run_comes_back() -> None:
    text = "caching:stitch=True,page_size=4MiB,max_split_size_mb:64,memory_limit=20GiB"
    wanted = Wanted.read(text)
    assert wanted.policy == "caching:stitch=True,page_size=4MiB,max_split_size_mb:64"
    assert wanted.memory_limit == "20GiB"
    assert Wanted.read(wanted.text()) == wanted
    assert Wanted.read("memory_limit=0.5").policy == "caching:stitch"
    with pytest.raises(ValueError, match="Did you mean 'memory_limit'"):
        Wanted.read("caching,memory_limt=20GiB")


@pytest.mark.parametrize("policy", ["caching:stitch", "caching:stitch=True", "caching"])
def test_settings_go_to_the_pool(policy: str) -> None:
    import bfc

    make = Wanted(policy).maker("2.15", "max_split_size_mb:64")
    with make(bfc.SimulatedSubAllocator("1 GiB")) as pool:
        assert pool.snapshot().settings.max_split_size == 64 << 20
    with pytest.raises(SettingsError):
        Wanted(policy).maker("2.15", "max_split_size_mb:64,no_such:1")
