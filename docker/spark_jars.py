"""Give pip's pyspark the Iceberg jars and take away what the jobs never load.

pip's pyspark is a whole Spark distribution. The jobs use Spark SQL, Iceberg and the Kubernetes
scheduler; MLlib, Hive, Connect, the REPL, YARN and native libraries for other platforms are most of
the size. Kept on purpose: `tink` (without it encrypted RPC hangs silently), `hive-storage-api` (ORC
needs it), every kubernetes-model jar (looked up by name at run time).

Usage: spark_jars.py JARS_DIRECTORY DIRECTORY_OF_JARS_TO_ADD
"""

import hashlib
import platform
import shutil
import sys
import zipfile
from pathlib import Path

# Jars that Spark gets, and their SHA-256: one that differs fails the build.
ADDED_JARS = (
    (
        "iceberg-spark-runtime-4.1_2.13-1.12.0.jar",
        "3123c3798af642dd537230923548e013ef41cc28b6626e5225808cf5670a0f82",
    ),
    (
        "iceberg-aws-bundle-1.12.0.jar",
        "dd7e49ffa4ac9b215bed846581991259e3aec9bb2fa08d6cec029c46cd66d957",
    ),
    # For SQL catalogs.
    (
        "postgresql-42.7.14.jar",
        "73914527305a40cce504b0d3d90b23caf565136912d607ae8ae7c5895512332c",
    ),
)

MLLIB = (
    "spark-mllib*",
    "spark-graphx*",
    "breeze*",
    "spire*",
    "algebra*",
    "cats-kernel*",
    "arpack*",
    "lapack*",
    "blas*",
    "JTransforms*",
    "JLargeArrays*",
)
HIVE = (
    "spark-hive*",
    "hive-beeline*",
    "hive-cli*",
    "hive-common*",
    "hive-exec*",
    "hive-jdbc*",
    "hive-llap*",
    "hive-metastore*",
    "hive-serde*",
    "hive-service*",
    "hive-shims*",
    "datanucleus*",
    "derby*",
    "HikariCP*",
    "javax.jdo*",
    "jdo-api*",
    "libfb303*",
    "libthrift*",
    "super-csv*",
    "jpam*",
    "javolution*",
    "ST4*",
    "antlr-runtime*",
    "opencsv*",
)
CONNECT_AND_REPL = (
    "spark-connect*",
    "connect-repl",
    "spark-pipelines*",
    "spark-repl*",
    "scala-compiler*",
    "jline*",
)
YARN = ("spark-yarn*", "hadoop-yarn*")
# HTTP/3 is never spoken; the RPC transport falls back to NIO where epoll is missing.
NATIVES = (
    "netty-*-native-quic-*",
    "netty-*osx-*",
    "netty-*windows-*",
    "netty-*riscv64*",
)
UNUSED = MLLIB + HIVE + CONNECT_AND_REPL + YARN + NATIVES

# Jars that carry one native library per platform inside.
FAT_JARS = ("rocksdbjni", "zstd-jni", "snappy-java", "lz4-java", "leveldbjni", "iceberg-aws-bundle")
NATIVE_SUFFIXES = (".so", ".dll", ".dylib", ".jnilib", ".a")
MACHINE_NAMES = {
    "x86_64": ("x86_64", "amd64", "linux64"),
    "aarch64": ("aarch64", "armv8", "arm64"),
}


def add(given: Path, name: str, sha256: str, target: Path) -> None:
    """Take one jar and refuse it unless it has the expected checksum."""
    body = (given / name).read_bytes()
    found = hashlib.sha256(body).hexdigest()
    if found != sha256:
        message = f"{name}: SHA-256 is {found}, expected {sha256}"
        raise SystemExit(message)
    (target / name).write_bytes(body)


def is_foreign_native(entry: str, machine: str) -> bool:
    """Tell whether a jar entry is a native library that this machine's glibc cannot load."""
    name = entry.lower()
    if not name.endswith(NATIVE_SUFFIXES):
        return False
    ours = "linux" in name and any(token in name for token in MACHINE_NAMES[machine])
    return not ours or "musl" in name or "android" in name


def slim(jar: Path, machine: str) -> None:
    """Rewrite a jar without the native libraries of other platforms."""
    slimmed = jar.with_suffix(".slim")
    with zipfile.ZipFile(jar) as source, zipfile.ZipFile(slimmed, "w") as sink:
        for info in source.infolist():
            if not is_foreign_native(info.filename, machine):
                sink.writestr(info, source.read(info), zipfile.ZIP_DEFLATED)
    slimmed.replace(jar)


def main(jars: Path, given: Path) -> None:
    """Add, remove and slim, and say what that did to the size."""
    machine = platform.machine()
    for name, sha256 in ADDED_JARS:
        add(given, name, sha256, jars)
    before = sum(p.stat().st_size for p in jars.rglob("*.jar"))
    other = "aarch_64" if machine == "x86_64" else "x86_64"
    for pattern in (*UNUSED, f"netty-*linux-{other}*"):
        for unused in jars.glob(pattern):
            if unused.is_dir():
                shutil.rmtree(unused)
            else:
                unused.unlink()
    for prefix in FAT_JARS:
        for jar in jars.glob(f"{prefix}*.jar"):
            slim(jar, machine)
    after = sum(p.stat().st_size for p in jars.rglob("*.jar"))
    sys.stdout.write(f"spark jars: {before >> 20} MiB -> {after >> 20} MiB\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
