"""Embeddings in files of PyTorch and in Parquet."""

import zipfile
from pathlib import Path

import numpy as np
import pytest
from command_line import fail

from infonce.cli.embeddings import open_embeddings


@pytest.mark.extras
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_a_tensor_of_torch(tmp_path, dtype):
    """Alone or in a dictionary; a parameter, or a view whose memory has the other signs."""
    torch = pytest.importorskip("torch")
    tensor = torch.randn(6, 4).to(getattr(torch, dtype))
    view, parameter = torch._neg_view(tensor), torch.nn.Parameter(tensor)
    torch.save(tensor, tmp_path / "one.pt")
    torch.save({"image": parameter, "text": view, "step": 3}, tmp_path / "two.pt")
    for source, sign in (("one.pt", 1), ("two.pt:image", 1), ("two.pt:text", -1)):
        array = open_embeddings(str(tmp_path / source))
        assert array.dtype.name == dtype
        np.testing.assert_array_equal(array.astype(np.float64), sign * tensor.double().numpy())


@pytest.mark.extras
def test_files_of_torch_that_are_no_embeddings(pair, tmp_path):
    torch = pytest.importorskip("torch")
    z = torch.ones(3, 4)
    for name, saved in {
        "two": {"u": z, "v": z}, "list": [z], "code": Path("code"),
        "float8": z.to(torch.float8_e4m3fn), "meta": z.to("meta"), "sparse": z.to_sparse(),
        "conjugate": torch.complex(z, z).conj(),
    }.items():  # fmt: skip
        torch.save(saved, tmp_path / f"{name}.pt")
    (tmp_path / "broken.pt").write_bytes(b"PK")
    for source, words in {
        "two.pt": "two.pt: expected one array, got the arrays u, v: choose one, as in",
        "two.pt:w": "no array 'w'; it has u, v",
        "list.pt": "list.pt: expected one array, got the arrays none",
        "broken.pt": "broken.pt: expected a whole .pt file of numbers",
        "code.pt": "code.pt: expected a whole .pt file of numbers",
        "none.pt": "none.pt: no such file",
        **{f"{name}.pt": f"{name}.pt" for name in ("float8", "meta", "sparse", "conjugate")},
    }.items():
        assert words in fail("loss", tmp_path / source, pair[1], "--scale", 1)


@pytest.mark.parametrize("fixed", [True, False])
def test_a_column_of_parquet(pair, tmp_path, fixed):
    """Lists of one length, in several row groups, beside columns of other types."""
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    _, _, u, v = pair
    kind = arrow.list_(arrow.float32(), u.shape[1] if fixed else -1)
    names = [f"sample {i}" for i in range(len(u))]
    table = arrow.table({"name": names, "u": arrow.array(list(u), kind)})
    parquet.write_table(table, tmp_path / "u.parquet", row_group_size=7)
    parquet.write_table(table.append_column("v", arrow.array(list(v), kind)),
                        tmp_path / "both.parquet")  # fmt: skip
    files = (tmp_path / "u.parquet", tmp_path / "both.parquet:v")
    for file, array in zip(files, (u, v), strict=True):
        np.testing.assert_array_equal(open_embeddings(str(file)), array)
    error = fail("loss", files[1].with_name("both.parquet"), pair[1], "--scale", 1)
    assert "both.parquet: expected one array, got the arrays u, v" in error


def test_parquet_that_is_no_embeddings(pair, tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for name, column in {
        "numbers": [1.0, 2.0], "ragged": [[1.0], [1.0, 2.0]], "null": [[1.0], None],
        "inner": [[1.0, None], [1.0, 2.0]], "text": [["a"], ["b"]],
        "empty": arrow.array([], arrow.list_(arrow.float32())),
        "categories": arrow.array(["a", "b"]).dictionary_encode(),
        "tensors": arrow.ExtensionArray.from_storage(
            arrow.fixed_shape_tensor(arrow.float32(), [1]),
            arrow.array([[1.0]], arrow.list_(arrow.float32(), 1)),
        ),
    }.items():  # fmt: skip
        parquet.write_table(arrow.table({"z": column}), tmp_path / f"{name}.parquet")
    parquet.write_table(arrow.table({"z": [[0.5, 1.5]] * 9}), tmp_path / "corrupt.parquet")
    whole = (tmp_path / "corrupt.parquet").read_bytes()
    (tmp_path / "corrupt.parquet").write_bytes(whole[:20] + bytes(40) + whole[60:])
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    for name, words in {
        "numbers": "got the arrays none",
        "ragged": "expected rows of one length in 'z', got 1, 2",
        "null": "expected numbers in all rows of 'z', got nulls",
        "inner": "expected numbers in all rows of 'z', got nulls",
        "text": "text.parquet): expected dtype float64",
        "empty": "empty.parquet: expected rows of one length in 'z', got no rows",
        "categories": "categories.parquet: expected one array, got the arrays none",
        "tensors": "tensors.parquet: expected one array, got the arrays none",
        "corrupt": "corrupt.parquet: expected a whole .parquet file of numbers",
        "broken": "broken.parquet: expected a whole .parquet file of numbers",
    }.items():
        error = fail("loss", tmp_path / f"{name}.parquet", pair[1], "--scale", 1)
        assert words in error


def test_an_archive_that_memory_cannot_hold_is_named(pair, tmp_path):
    header = '{"descr": "<f4", "fortran_order": False, "shape": (1000000000000, 4), }'
    with zipfile.ZipFile(tmp_path / "large.npz", "w") as archive:
        head = b"\x93NUMPY\x01\x00v\x00" + header.ljust(117).encode() + b"\n"
        archive.writestr("z.npy", head)
    assert "large.npz: " in fail("loss", tmp_path / "large.npz", pair[1], "--scale", 1, code=1)
