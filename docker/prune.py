"""Make an installed Python prefix small before it is copied into the final stage of an image.

Runs in the build stage, where it costs nothing to be thorough: what is removed here never becomes
part of a layer that ships. In two halves, so that a change of our own code repeats only the second:

* `libraries`, after the pinned requirements are installed: remove what no running component imports
  (test suites, headers, GUI parts), strip the symbol tables of shared libraries (`strip` comes from
  binutils, build stage only), and compile, since nothing can be compiled later in a read-only root;
* `finish`, after our own packages are installed: compile them and remove pip itself.

Usage: prune.py libraries|finish PREFIX   (for example /usr/local)
"""

import compileall
import py_compile
import shutil
import subprocess
import sys
from pathlib import Path

# Below lib/pythonX.Y: installers, IDE, GUI and test parts of the standard library.
STDLIB_UNUSED = (
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "test",
    "tkinter",
    "turtledemo",
    "config-*",
    "lib-dynload/_tkinter*",
    "lib-dynload/_dbm*",
    "lib-dynload/_gdbm*",
    "lib-dynload/_curses*",
    "lib-dynload/nis*",
    "lib-dynload/ossaudiodev*",
    "lib-dynload/readline*",
    "lib-dynload/_test*",
    "lib-dynload/_xxtestfuzz*",
    "lib-dynload/xxlimited*",
)

# Below site-packages. pyarrow ships its C++ headers and Cython sources for people who build on it;
# its shared libraries all stay, since they link each other.
SITE_UNUSED = (
    "pyarrow/include",
    "pyarrow/src",
    "pyarrow/tests",
    "pyarrow/*.pxd",
    "pyarrow/*.pyx",
    "pyarrow/*.pxi",
    "pyarrow/includes",
    # A second, asynchronous copy of the whole Kubernetes client (65 MB); the first one is loaded
    # by the package itself in any case.
    "numpy/_core/include",
    "numpy/_core/lib",
    "numpy/f2py",
)

# Anywhere below site-packages: suites and stubs that packages carry along. `testing` stays:
# pyspark imports its own.
ANYWHERE_UNUSED = ("**/tests", "**/test", "**/*.pyi", "**/*.a", "**/*.h", "**/*.hpp")

PREFIX_UNUSED = (
    "include",
    "share/man",
    "lib/pkgconfig",
    "bin/idle*",
    "bin/2to3*",
    "bin/pydoc*",
    "bin/python*-config",
)


# What installs: needed until our own packages are in.
INSTALLERS = (
    "bin/pip*",
    "lib/python3.*/ensurepip",
    "lib/python3.*/site-packages/pip",
    "lib/python3.*/site-packages/pip-*.dist-info",
    "lib/python3.*/site-packages/setuptools",
    "lib/python3.*/site-packages/setuptools-*.dist-info",
)


def remove(root: Path, patterns: tuple[str, ...]) -> int:
    """Remove what matches below root and return the bytes that it took."""
    freed = 0
    for pattern in patterns:
        for path in sorted(root.glob(pattern)):
            freed += size_of(path)
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.is_symlink() or path.exists():
                path.unlink()
    return freed


def size_of(path: Path) -> int:
    """Bytes of a file or of all files below a directory; links count nothing."""
    if path.is_symlink():
        return 0
    if path.is_file():
        return path.stat().st_size
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file() and not p.is_symlink())


def strip_libraries(root: Path) -> int:
    """Strip symbol tables of every shared library below root; return the bytes saved."""
    saved = 0
    for path in sorted(root.rglob("*.so*")):
        if path.is_symlink() or not path.is_file() or path.read_bytes()[:4] != b"\x7fELF":
            continue
        # Libraries that a wheel vendors were rewritten for it, and strip breaks their alignment.
        if path.parent.name.endswith(".libs"):
            continue
        before = path.stat().st_size
        # A library that strip cannot read stays as it was: size is worth no failed build.
        subprocess.run(["strip", "--strip-unneeded", str(path)], check=False, capture_output=True)
        saved += before - path.stat().st_size
    return saved


def compile_all(directory: Path) -> None:
    """Write bytecode that is valid without looking at the source's time stamp."""
    remove(directory, ("**/__pycache__",))
    compileall.compile_dir(
        directory,
        quiet=2,
        workers=0,
        maxlevels=30,
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )


def libraries(prefix: Path) -> None:
    """Prune, strip and compile the interpreter and the libraries."""
    library = next(p for p in prefix.glob("lib/python3.*") if p.is_dir())
    site = library / "site-packages"
    removed = remove(library, STDLIB_UNUSED) + remove(site, SITE_UNUSED)
    removed += remove(site, ANYWHERE_UNUSED) + remove(prefix, PREFIX_UNUSED)
    stripped = strip_libraries(prefix)
    compile_all(library)
    sys.stdout.write(f"removed {removed >> 20} MiB, stripped {stripped >> 20} MiB\n")


def finish(prefix: Path) -> None:
    """Compile our own packages and remove what installed them."""
    for package in prefix.glob("lib/python3.*/site-packages/tidewater*"):
        compile_all(package)
    remove(prefix, INSTALLERS)
    sys.stdout.write(f"{prefix}: {size_of(prefix) >> 20} MiB with bytecode\n")


if __name__ == "__main__":
    {"libraries": libraries, "finish": finish}[sys.argv[1]](Path(sys.argv[2]))
