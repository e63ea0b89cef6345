"""What is run to start a server: as data, so that it can be shown as well as done."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

_SECRETS_OF_OURS = ("PDD_SECRET",)


@dataclass(frozen=True)
class Launch:
    """One process and what it finds. It runs in a directory of its own, so `argv` names `files` as they are named
    here."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the worker's own environment."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Texts that the server reads, by name: relative paths, which stay in the directory."""

    def __post_init__(self) -> None:
        if not self.argv:
            raise ValueError("a launch without a command")
        for name in self.files:
            path = PurePosixPath(name)
            if not path.parts or path.is_absolute() or ".." in path.parts:
                raise ValueError(f"{name!r} is no place within the server's directory")

    def write_files(self, directory: Path) -> None:
        """Put `files` into `directory`, readable for this user alone. Raises `OSError`."""
        for name, text in self.files.items():
            path = directory / name
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            # Made with its mode, so that it never is open to others, not even for a moment.
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
                file.write(text)

    @property
    def programs(self) -> str | None:
        """The directory that is put before PATH: servers call tools of their own environment (compilers of kernels),
        which nobody has activated."""
        return str(Path(self.argv[0]).parent) if "/" in self.argv[0] else None

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """What the process gets of a worker's environment, and `env`."""
        environment = {name: value for name, value in inherited.items() if name not in _SECRETS_OF_OURS}
        if self.programs is not None:
            environment["PATH"] = os.pathsep.join(filter(None, (self.programs, inherited.get("PATH"))))
        return {**environment, "PYTHONUNBUFFERED": "1", **self.env}
