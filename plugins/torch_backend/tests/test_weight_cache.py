from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pdd_torch import weight_cache
from pdd_torch.safetensors_model import SafetensorsModel
from pdd_torch.weights import prepare
from torch import Tensor

LOAD = """
import sys, time
from pathlib import Path
import torch
from pdd_torch import weight_cache
from pdd_torch.safetensors_model import SafetensorsModel
prepare = weight_cache.prepare
def counted(source, dtype):
    print("made", flush=True)
    time.sleep(0.5)
    return prepare(source, dtype)
weight_cache.prepare = counted
source = SafetensorsModel(Path(sys.argv[1]))
tensors = weight_cache.load(source, source.digest(), torch.float32, root=Path(sys.argv[2]), smallest=0)
print("sum", float(sum(t.double().abs().sum() for t in tensors.values())))
"""


def load(tiny: Path, root: Path) -> dict[str, Tensor]:
    source = SafetensorsModel(tiny)
    return weight_cache.load(source, source.digest(), torch.bfloat16, root=root, smallest=0)


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[name], other[name]) and one[name].stride() == other[name].stride() for name in one
    )


def test_the_second_start_reads_what_the_first_made(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = load(tiny, tmp_path)
    monkeypatch.setattr(weight_cache, "prepare", None)
    read = load(tiny, tmp_path)
    assert equal(made, read)
    assert equal(read, prepare(SafetensorsModel(tiny), torch.bfloat16))
    assert all(tensor.data_ptr() % 64 == 0 for tensor in read.values()), "unaligned weights are read slowly"


@pytest.mark.parametrize("damage", ["cut", "flipped", "no checksum", "empty", "no file"])
def test_a_damaged_file_is_made_again(
    tiny: Path, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = load(tiny, tmp_path)
    (entry,) = (path for path in tmp_path.iterdir() if path.is_dir())
    file = entry / "weights.pt"
    data = bytearray(file.read_bytes())
    file.unlink()  # a new file: what is mapped from the old one stays readable
    match damage:
        case "cut":
            file.write_bytes(data[: len(data) // 2])
        case "flipped":
            data[len(data) // 2] ^= 1
            file.write_bytes(data)
        case "no checksum":
            file.write_bytes(data)
            (entry / "checksum").unlink()
        case "empty":
            file.write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        assert equal(load(tiny, tmp_path), made)
    assert "damaged" in caplog.text
    caplog.clear()
    assert equal(load(tiny, tmp_path), made)
    assert not caplog.text


def test_what_a_killed_start_left_is_cleared_away(tiny: Path, tmp_path: Path) -> None:
    made = load(tiny, tmp_path)
    (entry,) = (path for path in tmp_path.iterdir() if path.is_dir())
    fresh = entry.rename(entry.with_suffix(".new"))
    (fresh / "weights.pt").unlink()
    (fresh / "weights.pt").write_bytes(b"half")
    assert equal(load(tiny, tmp_path), made)
    assert not fresh.exists()


def test_processes_that_start_at_once_make_it_once(tiny: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", LOAD, str(tiny), str(tmp_path)]
    starts = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [start.communicate(timeout=60)[0].split("\n") for start in starts]
    assert [start.returncode for start in starts] == [0, 0, 0]
    assert sum(lines.count("made") for lines in outputs) == 1
    assert len({line for lines in outputs for line in lines if line.startswith("sum")}) == 1


def test_a_cache_that_cannot_be_written_costs_only_time(
    tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    assert equal(load(tiny, tmp_path / "file"), prepare(SafetensorsModel(tiny), torch.bfloat16))
    assert "cannot be cached" in caplog.text
