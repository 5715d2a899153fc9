"""Which shared memory loses its name."""

from __future__ import annotations

from pathlib import Path

from mpitrain.comm.shared_memory import remove_names

MAPS = """7f1-7f2 rw-s 00000000 00:17 5 {0}/mpich_shm_1_0
7f2-7f3 rw-s 00001000 00:17 5 {0}/mpich_shm_1_0
7f3-7f4 rw-s 00000000 00:17 6 {0}/mpich_shm_gone (deleted)
7f4-7f5 rw-s 00000000 00:17 7 {0}/sm_segment.a.0.1.0
7f5-7f6 rw-p 00000000 00:00 0
"""


def test_only_that_of_the_own_maps_and_only_once(tmp_path: Path) -> None:
    names = ("mpich_shm_1_0", "mpich_shm_2_0", "mpich_shm_gone (deleted)", "mpich_shm_gone", "sm_segment.a.0.1.0")
    for name in names:
        (tmp_path / name).touch()
    (tmp_path / "maps").write_text(MAPS.format(tmp_path))
    for _ in range(2):
        remove_names(tmp_path / "maps", f"{tmp_path}/mpich_shm_")
        assert {path.name for path in tmp_path.iterdir()} == {"maps", *names[1:]}
    remove_names(tmp_path / "absent", f"{tmp_path}/mpich_shm_")
