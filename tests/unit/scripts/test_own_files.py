"""Directories that ranks share, and which files a script opens itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SHARED = """
import os, sys
from pathlib import Path
from mpitrain.scripts.own_files import share_directories
share_directories()
os.chdir(sys.argv[1])
os.utime("old", (0, 0))

def tried(path, make=os.mkdir):
    try:
        make(path)
        return "made"
    except FileExistsError:
        return "there"

# "new" and "new/below" are of another rank of this job, "old" is older, "file" is none.
print(*[tried(name) for name in ("new", "new", "own", "own", "old", "file")])
print(tried("new/below/more", os.makedirs), tried("new/below"), tried(b"other"), tried(Path("other"), Path.mkdir))
Path("other").mkdir(exist_ok=True)
os.makedirs("other/a/b", exist_ok=True)
os.rmdir("own")
os.mkdir("own")
try:
    os.mkdir("none/below")
except FileNotFoundError:
    print("no parent")
"""


def test_directories_of_other_ranks(tmp_path: Path) -> None:
    (tmp_path / "new" / "below").mkdir(parents=True)
    (tmp_path / "old").mkdir()
    (tmp_path / "file").touch()
    found = subprocess.run(
        [sys.executable, "-c", SHARED, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert found.stdout.splitlines() == ["made there made there there there", "made there made there", "no parent"]


WATCHED = """
import json, os, sys, tempfile, warnings
from pathlib import Path
import numpy as np
from mpitrain.scripts.own_files import OwnFiles
rows = []
OwnFiles(lambda part, text: rows.append(text.partition(":")[0]), 4, is_root=True).watch()
os.chdir(sys.argv[1])
open("given").read()
for mode in ("w", "r+", "a", "xb"):
    open(f"mode {mode}", mode).close() if mode != "r+" else open("given", mode).close()
open("mode w", "w").close()
Path("path").write_text("")
np.save("array.npy", np.zeros(1))
json.dump({}, open("json", "w"))
tempfile.NamedTemporaryFile().close()
open(os.devnull, "w").close()
os.close(os.open("descriptor", os.O_CREAT | os.O_WRONLY))
import helper
print(json.dumps(rows))
"""


def test_files_that_a_script_opens(tmp_path: Path) -> None:
    (tmp_path / "given").touch()
    (tmp_path / "helper.py").write_text("open('by the helper', 'w').close()\n")
    (tmp_path / "watched.py").write_text(WATCHED)
    found = subprocess.run(
        [sys.executable, str(tmp_path / "watched.py"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    expected = ["mode w", "given", "mode a", "mode xb", "path", "array.npy", "json", "by the helper"]
    assert json.loads(found.stdout) == expected
    assert found.stderr.count("\n") == 1
    assert found.stderr.startswith("mpitrain: the script appends to mode a itself, and so does each of the 4 ranks")
