"""Builds wheels whose simulator is compiled: the same sources, by mypyc, which takes their types at their word.

Only where it is asked for, since it needs a C compiler: `HATCH_BUILD_HOOK_ENABLE_CUSTOM=true` (`make wheel`). Which
modules those are says pyproject.toml."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

EXACT = ["-ffp-contract=off"] if os.name == "posix" else []
"""The same numbers as Python's own: no two operations become one that rounds once, as compilers do on some chips."""

DIRECT = (["-fno-semantic-interposition"], ["-Wl,-Bsymbolic"]) if sys.platform == "linux" else ([], [])
"""For the compiler and the linker: calls between compiled functions go straight there, or are inlined; else each looks
its target up, since another library could replace it. A tenth of the time."""


class Compiled(BuildHookInterface):  # type: ignore[type-arg]
    """Puts the compiled modules beside their sources in the wheel. The tree itself stays as it is."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            raise SystemExit("an editable install runs the sources, so nothing is compiled for it; build a wheel")
        self._made = tempfile.TemporaryDirectory()
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        build_data["force_include"] |= self._compile(Path(self._made.name))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        self._made.cleanup()

    def _compile(self, scratch: Path) -> dict[str, str]:
        """Where in the wheel each file belongs that was made."""
        from mypyc.build import mypycify
        from setuptools import Distribution

        root, made = Path(self.root), scratch / "made"
        modules = sorted(
            str(path.relative_to(root))
            for pattern in self.config["modules"]
            for path in root.glob(pattern)
            if path.name != "__init__.py"
        )
        extensions = mypycify(modules, group_name="pdd_runtime", debug_level="0", target_dir=str(scratch / "c"))
        for extension in extensions:
            extension.extra_compile_args += EXACT + DIRECT[0]
            extension.extra_link_args += DIRECT[1]
        command = Distribution({"name": "pdd_runtime", "ext_modules": extensions}).get_command_obj("build_ext")
        command.build_lib, command.build_temp = str(made), str(scratch / "o")
        command.ensure_finalized()
        command.run()
        return {str(path): str(path.relative_to(made)) for path in made.rglob("*") if path.is_file()}
