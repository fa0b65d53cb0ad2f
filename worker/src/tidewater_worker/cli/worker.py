"""`tidewater worker`: run a worker from a settings file, as the operator does."""

import argparse
import asyncio
import fcntl
import os
import re
from pathlib import Path
from typing import NoReturn

from tidewater_coordination import connect_as
from tidewater_core.clock import SystemIds
from tidewater_core.crd.change import topic_change_problems
from tidewater_core.crd.manifest import load_manifests
from tidewater_core.crd.topic import Topic, TopicSpec
from tidewater_core.errors import Conflict, Invalid
from tidewater_core.settings import WorkerSettings
from tidewater_worker.supervisor import replace_process

NAME = "worker"
HELP = "Run a worker from a settings file, as the operator does in a pod."
PID_BYTES_MAX = 20
_PLACEHOLDER = re.compile(r"\$\{([A-Z][A-Z0-9_]*)\}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "--settings",
        type=Path,
        required=True,
        metavar="FILE",
        help="JSON file of the worker's settings; ${NAME} in it stands for an environment variable",
    )
    parser.add_argument(
        "-f",
        "--filename",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="Topic and Subscription manifests to register before the start; may be repeated",
    )


def run(args: argparse.Namespace) -> NoReturn:
    """Run until SIGTERM."""
    settings = WorkerSettings.from_json(expand(args.settings.read_text(), dict(os.environ)))
    hold(settings.run_dir)
    start(settings, args.filename)


def expand(text: str, environment: dict[str, str]) -> str:
    """Replace ${NAME} by the variable's value as part of a JSON string; refuse a missing one."""

    def value(match: re.Match[str]) -> str:
        if match[1] not in environment:
            raise Invalid("MissingVariable", f"the settings need the variable {match[1]}")
        return environment[match[1]].replace("\\", "\\\\").replace('"', '\\"')

    return _PLACEHOLDER.sub(value, text)


def register(settings: WorkerSettings, manifests: list[Path]) -> list[str]:
    """Put what manifests describe into the registry; return the names of the topics."""
    return asyncio.run(_register(settings, manifests))


async def _register(settings: WorkerSettings, manifests: list[Path]) -> list[str]:
    registry = connect_as(settings)
    await registry.start()
    try:
        known = {found.topic: found for found in await registry.topics()}
        registered = []
        for manifest in manifests:
            for item in load_manifests(manifest.read_text()):
                name = f"{item.metadata.namespace}/{item.metadata.name}"
                uuid = str(SystemIds().uuid())
                if not isinstance(item, Topic):
                    await registry.register_subscription(name, item.spec.to_json(), uuid)
                    continue
                if name in known:
                    problems = topic_change_problems(
                        TopicSpec.from_json(known[name].spec), item.spec
                    )
                    if problems:
                        raise Invalid("InvalidChange", f"{name}: {'; '.join(problems)}")
                await registry.register_topic(name, item.spec.to_json(), uuid)
                registered.append(name)
    finally:
        await registry.close()
    return registered


def topic_names(settings: WorkerSettings) -> list[str]:
    """Return the names of the registered topics."""

    async def ask() -> list[str]:
        registry = connect_as(settings)
        await registry.start()
        try:
            return [found.topic for found in await registry.topics()]
        finally:
            await registry.close()

    return asyncio.run(ask())


def hold(run_dir: Path) -> int:
    """Keep others from what a worker runs on, before anything is written there.

    The lock is the supervisor's: it goes with this process into its program, whatever ends it
    gives it back, and its children do not get it. Returns its descriptor.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    lock = os.open(run_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(lock, PID_BYTES_MAX).decode("ascii", "replace").strip()
        os.close(lock)
        raise Conflict(
            "DataInUse", f"another worker (pid {owner or 'unknown'}) uses {run_dir}"
        ) from None
    os.ftruncate(lock, 0)
    os.write(lock, b"%d\n" % os.getpid())
    os.set_inheritable(lock, True)  # over execv; the supervisor's own children get nothing
    return lock


def start(settings: WorkerSettings, manifests: list[Path]) -> NoReturn:
    """Register the manifests, write the settings where the processes find them, and supervise.

    The caller holds the directory.
    """
    register(settings, manifests)
    path = settings.run_dir / "settings.json"
    path.touch(mode=0o600)  # it may hold the catalog's credentials
    path.write_text(settings.to_json())
    replace_process(path, settings.run_dir, settings.shutdown_deadline.seconds)
