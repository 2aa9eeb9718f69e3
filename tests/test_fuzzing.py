"""Files that are damaged or made to harm: refused, with nothing touched and memory bounded."""

import io
import json
import pickle
import struct
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

import pytest
import torch

import funcacc
from funcacc.errors import StateError

CASES = 120


def test_damaged_files_are_refused_or_load_what_was_saved(tmp_path):
    """In a process of its own, whose memory has a limit; `tests.fuzzing` says how."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzzing", str(tmp_path), str(CASES)],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["wrong"] == []
    counts = found["counts"]
    assert sum(counts.values()) == 2 * CASES + 4 * (CASES // 10)
    for suffix in (".pt", ".safetensors"):
        assert counts[f"{suffix} refused"] > CASES // 2


def rewritten(path, change, compression=zipfile.ZIP_STORED):
    """A file of torch.save with other entries, and checksums that are right."""
    whole = zipfile.ZipFile(io.BytesIO(path.read_bytes()))
    with zipfile.ZipFile(path, "w", compression) as out:
        for name in whole.namelist():
            out.writestr(name, change(name, whole.read(name)))


def test_a_tensor_that_claims_more_than_the_file_holds(tmp_path):
    """PyTorch itself reads past the end of the memory that it has."""
    path = tmp_path / "a.pt"
    funcacc.save(path, a=torch.arange(4.0))
    rewritten(path, lambda n, d: d.replace(b"K\x04t", b"J\x00\x00\x00\x04t", 1))
    big = torch.load(path, weights_only=True)["a"].untyped_storage().nbytes()
    assert big > 2**27 > path.stat().st_size
    # It is the tensor that it was, and no more than that is read.
    loaded = funcacc.load(path)["a"]
    assert torch.equal(loaded, torch.arange(4.0))
    assert loaded.untyped_storage().nbytes() < path.stat().st_size


def test_what_unpacks_to_more_than_the_file(tmp_path):
    path = tmp_path / "a.pt"
    funcacc.save(path, a=torch.zeros(4))
    zeros = bytes(50 * 2**20)
    rewritten(path, lambda n, d: zeros if n.endswith("/data/0") else d, zipfile.ZIP_DEFLATED)
    with pytest.raises(StateError, match="what it holds is larger than the file"):
        funcacc.load(path)
    nested = ["x"]
    for _ in range(40):
        nested = [nested, nested]
    torch.save({"a": nested}, path)
    with pytest.raises(StateError, match="what it holds is larger than the file"):
        funcacc.load(path)


def metadata(path, structure, crc=None):
    crc = zlib.crc32(structure.encode()) if crc is None else crc
    entries = {"funcacc": structure, "funcacc.crc32": str(crc)}
    header = json.dumps({"__metadata__": entries}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)


def test_the_structure_in_a_safetensors_file(tmp_path):
    path = tmp_path / "a.safetensors"
    metadata(path, '{"lr": 0.5}')
    assert funcacc.load(path) == {"lr": 0.5}
    metadata(path, '{"lr": 0.7}', zlib.crc32(b'{"lr": 0.5}'))
    with pytest.raises(StateError, match="the checksum of its 'funcacc' entry is wrong"):
        funcacc.load(path)
    for text in ('{"a": {"dtype": "load"}}', '{"a": ' + "[" * 99_999, '{"a": {"list": 3}}', "[1]"):
        metadata(path, text)
        with pytest.raises(StateError, match="its 'funcacc' entry can't be read"):
            funcacc.load(path)
    path.write_bytes(struct.pack("<Q", 2**50) + b"{}")
    with pytest.raises(StateError, match="is truncated, or no safetensors file"):
        funcacc.load(path)


class Evil:
    def __reduce__(self):
        return (exec, ("raise SystemExit",))


def test_shards_of_somebody_else_run_nothing(tmp_path):
    """Their metadata and their values are pickles, which PyTorch runs as they come."""
    model = torch.nn.Linear(2, 1)
    funcacc.sharding.save(tmp_path, model=model, epoch=3)
    file = tmp_path / ".metadata"
    whole = file.read_bytes()
    assert funcacc.sharding.load(tmp_path, model=model, epoch=0) == {"epoch": 3}
    (shard,) = (p for p in tmp_path.iterdir() if p != file)
    data = shard.read_bytes()
    shard.write_bytes(data[:50])
    with pytest.raises(StateError, match="is damaged; what was read of it is loaded: "):
        funcacc.sharding.load(tmp_path, model=model, epoch=0)
    shard.write_bytes(data)
    file.write_bytes(pickle.dumps(Evil()))
    with pytest.raises(StateError, match=r"it names builtins\.exec, which describes no tensor"):
        funcacc.sharding.load(tmp_path, model=model, epoch=0)
    found = pickle.loads(whole)
    for info in found.storage_data.values():
        info.relative_path = f"../{tmp_path.name}/{shard.name}"
    file.write_bytes(pickle.dumps(found))
    with pytest.raises(StateError, match="which isn't a file in its folder"):
        funcacc.sharding.load(tmp_path, model=model, epoch=0)
    for cut in (b"", whole[:100]):
        file.write_bytes(cut)
        with pytest.raises(StateError, match="is damaged, or no metadata"):
            funcacc.sharding.load(tmp_path, model=model, epoch=0)
    # What funcacc wrote, with code in the place of a value.
    funcacc.sharding.save(tmp_path / "b", epoch=Evil())
    with pytest.raises(StateError, match="epoch doesn't load with weights_only=True"):
        funcacc.sharding.load(tmp_path / "b", epoch=0)
