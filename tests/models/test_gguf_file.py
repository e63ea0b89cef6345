from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from pdd_runtime.errors import EngineError
from pdd_runtime.models.gguf_file import GgufFile
from pdd_runtime.models.source import find_model


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A file by the reference package, with a field of every form."""
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_bool("a.flag", True)
    writer.add_int64("a.number", -(2**40))
    writer.add_float64("another.number", 0.1)
    writer.add_token_list(["a", "ü", "\n"])
    writer.add_token_types([1, 3, 1])
    writer.add_tensor("token_embd.weight", np.arange(15, dtype=np.float32).reshape(5, 3))
    writer.add_tensor("output_norm.weight", np.ones(3, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_head_is_read_as_the_reference_package_reads_it(written: Path) -> None:
    check_head(written)
    place = GgufFile(written).tensors["token_embd.weight"]
    assert place.shape == (5, 3)
    assert np.fromfile(written, np.float32, 15, offset=place.offset).tolist() == [*range(15)]


@pytest.mark.model
@pytest.mark.slow
def test_the_head_of_smollm2_is_read_as_the_reference_package_reads_it() -> None:
    check_head(find_model("smollm2").path)


def check_head(path: Path) -> None:
    reader, file = gguf.GGUFReader(path), GgufFile(path)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert file.metadata == fields
    expected = {t.name: (t.tensor_type, tuple(reversed(t.shape.tolist())), t.data_offset) for t in reader.tensors}
    assert file.tensors == expected


@pytest.mark.parametrize("keep", [0, 10, 30, 100, 200])
def test_a_cut_head_is_refused(written: Path, keep: int) -> None:
    written.write_bytes(written.read_bytes()[:keep])
    with pytest.raises(EngineError, match="not a whole GGUF file"):
        GgufFile(written)
