"""What `make cluster`, `make cluster-down` and `make e2e` do.

    up    create a cluster (unless it is there), load the images, install the chart
    down  delete it
    test  the same as up on a cluster of its own, run the tests, delete the cluster

`test` takes the cluster that KUBECONFIG names if that is set, and then deletes nothing but what
the tests themselves made.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

from e2e import kind, previous
from e2e.install import SYSTEM, install_chart
from e2e.kubectl import CommandError, Kubectl, run

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "e2e" / "out"
TESTS_S_MAX = 60 * 60
"""Ends what hangs; a machine at half its speed is no failed test."""


def say(text: str) -> None:
    """Tell a person what happens, with the time it does."""
    print(f"[{time.strftime('%H:%M:%S')}] e2e: {text}", flush=True)


@contextmanager
def prepared(name: str, tag: str, kubeconfig: Path | None) -> Iterator[Kubectl]:
    """Bring a kind cluster to the point where tests or people can start.

    Spark's image follows meanwhile, if the cluster is a new one; leaving waits for it.
    """
    private = OUT / f"{name}.kubeconfig"
    if kind.exists(name):
        say(f"cluster {name} is there")
        kind.write_kubeconfig(name, private)
        say(f"images loaded in {kind.load_images(name, tag):.0f} s")
        yield with_chart(Kubectl(private), tag)
        return
    first = kind.ours(tag, [each for each in kind.COMPONENTS if each != kind.SPARK])
    # One thread: this machine's cores are the cluster's, too.
    with TemporaryDirectory(prefix="images-") as folder, ThreadPoolExecutor(1) as aside:
        saved = aside.submit(kind.save, Path(folder, "first.tar"), [*first, *kind.others()])
        large = aside.submit(kind.save, Path(folder, "spark.tar"), kind.ours(tag, [kind.SPARK]))
        begin = time.monotonic()
        kind.create(name, kubeconfig)
        say(f"cluster {name} created in {time.monotonic() - begin:.0f} s")
        kind.write_kubeconfig(name, private)
        say(f"images loaded in {kind.load_archive(name, saved.result()):.0f} s")
        kubectl = with_chart(Kubectl(private), tag)
        loaded = aside.submit(_load_spark, name, large.result())
        try:
            yield kubectl
        finally:
            loaded.result()


def _load_spark(name: str, archive: Path) -> None:
    try:
        say(f"Spark's image loaded in {kind.load_archive(name, archive):.0f} s")
    except CommandError as error:  # told at once: a test may be waiting for it
        say(f"Spark's image is not loaded: {error}")
        raise


def with_chart(kubectl: Kubectl, tag: str) -> Kubectl:
    """Install the chart: operator, etcd and SeaweedFS."""
    begin = time.monotonic()
    install_chart(kubectl, tag)
    say(f"chart installed and ready in {time.monotonic() - begin:.0f} s")
    return kubectl


@contextmanager
def given_cluster() -> Iterator[Path]:
    """Write down which cluster KUBECONFIG means now, so that a changed context changes nothing."""
    kubeconfig = OUT / "given.kubeconfig"
    kubeconfig.parent.mkdir(parents=True, exist_ok=True)
    kubeconfig.touch(mode=0o600)
    kubeconfig.write_text(run(["kubectl", "config", "view", "--minify", "--flatten", "--raw"]))
    try:
        yield kubeconfig
    finally:
        kubeconfig.unlink()


@contextmanager
def test_cluster(name: str, tag: str, *, keep: bool) -> Iterator[Kubectl]:
    """Give a cluster to test in; our own is deleted at the end, also of a failed start."""
    if os.environ.get("KUBECONFIG"):
        context = run(["kubectl", "config", "current-context"]).strip()
        say(f"using the cluster of context {context}")
        if context.startswith("kind-"):
            kind.load_images(context.removeprefix("kind-"), tag)
        with given_cluster() as kubeconfig:
            yield with_chart(Kubectl(kubeconfig), tag)
        return
    try:
        with prepared(name, tag, OUT / f"{name}.kubeconfig") as kubectl:
            yield kubectl
    finally:
        if keep:
            say(f"kept cluster {name}: export KUBECONFIG={OUT / f'{name}.kubeconfig'}")
        else:
            begin = time.monotonic()
            kind.delete(name)
            say(f"cluster {name} deleted in {time.monotonic() - begin:.0f} s")


def test(name: str, tag: str, select: str | None, *, keep: bool, rest: list[str]) -> int:
    """Run the tests in a cluster and return pytest's exit code."""
    begin = time.monotonic()
    with test_cluster(name, tag, keep=keep) as kubectl:
        command = [sys.executable, "-m", "pytest", "e2e", "-v", "--durations=0", *rest]
        if select:
            command += ["-k", select]
        if why := _why_no_upgrade():
            say(f"left out, {why}: the upgrade from {previous.VERSION}")
            command += ["--ignore=e2e/test_previous.py"]
        environment = {
            **os.environ,
            "TIDEWATER_E2E_KUBECONFIG": str(kubectl.kubeconfig),
            "TIDEWATER_E2E_TAG": tag,
            # Ours alone gets Spark's image while the first tests run.
            "TIDEWATER_E2E_KIND": "" if os.environ.get("KUBECONFIG") else name,
        }
        try:
            code = subprocess.run(
                command, cwd=ROOT, env=environment, timeout=TESTS_S_MAX, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            say(f"the tests took longer than {TESTS_S_MAX} s")
            code = 1
    say(f"{'green' if code == 0 else 'FAILED'} after {(time.monotonic() - begin) / 60:.1f} min")
    if code != 0:
        say(f"logs, events and resources of failed tests: {OUT.relative_to(ROOT)}")
    return code


def _why_no_upgrade() -> str:
    """Return what keeps the release before this one from being installed; mostly nothing."""
    if os.environ.get("KUBECONFIG"):
        return "as it takes the CRDs away, which only a cluster of the run's own can bear"
    return "" if previous.is_known() else "as this clone has no history (git fetch --unshallow)"


def _interrupted(number: int, _frame: FrameType | None) -> None:
    """Turn SIGTERM into an exception, so that the cluster is deleted on the way out."""
    raise KeyboardInterrupt(signal.Signals(number).name)


def main() -> int:
    """Read the command line and do it."""
    parser = argparse.ArgumentParser(prog="python -m e2e.run")
    commands = parser.add_subparsers(dest="command", required=True)
    up, down, tests = (commands.add_parser(name) for name in ("up", "down", "test"))
    for command in (up, down, tests):
        command.add_argument("--cluster", required=True)
    for command in (up, tests):
        command.add_argument("--tag", required=True)
    tests.add_argument("--select", help="run the tests whose name contains this")
    tests.add_argument("--keep", action="store_true", help="do not delete the cluster")
    tests.add_argument("rest", nargs="*", help="further arguments for pytest")
    args = parser.parse_args()
    missing = [
        tool for tool in (kind.container_cli(), "kind", "kubectl", "helm") if not shutil.which(tool)
    ]
    if missing:
        parser.exit(2, f"e2e: not on the PATH: {', '.join(missing)}\n")
    signal.signal(signal.SIGTERM, _interrupted)
    if args.command == "down":
        kind.delete(args.cluster)
        return 0
    if args.command == "up":
        with prepared(args.cluster, args.tag, None):
            pass
        context = f"kind-{args.cluster}"
        say(f"ready: kubectl --context {context} --namespace {SYSTEM} get pods")
        return 0
    try:
        return test(args.cluster, args.tag, args.select, keep=args.keep, rest=args.rest)
    except KeyboardInterrupt:
        say("interrupted")
        return 130


if __name__ == "__main__":
    sys.exit(main())
