"""Files of recorded runs are told by their content, whatever their names say."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest

import bfc
from bfc.__main__ import main
from bfc_tools.study.file_formats import ARCHIVE, LOG, SNAPSHOT, has_devices, kind_of, read

MIB = 1 << 20
SIZES = [3 * MIB, MIB, 5 * MIB]


def run_of(allocator: bfc.CachingAllocator) -> bfc.CachingAllocator:
    """The same run each time: three allocations, the second of which is freed."""
    allocator.record_history(context=None)
    first, second, third = map(allocator.allocate_raw, SIZES)
    allocator.deallocate_raw(second)
    assert first != third
    return allocator


@pytest.fixture
def recorded(tmp_path: Path) -> dict[str, Path]:
    """The run as a file of each kind, under the name that the kind usually has."""
    allocator = run_of(bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB")))
    snapshot = tmp_path / "run.pickle"
    snapshot.write_bytes(pickle.dumps(allocator.snapshot().to_torch(), protocol=4))
    trace = bfc.Trace.from_torch(snapshot)
    trace.save(tmp_path / "run.npz")
    trace.log_csv(tmp_path / "run.csv")
    return {SNAPSHOT: snapshot, ARCHIVE: tmp_path / "run.npz", LOG: tmp_path / "run.csv"}


@pytest.mark.parametrize("kind", [SNAPSHOT, ARCHIVE, LOG])
@pytest.mark.parametrize("name", ["x", "x.bin", "x.dat", "x.npz", "x.csv", "x.pickle", "x.PKL"])
class TestAnyName:
    def test_the_content_decides(
        self, recorded: dict[str, Path], tmp_path: Path, kind: str, name: str
    ) -> None:
        path = Path(shutil.copy(recorded[kind], tmp_path / name))
        assert kind_of(path) == kind
        assert has_devices(path) == (kind == SNAPSHOT)
        trace = read(path)
        assert trace.size[trace.op == 0].tolist() == SIZES

    @pytest.mark.sampled(4)
    def test_commands_agree(
        self,
        recorded: dict[str, Path],
        tmp_path: Path,
        capsys: pytest.CaptureFixture,
        kind: str,
        name: str,
    ) -> None:
        path = str(shutil.copy(recorded[kind], tmp_path / name))
        page, bare = tmp_path / "page.html", tmp_path / "bare.npz"
        assert main(["replay", path, "--passes", "1", "--no-picture"]) == 0
        assert main(["report", path, "-o", str(page)]) == 0
        assert main(["anonymise", path, str(bare)]) == 0
        assert main(["diff", path, str(recorded[ARCHIVE])]) == 0
        assert capsys.readouterr().err == ""
        assert page.read_text().startswith("<!DOCTYPE html>")
        anonymous = bfc.Trace.load(bare)
        assert anonymous.size[anonymous.op == 0].tolist() == SIZES


def test_a_log_may_begin_with_a_byte_order_mark(recorded: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"\xef\xbb\xbf" + recorded[LOG].read_bytes().replace(b"\n", b"\r\n"))
    assert kind_of(path) == LOG
    assert len(read(path)) == 4


def test_a_snapshot_under_any_name_becomes_one(recorded: dict[str, Path], tmp_path: Path) -> None:
    path = shutil.copy(recorded[SNAPSHOT], tmp_path / "run.bin")
    assert main(["anonymise", str(path), str(tmp_path / "bare.pickle")]) == 0
    bare = bfc.Trace.from_torch(tmp_path / "bare.pickle")
    assert bare.size[bare.op == 0].tolist() == SIZES


@pytest.mark.parametrize("content", [b"", b"hello\n", b"a,b,c\n1,2,3\n", bytes(1000)])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("x.npz", "it is not an .npz archive"),
        ("x.csv", "no column"),
        ("x.pickle", "pickle"),
        ("x", "it is not a recorded run"),
    ],
)
def test_the_name_says_what_is_missed_in_another_file(
    tmp_path: Path, content: bytes, name: str, said: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(bfc.TraceError, match=said) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_a_device_is_chosen_of_a_snapshot_alone(recorded: dict[str, Path]) -> None:
    assert len(read(recorded[SNAPSHOT], 0)) == 4
    for kind in (ARCHIVE, LOG):
        with pytest.raises(ValueError, match="no devices to choose from"):
            read(recorded[kind], 0)


def test_the_option_for_snapshots_needs_one(
    recorded: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = shutil.copy(recorded[ARCHIVE], tmp_path / "x.pickle")
    assert main(["replay", str(path), "--snapshot-device", "0"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("bfc: --snapshot-device 0: ")
    assert "no TRACE is one" in err
    path = shutil.copy(recorded[SNAPSHOT], tmp_path / "x.npz")
    words = ["--snapshot-device", "0", "--passes", "1", "--no-picture"]
    assert main(["replay", str(path), *words]) == 0


def test_a_folder_gives_the_files_whose_names_fit(
    recorded: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    inside = tmp_path / "runs"
    inside.mkdir()
    shutil.copy(recorded[ARCHIVE], inside / "log.csv")
    shutil.copy(recorded[LOG], inside / "notes.txt")
    assert main(["replay", str(inside), "--passes", "1", "--no-picture"]) == 0
    out = capsys.readouterr().out
    assert "log" in out
    assert "notes" not in out
