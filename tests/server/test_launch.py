from __future__ import annotations

import os
from pathlib import Path

import pytest

from pdd_runtime.server.launch import Launch


def test_files_are_written_for_this_user_alone(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("of an earlier start")
    (tmp_path / "config.yaml").chmod(0o666)
    Launch(("serve",), files={"config.yaml": "tp: 2\n", "more/flags.json": "{}"}).write_files(tmp_path)
    assert (tmp_path / "config.yaml").read_text() == "tp: 2\n"
    assert (tmp_path / "more/flags.json").read_text() == "{}"
    for name, mode in (("config.yaml", 0o600), ("more/flags.json", 0o600), ("more", 0o700)):
        assert (tmp_path / name).stat().st_mode & 0o777 == mode


@pytest.mark.parametrize("name", ["/etc/passwd", "../outside", "a/../../outside", ""])
def test_a_file_stays_in_the_servers_directory(name: str) -> None:
    with pytest.raises(ValueError, match="no place within"):
        Launch(("serve",), files={name: ""})


def test_the_server_gets_the_workers_environment_without_its_secret() -> None:
    launch = Launch(("/opt/engine/bin/python", "-m", "serve"), env={"LEVEL": "2"})
    inherited = {"HOME": "/home/me", "LEVEL": "1", "PDD_SECRET": "s3cret", "PATH": "/usr/bin"}
    assert launch.environment(inherited) == {
        "HOME": "/home/me",
        "LEVEL": "2",
        "PATH": f"/opt/engine/bin{os.pathsep}/usr/bin",
        "PYTHONUNBUFFERED": "1",
    }
    assert Launch(("serve",)).environment(inherited)["PATH"] == "/usr/bin"
