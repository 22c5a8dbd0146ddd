"""Builds the compiled modules, `*_core.py`, beside their sources: hatchling's hook, and `python hatch_build.py` in a checkout.

Cython makes C of them, and a C compiler one extension for all Python >= 3.11. A module is built again only if its
source has changed: the extension carries a hash of its source, of the declarations (`*.pxd`) and of this file.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent
CHECKED = "AURORA_BOUNDS_CHECKED"  # variable: set, an index outside of an array is an error, for tests
# No fused multiply-add, and no flags of one machine: all machines make the same plans.
FLAGS = ["-O3", "-ffp-contract=off", "-g0"]
DIRECTIVES = {
    "language_level": 3,
    "boundscheck": False,
    "wraparound": False,
    "cdivision": True,
    "initializedcheck": False,
    "infer_types": True,
}


def cores() -> list[Path]:
    """Returns the sources of the compiled modules."""
    return sorted((ROOT / "aurora").rglob("*_core.py"))


def extension_of(core: Path) -> Path:
    """Returns the path of a module's extension."""
    return core.with_suffix(".abi3.so")


def stamp(core: Path) -> bytes:
    """Returns the text that the extension of an unchanged source has in it."""
    parts = [path.read_bytes() for path in (core, *sorted((ROOT / "aurora").rglob("*.pxd")), Path(__file__))]
    parts.append(os.environ.get(CHECKED, "").encode())
    return b"aurora-source:" + hashlib.sha256(b"\0".join(parts)).hexdigest().encode()


def is_built(core: Path) -> bool:
    """Returns whether a module's extension is that of its source."""
    extension = extension_of(core)
    return extension.exists() and stamp(core) in extension.read_bytes()


def build() -> None:
    """Builds the modules that have changed, one process at a time. Raises SystemExit if there is no C compiler."""
    folder = ROOT / "build"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if changed := [core for core in cores() if not is_built(core)]:
            _build(changed, folder)


def _build(changed: list[Path], folder: Path) -> None:
    from Cython.Build import cythonize
    from setuptools import Distribution, Extension
    from setuptools.command.build_ext import build_ext
    from setuptools.errors import CCompilerError

    extensions = []
    for core in changed:
        name = ".".join(core.relative_to(ROOT).with_suffix("").parts)
        header = folder / f"{name}.h"
        header.write_text(f'__attribute__((used)) static const char aurora_source[] = "{stamp(core).decode()}";\n')
        flags = [*FLAGS, "-include", str(header)]
        macros = [("Py_LIMITED_API", "0x030B0000"), ("CYTHON_LIMITED_API", "1")]
        sources = [str(core.relative_to(ROOT))]
        extensions.append(Extension(name, sources, extra_compile_args=flags, define_macros=macros, py_limited_api=True))
    directives = DIRECTIVES | {"boundscheck": CHECKED in os.environ}
    before = Path.cwd()
    os.chdir(ROOT)
    try:
        made = cythonize(extensions, compiler_directives=directives, build_dir=str(folder / "c"), force=True, quiet=True)
        command = build_ext(Distribution({"name": "aurora", "ext_modules": made}))
        command.build_lib, command.build_temp = str(folder / "lib"), str(folder / "temp")
        command.parallel = len(os.sched_getaffinity(0))
        command.ensure_finalized()
        command.run()
    except CCompilerError as error:
        raise SystemExit(f"aurora: its compiled modules need a C compiler, such as gcc: {error}") from None
    finally:
        os.chdir(before)
    for core in changed:  # whole or not at all, beside processes that use the old one
        new = extension_of(core).with_suffix(".new")
        shutil.copyfile(folder / "lib" / extension_of(core).relative_to(ROOT), new)
        new.replace(extension_of(core))


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run as a script
    pass
else:

    class CompiledModules(BuildHookInterface):
        """Builds the modules before a wheel or an editable install is made, and puts them into the wheel."""

        PLUGIN_NAME = "custom"

        def initialize(self, version, build_data):
            if self.target_name != "wheel":
                return
            # setuptools has changed distutils for the process that imports it: one of its own
            subprocess.run([sys.executable, __file__], check=True)
            build_data["artifacts"] += [str(extension_of(core).relative_to(ROOT)) for core in cores()]
            build_data["pure_python"] = False
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"cp311-abi3-{platform}"  # cibuildwheel's auditwheel names a wider platform


if __name__ == "__main__":
    build()
