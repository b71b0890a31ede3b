"""`kerasmem.data.convert` from CSV and Parquet: types of whole files, texts as classes, damaged files."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
from converted import content, left_in, streamed

from kerasmem.data import convert
from kerasmem.errors import DataError, UsageError

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
pandas = pytest.importorskip("pandas")

RNG = np.random.default_rng(0)
ROWS = 400
FRAME = pandas.DataFrame(
    {
        **{f"pixel{k}": RNG.random(ROWS) for k in range(12)},
        "count": RNG.integers(0, 100, ROWS),
        "kind": RNG.choice(["dog", "cat", "bird"], ROWS),
        "alive": RNG.random(ROWS) > 0.5,
    }
)
KINDS = ["bird", "cat", "dog"]


def check_frame(result, frame=FRAME):
    for k in range(12):
        assert np.array_equal(result[f"pixel{k}"], frame[f"pixel{k}"].to_numpy().astype("f4"))
    assert np.array_equal(result["count"], frame["count"]) and result["count"].dtype == np.int64
    assert np.array_equal(np.array(KINDS)[result["kind"]], frame["kind"])
    assert np.array_equal(result["alive"], frame["alive"]) and result["alive"].dtype == bool


def test_csv_as_pandas_writes_it(tmp_path):
    FRAME.to_csv(tmp_path / "d.csv", index=False)
    done = convert(tmp_path / "d.csv", tmp_path / "out.h5")
    check_frame(content(tmp_path / "out.h5"))
    kind = next(dataset for dataset in done.datasets if dataset.name == "kind")
    assert kind.class_names == tuple(KINDS)
    FRAME.to_csv(tmp_path / "d.tsv.gz", index=False, sep="\t")
    convert(tmp_path / "d.tsv.gz", tmp_path / "tsv.h5")
    check_frame(content(tmp_path / "tsv.h5"))
    FRAME.to_csv(tmp_path / "semi.csv", index=False, sep=";")
    convert(tmp_path / "semi.csv", tmp_path / "semi.h5", delimiter=";")
    check_frame(content(tmp_path / "semi.h5"))


def test_csv_columns_become_one_dataset(tmp_path):
    FRAME.to_csv(tmp_path / "d.csv", index=False)
    done = convert(tmp_path / "d.csv", tmp_path / "out.h5", columns={"x": "pixel*", "y": "kind"})
    x, y = streamed(tmp_path / "out.h5")
    assert np.array_equal(x, FRAME[[f"pixel{k}" for k in range(12)]].to_numpy().astype("f4"))
    assert np.array_equal(np.array(KINDS)[y], FRAME["kind"]) and done.line.endswith("x='x', y='y', batch_size=32)")
    with h5py.File(tmp_path / "out.h5") as file:
        assert list(file["y"].attrs["class_names"]) == KINDS
    with pytest.raises(DataError, match="'kind' holds texts; write it as a separate dataset"):
        convert(tmp_path / "d.csv", tmp_path / "o2.h5", columns={"x": "*"})


@pytest.mark.parametrize("groups", [50, 1000])
def test_parquet_as_pandas_writes_it(tmp_path, groups):
    frame = FRAME.assign(kind=FRAME["kind"].astype("category"), single=FRAME["pixel0"].astype("f4"))
    frame.to_parquet(tmp_path / "d.parquet", row_group_size=groups)
    convert(tmp_path / "d.parquet", tmp_path / "out.h5", memory_budget="2MiB")
    result = content(tmp_path / "out.h5")
    check_frame(result)
    assert result["single"].dtype == np.float32


def test_files_agree_on_types_and_classes(tmp_path):
    """One file has whole numbers, the next has fractions, and each has only some of the classes."""
    for number, (values, kinds) in enumerate([("1 2 3", "a b a"), ("0.5 4 5", "c c a")]):
        rows = "\n".join(f"{v},{k}" for v, k in zip(values.split(), kinds.split(), strict=True))
        (tmp_path / f"part-{number}.csv").write_text(f"v,k\n{rows}\n")
    convert(str(tmp_path / "part-*.csv"), tmp_path / "out.h5")
    result = content(tmp_path / "out.h5")
    assert result["v"].tolist() == [1, 2, 3, 0.5, 4, 5] and result["v"].dtype == np.float32
    assert result["k"].tolist() == [0, 1, 0, 2, 2, 0]


def test_a_type_that_changes_late_in_the_file(tmp_path):
    """A fraction after megabytes of whole numbers makes the whole column floating point."""
    lines = [f"{k},{k % 7}" for k in range(1_300_000)]
    lines[1_250_000] = "0.5,3"
    (tmp_path / "late.csv").write_text("v,label\n" + "\n".join(lines) + "\n")
    done = convert(tmp_path / "late.csv", tmp_path / "out.h5")
    result = content(tmp_path / "out.h5")
    expected = np.arange(1_300_000, dtype="f4")
    expected[1_250_000] = 0.5
    assert done.rows == 1_300_000 and np.array_equal(result["v"], expected)
    assert np.array_equal(result["label"], np.where(expected == 0.5, 3, np.arange(1_300_000) % 7))
    lines[1_280_000] = "oops,3"
    (tmp_path / "late.csv").write_text("v,label\n" + "\n".join(lines) + "\n")
    with pytest.raises(DataError, match=r"late.csv'?: .*column 'v'.* Row #1280002: .*'oops'.*drop.*--text"):
        convert(tmp_path / "late.csv", tmp_path / "o2.h5")
    convert(tmp_path / "late.csv", tmp_path / "o3.h5", drop=["v"])  # what is left out need not be fit for anything
    assert set(content(tmp_path / "o3.h5")) == {"label"}


def test_gaps(tmp_path):
    (tmp_path / "g.csv").write_text("a,b\n1,0.5\n,NaN\n3,1.5\n")
    convert(tmp_path / "g.csv", tmp_path / "out.h5")
    result = content(tmp_path / "out.h5")
    assert np.array_equal(result["a"], np.array([1, np.nan, 3], "f4"), equal_nan=True)
    pa_table = pa.table({"a": ["x", None, "y"], "b": [1, 2, 3]})
    parquet.write_table(pa_table, tmp_path / "g.parquet")
    with pytest.raises(DataError, match="column 'a' has 1 missing values"):
        convert(tmp_path / "g.parquet", tmp_path / "o2.h5")


def test_no_header(tmp_path):
    (tmp_path / "n.csv").write_text("1,2\n3,4\n")
    with pytest.raises(DataError, match=r"the first row must name the columns; got the numbers .*--no-header"):
        convert(tmp_path / "n.csv", tmp_path / "out.h5")
    convert(tmp_path / "n.csv", tmp_path / "out.h5", header=False)
    assert {name: values.tolist() for name, values in content(tmp_path / "out.h5").items()} == {
        "f0": [1, 3],
        "f1": [2, 4],
    }


HOSTILE = {
    "ragged": (
        b"a,b\n1,2\n3,4,5\n6,7\n",
        "cannot be read: CSV parse error: Row #3: Expected 2 columns, got 3.*--delimiter",
    ),
    "short": (b"a,b\n1,2\n3\n", "Expected 2 columns, got 1"),
    "empty": (b"", "Empty CSV file"),
    "header alone": (b"a,b\n", "a header and no rows"),
    "twice": (b"a,a\n1,2\n", "multiple columns named a"),
    "quote": (b'a,b\n"1,2\n' + b"x" * 9_000_000, "cannot be read|mixes types"),
    "binary": (bytes(range(256)) * 4, "cannot be read|mixes types|columns"),
    "not utf-8": (b"a,k\n1,\xff\xfe\n2,x\n", "'k' must hold .*got binary.*--encoding"),
    "dates": (b"a,day\n1,2024-01-01\n", "'day' must hold .*got date32.*drop"),
    "climbs": (b"../up,b\n1,2\n", "cannot be the name of a dataset"),
    "slash": (b"a,a/b\n1,2\n", "'a' would be the name of a dataset and a group"),
    "mixed": (b"a,b\n1,x\n2,3\n", "column 'b' mixes types"),
}


@pytest.mark.parametrize("name", list(HOSTILE))
def test_hostile_csv(tmp_path, name):
    data, message = HOSTILE[name]
    path = tmp_path / "evil.csv"
    path.write_bytes(data)
    with pytest.raises((DataError, UsageError), match=message):
        convert(path, tmp_path / "out.h5")
    assert left_in(tmp_path, path) == []


def test_hostile_parquet(tmp_path):
    path = tmp_path / "evil.parquet"
    FRAME.to_parquet(path, write_page_checksum=True)
    whole = path.read_bytes()
    for data in (
        whole[:-20],
        whole[: len(whole) // 2],
        b"PAR1" + bytes(100) + b"PAR1",
        b"",
        whole[:200] + bytes(500) + whole[700:],
    ):
        path.write_bytes(data)
        with pytest.raises(DataError, match=r"evil.parquet'?: cannot be read"):
            convert(path, tmp_path / "out.h5")
        assert left_in(tmp_path, path) == []
    for table, message in (
        (pa.table({"v": [[1, 2], [3]]}), "column 'v' must hold .*got list"),
        (pa.table({"v": pa.array([{"a": 1}])}), "column 'v' must hold .*got struct"),
        (pa.table({"v": pa.array([b"x"])}), "column 'v' must hold .*got binary"),
        (pa.table({"v": [f"text {k}" for k in range(70_000)]}), "more than 65,536 different texts"),
    ):
        parquet.write_table(table, path)
        with pytest.raises(DataError, match=message):
            convert(path, tmp_path / "out.h5")


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    import sys

    from kerasmem.errors import MissingExtraError

    (tmp_path / "d.csv").write_text("a\n1\n")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        MissingExtraError,
        match=r"reading CSV and Parquet files needs an optional package: pip install 'kerasmem\[convert\]'",
    ):
        convert(tmp_path / "d.csv", tmp_path / "out.h5")


def write_csv(tmp_path, text, encoding="utf-8"):
    path = tmp_path / "t.csv"
    path.write_bytes(text.encode(encoding))
    return path


def test_semicolons_and_decimal_commas(tmp_path):
    path = write_csv(tmp_path, 'a;b;"c d"\n1,5;2;x\n-,25;3;y\n')
    with pytest.raises(DataError, match="--delimiter ';'"):
        convert(path, tmp_path / "out.h5")
    with pytest.raises(DataError, match=r"column 'a' mixes types: texts, and numbers such as '-,25'.*--decimal"):
        convert(path, tmp_path / "out.h5", delimiter=";")
    convert(path, tmp_path / "out.h5", delimiter=";", decimal=",")
    result = content(tmp_path / "out.h5")
    assert result["a"].tolist() == [1.5, -0.25] and result["b"].tolist() == [2, 3] and result["c d"].tolist() == [0, 1]
    convert(path, tmp_path / "text.h5", delimiter=";", text=["a"])
    assert content(tmp_path / "text.h5")["a"].tolist() == [1, 0]


def test_codes_with_leading_zeros_can_be_texts(tmp_path):
    path = write_csv(tmp_path, "zip,y\n1234,1\n00501,0\n")
    convert(path, tmp_path / "numbers.h5")
    assert content(tmp_path / "numbers.h5")["zip"].tolist() == [1234, 501]
    convert(path, tmp_path / "texts.h5", text=["zip"])
    with h5py.File(tmp_path / "texts.h5") as file:
        assert list(file["zip"].attrs["class_names"]) == ["00501", "1234"]


def test_other_encodings(tmp_path):
    for text, message in (
        ("prénom,y\n1,1\n", r"t\.csv': cannot be read: 'utf-8' codec.*--encoding latin-1"),
        ("name,y\n" + "x,1\n" * 1_200_000 + "café,1\n", "column 'name': .*UTF8.*--encoding latin-1"),
    ):
        path = write_csv(tmp_path, text, "latin-1")
        with pytest.raises(DataError, match=message):
            convert(path, tmp_path / "out.h5")
    for encoding in ("latin-1", "utf-16"):
        path = write_csv(tmp_path, "prénom,y\ncafé,1\nthé,0\n", encoding)
        convert(path, tmp_path / "out.h5", encoding=encoding, force=True)
        with h5py.File(tmp_path / "out.h5") as file:
            assert list(file["prénom"].attrs["class_names"]) == ["café", "thé"]
    with pytest.raises(UsageError, match="encoding must be one of Python's"):
        convert(path, tmp_path / "o2.h5", encoding="zip")
