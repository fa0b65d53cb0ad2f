"""The operator's process: builds the components and runs them until SIGTERM."""

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from tidewater_core.clock import Clock, SystemClock, SystemIds
from tidewater_core.errors import Invalid, Retryable, TidewaterError
from tidewater_operator.cluster.access import find_access
from tidewater_operator.cluster.api import POOL, SUBSCRIPTION, TOPIC, Api
from tidewater_operator.cluster.events import Events
from tidewater_operator.cluster.gather import cluster_id, everything
from tidewater_operator.cluster.lease import Leadership
from tidewater_operator.etcd_secret import EtcdSecret
from tidewater_operator.handlers.marks import watch, watches
from tidewater_operator.health import Health, not_ready
from tidewater_operator.hearing import Hearing
from tidewater_operator.keepers import Keepers
from tidewater_operator.reconcile import Reconciler
from tidewater_operator.registry import Registries
from tidewater_operator.settings import AuthMode, OperatorSettings
from tidewater_operator.times import from_us
from tidewater_operator.workers import Workers, token_of

START_AGAIN_S: Final = 2.0
"""Between two questions to an API server that is away when we start."""
Found = TypeVar("Found")
log = logging.getLogger("tidewater_operator")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the operator; return the exit code."""
    parser = argparse.ArgumentParser(prog="tidewater-operator", description=__doc__)
    parser.add_argument("--settings", type=Path, required=True, help="YAML file of settings")
    parser.add_argument("--listen", default="0.0.0.0:8080", help="address of /healthz and /metrics")
    parser.add_argument("--namespace", default=os.environ.get("POD_NAMESPACE", "tidewater"))
    parser.add_argument("--identity", default=os.environ.get("POD_NAME", socket.gethostname()))
    args = parser.parse_args(arguments)
    try:
        settings = OperatorSettings.from_yaml(args.settings.read_text())
    except (OSError, Invalid) as error:
        print(f"tidewater-operator: {args.settings}: {error}", file=sys.stderr)  # noqa: T201
        return 2
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    logging.getLogger("kopf").setLevel(logging.WARNING)
    host, _, port = args.listen.rpartition(":")
    try:
        return asyncio.run(_run(settings, args.namespace, args.identity, host, int(port)))
    except Invalid as error:  # a person must change something: what, and no trace of where
        log.error("%s", error)
        return 2


async def _run(
    settings: OperatorSettings, namespace: str, identity: str, host: str, port: int
) -> int:
    clock = SystemClock()
    access = find_access()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(Api(access))
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        secret = EtcdSecret(api, namespace, settings.etcd.secret, Path(folder))
        async with not_ready(host, port, "waiting for the API server"):
            registries = await patiently(lambda: _registries(settings, api, secret), stop)
        if registries is None:
            return 0
        stack.push_async_callback(registries.close)
        workers = Workers(_shown_to_workers(settings))
        stack.push_async_callback(workers.close)
        leadership = Leadership(api, clock, namespace, identity, settings.intervals.lease.seconds)
        # A pass that was under way when the lease ran out changes nothing any more.
        api.may_write = registries.may_write = lambda: leadership.is_ours
        events = Events(api, clock, SystemIds(), identity)
        reconciler = Reconciler(settings, api, registries, workers, events, clock, namespace)
        watched = frozenset(settings.watch_namespaces)
        keepers = Keepers(
            reconciler,
            registries,
            leadership,
            clock,
            settings.intervals,
            lambda name: not watched or name in watched,
        )
        stack.push_async_callback(keepers.close)
        hearing = Hearing()
        runner = await Health(keepers, leadership, hearing, api, clock).serve(host, port)
        stack.push_async_callback(runner.cleanup)
        tasks = [
            asyncio.create_task(leadership.run(), name="lease"),
            asyncio.create_task(
                _sweep(settings, api, registries, secret, keepers, leadership, hearing, clock),
                name="sweep",
            ),
            asyncio.create_task(
                watch(
                    watches(keepers, hearing, clusterwide=not watched),
                    settings.watch_namespaces,
                    stop,
                ),
                name="watches",
            ),
        ]
        waiting = asyncio.create_task(stop.wait())
        done, _ = await asyncio.wait([*tasks, waiting], return_when=asyncio.FIRST_COMPLETED)
        code = 0 if stop.is_set() else 1
        for task in done - {waiting} if code else ():
            log.error("%s ended: %r", task.get_name(), task.exception())
        # Leadership first: the next operator need not wait until the lease has run out.
        await keepers.close()
        with suppress(TidewaterError):
            await leadership.release()
        for task in (*tasks, waiting):
            task.cancel()
        await asyncio.gather(*tasks, waiting, return_exceptions=True)
    return code


async def patiently(
    ask: Callable[[], Awaitable[Found]], stop: asyncio.Event, pause_s: float = START_AGAIN_S
) -> Found | None:
    """Ask until there is an answer; None if we are told to stop before.

    An operator that ended instead would be started again after minutes, long after the API server.
    """
    said = ""
    while not stop.is_set():
        try:
            return await ask()
        except Retryable as error:
            if error.reason != said:
                said = error.reason
                log.warning("waiting to start: %s", error)
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), pause_s)
    return None


async def _registries(settings: OperatorSettings, api: Api, secret: EtcdSecret) -> Registries:
    etcd = settings.etcd
    return Registries(
        etcd.endpoints,
        etcd.prefix,
        await secret.login(),
        cluster=await cluster_id(api),
        take_over_from=etcd.take_over_from,
    )


def _shown_to_workers(settings: OperatorSettings) -> Callable[[], Mapping[str, str]]:
    """Return what shows workers who we are: never what shows it to the API server."""
    if settings.auth.mode is AuthMode.NONE:
        return dict
    return partial(token_of, settings.auth.worker_token_path)


async def _sweep(
    settings: OperatorSettings,
    api: Api,
    registries: Registries,
    secret: EtcdSecret,
    keepers: Keepers,
    leadership: Leadership,
    hearing: Hearing,
    clock: Clock,
) -> None:
    """Find by listing what no watch told of: objects, and namespaces that only etcd knows."""
    while True:
        await leadership.gained.wait()
        try:
            await registries.log_in(await secret.renewed())
            listed = [
                item
                for kind in (TOPIC, SUBSCRIPTION, POOL)
                for item in await everything(api, kind, settings.watch_namespaces)
            ]
            for namespace in {item["metadata"]["namespace"] for item in listed}:
                if namespace not in keepers.names:
                    keepers.mark(namespace)
            if missed := hearing.compare(listed, from_us(clock.now_us())):
                log.warning("the watches have not told of %d objects that are there", missed)
            for namespace in await registries.namespaces():
                if namespace not in keepers.names:
                    keepers.mark(namespace)
        except TidewaterError as error:
            log.warning("the listing failed: %s", error)
            await asyncio.sleep(min(settings.intervals.resync.seconds, 5.0))
            continue
        await asyncio.sleep(settings.intervals.resync.seconds)


if __name__ == "__main__":
    sys.exit(main())
