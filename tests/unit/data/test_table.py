"""Tables in text, as people have them: read as they are meant, or refused in one sentence with line and column."""

from __future__ import annotations

import gzip
import os
import warnings
from pathlib import Path
from typing import Any

import pytest

from mpitrain.data.load import load
from mpitrain.data.source import DataSource
from mpitrain.errors import DataError

TWO = "a,b,label\n1,2,0\n3,4.5,1\n"
PACKED = gzip.compress(TWO.encode(), mtime=0)
ROWS = [((1.0, 2.0), 0.0), ((3.0, 4.5), 1.0)]


def read(path: Path, **options: Any) -> DataSource:
    return load(str(path), rank=0, size=1, **{"validation_split": 0.0, "seed": 0, **options})


def rows(source: DataSource) -> list[tuple[tuple[float, ...], Any]]:
    return sorted((tuple(x.tolist()), y.tolist()) for x, y in source.train.as_numpy_iterator())


def refused(path: Path, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        read(path, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", TWO.encode()),
        ("a.CSV", TWO.encode()),
        ("a.csv", TWO.encode("utf-8-sig")),
        ("a.csv", TWO.replace("\n", "\r\n").encode()),
        ("a.csv", TWO.replace(",", ";").encode()),
        ("a.csv", TWO.replace(",", "|").encode()),
        ("a.csv", TWO.replace(",", "\t").encode()),
        ("a.tsv", TWO.replace(",", "\t").encode()),
        ("a.csv", TWO.replace(",", "\t").encode("utf-16")),
        ("a.csv.gz", gzip.compress(TWO.encode(), mtime=0)),
        ("A.TSV.GZ", gzip.compress(TWO.replace(",", "\t").encode("utf-8-sig"), mtime=0)),
        ("a.csv", b"\n" + TWO.encode() + b"\n\n"),
        ("a.csv", b'"a","b, in mm","label"\n"1","2","0"\n"3","4.5","1"\n'),
        ("a.csv", b"a; b, in mm; label\n 1; 2 ;0\n3; 4.5; 1\n"),
        ("a.csv", b"label,a,b\n0,1,2\n1,3,4.5\n"),
        ("a.csv", "\ufefflabel,a,b\n0,1,2\n1,3,4.5\n".encode()),
        ("a.csv", b"2019,2020,label\n1,2,0\n3,4.5,1\n"),
        ("a.csv", b"a,b,label,\n1,2,0,\n3,4.5,1,\n"),
        ("a.csv", b",a,b,label\n0,1,2,0\n1,3,4.5,1\n"),
        ("a.csv", b"Unnamed: 0,a,b,label\n0,1,2,0\n1,3,4.5,1\n"),
        ("a.csv", b"id,a,b,label\n1,1,2,0\n2,3,4.5,1\n"),
        ("a.csv", b"a,b,label\n1,2,0.0\n3,4.5,1.0\n"),
        ("a.csv", b"a,b,kind\n1,2,no\n3,4.5,yes\n"),
        ("a.csv", b"a,b,kind\n1,2,False\n3,4.5,True\n"),
    ],
)
def test_read_as_meant(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    source = read(tmp_path / name)
    assert rows(source) == ROWS
    assert source.num_classes == 2


@pytest.mark.parametrize(
    ("text", "inputs", "labels"),
    [
        (TWO, "2 columns, a, b; separated by commas", "column label, class numbers 0 to 1"),
        (
            "id,a,size\n0,5,1\n1,6,2\n2,7,0\n",
            "1 column, a; separated by commas, 1 left out: id, which counts the rows",
            "column size, class numbers 0 to 2; --task regression takes them as quantities",
        ),
        (
            "id;a;label;\n0;5;1;\n1;6;2;\n2;6;2;\n",
            "1 column, a; separated by semicolons, 2 left out: id, which counts the rows, one without name and values",
            "column label, class numbers 0 to 2 (none of them 0)",
        ),
        ("id,label\n7,1\n3,0\n", "1 column, id; separated by commas", "column label, class numbers 0 to 1"),
        ("ok,Target\nTrue,0.5\nfalse,1\n", "1 column, ok; separated by commas", "column Target, quantities"),
        ("a,kind\n1,b\n2,c\n3,b\n", "1 column, a; separated by commas", "column kind, classes b, c"),
    ],
)
def test_what_is_guessed_is_told(tmp_path: Path, text: str, inputs: str, labels: str) -> None:
    (tmp_path / "a.csv").write_text(text)
    meaning = read(tmp_path / "a.csv").meaning
    assert (meaning.inputs, meaning.labels) == (inputs, labels)


def test_words_for_truth_are_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("ok,y\nTrue,0.5\nfalse,1\n")
    assert rows(read(tmp_path / "a.csv")) == [((0.0,), 1.0), ((1.0,), 0.5)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        ("1,2,0\n3,4,1\n", "has no header"),
        ("5.1,3.5,setosa\n4.9,3,virginica\n", "has no header"),
        ("a,b,y\n", "no rows"),
        ("y\n1\n", "one column"),
        ("a b y\n1 2 3\n", "one column"),
        ("# made today\na,b,y\n1,2,0\n", "the first line has one cell (# made today), the next 3"),
        ("a,a,y\n1,2,0\n", "two columns named a"),
        ("label,a,y\n0,1,2\n", "has the columns label and y, of which each may be the label"),
        ("a,,y\n1,2,0\n1,4,1\n", "column 2 has no name"),
        ("a,b,y\n1,2,0\n1,2\n", "line 3 has 2 cells, the header 3"),
        ("a,b,y\n1,1,017,0\n", "line 2 has 4 cells, the header 3"),
        ("a,b,y\n1,two,0\n", "line 2, column b: 'two' is not a number: encode text as numbers"),
        ("a,b,y\n1,2024-01-01,0\n", "line 2, column b: '2024-01-01' is not a number: encode text"),
        ("a,b,y\n1,,0\n", "line 2, column b: '' is not a number: fill in what is missing"),
        ("a,b,y\n1,NA,0\n", "line 2, column b: 'NA' is not a number: fill in what is missing"),
        ("a,b,y\n1,2,0\n\n1,?,0\n", "line 4, column b: '?' is not a number: fill in what is missing"),
        ("a,b,y\n1,nan,0\n", "line 2, column b is not finite"),
        ("a,b,y\n1,1e300,0\n", "line 2, column b is not finite"),
        ('a,b,y\n1,"1,017.5",0\n', "line 2, column b: '1,017.5' is not a number: write numbers with a point"),
        ("a;b;y\n1;0,5;0\n", "line 2, column b: '0,5' is not a number: write numbers with a point"),
        ("a,b,y\n1,3%,0\n", "line 2, column b: '3%' is not a number: write numbers with a point"),
        ("a,b,y\n1,1_000,0\n", "line 2, column b: '1_000' is not a number"),
        ("a,b,label\n1,2,0.5\n", "the label of line 2 is 0.5"),
        ("a,b,y\n1,2,0\n1,2,-1\n", "the label of line 3 is -1"),
        ("a,b,y\n1,2,0\n1,2,1e300\n", "the label of line 3 is not a finite number"),
        ("a,b,y\n1,2,0\n1,2,\n", "line 3, column y: there is no label ('')"),
        ("a,b,y\n1,2,no\n1,2,n/a\n", "line 3, column y: there is no label ('n/a')"),
        ("a,b,y\n1,2,0\n1,2,one\n", "line 3, column y: 'one' is not a number, as other labels are"),
        ("a,b,y\n1,2,0\n1,2,0\n", "all labels are 0"),
        ("a,name\n1,Ann\n2,Bob\n3,Cy\n", "3 different texts in 3 labels are no classes"),
        ("a,year\n1,1999\n2,2001\n", "or ask for a regression with --task regression"),
        ('a,b,y\n1,"2,0\n', "line 2 has 2 cells"),
    ],
)
def test_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "data.csv").write_text(text)
    refusal = refused(tmp_path / "data.csv")
    assert message in refusal
    assert "data.csv" in refusal


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv, line 2", b"a,y\n\xff\xfe,1\n"),
        ("a.csv, line 1", "gr\u00f6\u00dfe,y\n1,0\n".encode("latin-1")),
        ("a.csv, line 1", bytes(range(128, 256))),
        ("a.csv", "a,y\n1,0\n".encode("utf-16")[:-1]),
        ("a.csv.gz", PACKED[:20] + b"words"),
    ],
)
def test_bytes_that_are_no_text_refused(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name.partition(",")[0]
    path.write_bytes(content)
    assert f"{name} cannot be read as csv" in refused(path)


@pytest.mark.parametrize("content", [TWO.encode(), PACKED[:-9], PACKED[:-8] + bytes(8), PACKED[:-4] + bytes(4)])
def test_what_cannot_be_unpacked_is_to_be_copied_or_packed_again(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.csv.gz"
    path.write_bytes(content)
    told = refused(path)
    assert told.startswith(f"{path} cannot be unpacked (")
    assert told.endswith("): copy it again, or pack it with gzip")


def test_labels_beyond_all_numbers_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"a,y\n1,0\n2,{10**23}\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "the label of line 3 is 1e+23: number the classes 0, 1, 2, ..., or ask for a regression" in refused(path)


def test_what_comes_through_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.csv")
    assert f"{tmp_path / 'a.csv'} is no file that each rank can read for itself" in refused(tmp_path / "a.csv")


def test_several_tables_refused(tmp_path: Path) -> None:
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text(TWO)
    assert "names 2 files: only TFRecords may be several" in refused(tmp_path / "*.csv")
