"""What is told of exceptions that are somebody else's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mpitrain.errors import LONGEST, DataError, in_one_line, own_lines


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("two\n  lines", "two lines"),
        ("\x1b[1mbold\x1b[0m and {{function_node __wrapped__Add_device_/job:x}} more [Op:Add] name: ", "bold and more"),
        ("{'a': {'b': {}}}", "{'a': {'b': {}}}"),
        ("", "ValueError"),
        ("x" * 1000, "x" * LONGEST),
    ],
)
def test_one_line(text: str, told: str) -> None:
    assert in_one_line(ValueError(text)) == told


def test_a_long_line_ends_between_words() -> None:
    told = in_one_line(ValueError("{'config': {'units': 3}} " * 100))
    assert len(told) <= LONGEST
    assert told.endswith(" ...")
    assert told.removesuffix(" ...").endswith(("'config':", "'units':", "3}}"))


def test_the_lines_of_the_user_s_own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mpitrain.data.function import call, resolve

    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_module.py").write_text("def helper():\n    return 1 / 0\n\ndef data():\n    return helper()\n")
    (tmp_path / "own_broken.py").write_text("import nosuchthing\n")
    (tmp_path / "own_syntax.py").write_text("1 +\n")
    with pytest.raises(DataError) as caught:
        call(resolve("own_module:data", DataError), "own_module:data", DataError)
    first, header, *lines, last = str(caught.value).splitlines()
    assert first == "own_module:data failed (ZeroDivisionError: division by zero)"
    assert header == "Traceback (most recent call last):"
    places = [line.split(", ", 1)[1] for line in lines if line.startswith("  File ")]
    assert places == ["line 5, in data", "line 2, in helper"]  # and none of this package
    assert last == "ZeroDivisionError: division by zero"
    for name, line in (("own_broken", "    import nosuchthing"), ("own_syntax", "    1 +")):
        with pytest.raises(DataError) as caught:
            resolve(f"{name}:data", DataError)
        assert line in str(caught.value).splitlines()
    with pytest.raises(DataError) as caught:
        resolve("own_absent:data", DataError)
    assert len(str(caught.value).splitlines()) == 1
    for name in ("own_module", "own_broken", "own_syntax"):
        sys.modules.pop(name, None)


def test_own_lines_without_a_traceback() -> None:
    assert own_lines(ValueError("\x1b[1mx\x1b[0m")) == "ValueError: x"
