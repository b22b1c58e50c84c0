"""What changed in the files of PyTorch that rules rest on, and which rules are to be read again."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from bench import upstream

SORT = "aten/src/ATen/native/cuda/Sort.cpp"
TOPK, RESIZE = "aten/src/ATen/native/cuda/TensorTopK.cu", "aten/src/ATen/native/ResizeCommon.h"
HEADER = "torch/include/ATen/native/ResizeCommon.h"
YAML = "aten/src/ATen/native/native_functions.yaml"
PACKAGED = "torchgen/packaged/ATen/native/native_functions.yaml"
FILL = "inline void fill_resize_deterministic_(int size) {\n  if (size) { fill(%d); }\n}\n"


def written(root: Path, files: dict[str, str]) -> Path:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def test_what_changed_is_listed_with_its_rules(tmp_path: Path) -> None:
    old = written(tmp_path / "old", {TOPK: "a\n", RESIZE: FILL % 1, "torch/storage.py": ""})
    sources = {SORT: "", HEADER: FILL % 2, "torch/storage.py": ""}
    new = written(tmp_path / "new", sources)
    found = "\n".join(upstream.report(upstream.folder(old), upstream.folder(new)))
    gone, _, changed = found.partition("changed; read these rules again:\n")
    assert f"  {TOPK} is gone\n" in gone
    assert "bfc_tools.predicting.rules.sorting.topk: aten::topk\n" in gone
    assert f"  {RESIZE}: 2 lines\n" in changed
    assert "rules.indexing.filled: aten::embedding, aten::index_select\n" in changed
    assert "1 files are the same" in changed


def test_compiled_files_are_not_gone_where_a_wheel_has_none(tmp_path: Path) -> None:
    old = written(tmp_path / "old", {TOPK: "a\n", RESIZE: FILL % 1, YAML: "- func: f\n"})
    new = written(tmp_path / "new", {HEADER: FILL % 1, PACKAGED: "- func: g\n"})
    found = "\n".join(upstream.report(upstream.folder(old), upstream.folder(new)))
    assert f"  {YAML}: 2 lines\n" in found
    assert "is gone" not in found
    assert "1 files are the same" in found


def test_what_changed_elsewhere_in_a_file_is_listed_apart(tmp_path: Path) -> None:
    old = written(tmp_path / "old", {RESIZE: FILL % 1})
    new = written(tmp_path / "new", {RESIZE: f"// more\n{FILL % 1}"})
    found = "\n".join(upstream.report(upstream.folder(old), upstream.folder(new)))
    assert found.startswith("changed, but not in the functions that were read:\n")
    assert "read these rules again" not in found


def test_releases_are_tags_of_a_git_directory(tmp_path: Path) -> None:
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@x", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "-q"], check=True)
    for number, name in ((1, "v2.15.0"), (2, "v2.16.0")):
        written(tmp_path, {RESIZE: FILL % number})
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "-qm", name], check=True)
        subprocess.run([*git, "tag", name], check=True)
    trees = [upstream.tag(tmp_path / ".git", name) for name in ("2.15.0", "v2.16.0")]
    assert f"  {RESIZE}: 2 lines" in list(upstream.report(*trees))
    with pytest.raises(SystemExit, match=r"has no tag or commit 2\.17\.0, nor v2\.17\.0"):
        upstream.tag(tmp_path / ".git", "2.17.0")


def test_functions_of_python_and_those_that_macros_declare_are_found() -> None:
    text = "class A:\n    def f(self):\n        return 1\n\n\ndef g():\n    return 2\n"
    assert upstream.function_of(text, "f") == ["def f(self):\n        return 1"]
    assert upstream.function_of(text, "A")[0].startswith("class A:")
    kernel = "TORCH_IMPL_FUNC(f_out) (const Tensor& a, Sizes b = {}) {\n  g(a, {});\n}"
    meta = "TORCH_META_FUNC2(f, Tensor)\n(int a) {\n}"
    assert upstream.function_of(f"{kernel}\n{meta}\n", "f_out") == [kernel]
    assert upstream.function_of(f"{kernel}\n{meta}\n", "f") == [meta]
    assert upstream.function_of("int f(int a) {\n  return g(a);\n}\n", "g") == []
