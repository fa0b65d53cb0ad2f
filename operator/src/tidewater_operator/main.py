"""The operator's process: builds the components and runs them until SIGTERM."""

import argparse
import asyncio
import base64
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import kopf

from tidewater_coordination.etcd.login import Login
from tidewater_core.clock import Clock, SystemClock, SystemIds
from tidewater_core.errors import Invalid, TidewaterError
from tidewater_operator.cluster.access import find_access
from tidewater_operator.cluster.api import POOL, SECRET, SUBSCRIPTION, TOPIC, Api
from tidewater_operator.cluster.events import Events
from tidewater_operator.cluster.gather import everything
from tidewater_operator.cluster.lease import Leadership
from tidewater_operator.handlers.marks import watch_settings, watches
from tidewater_operator.health import Health
from tidewater_operator.hearing import Hearing
from tidewater_operator.keepers import Keepers
from tidewater_operator.reconcile import Reconciler
from tidewater_operator.registry import Registries
from tidewater_operator.settings import OperatorSettings
from tidewater_operator.times import from_us
from tidewater_operator.workers import Workers

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
    return asyncio.run(_run(settings, args.namespace, args.identity, host, int(port)))


async def _run(
    settings: OperatorSettings, namespace: str, identity: str, host: str, port: int
) -> int:
    clock = SystemClock()
    access = find_access()
    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(Api(access))
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        login = await _etcd_login(api, settings, namespace, Path(folder))
        registries = Registries(settings.etcd.endpoints, settings.etcd.prefix, login)
        stack.push_async_callback(registries.close)
        workers = Workers(access.authorization)
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
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        tasks = [
            asyncio.create_task(leadership.run(), name="lease"),
            asyncio.create_task(
                _sweep(settings, api, registries, keepers, leadership, hearing, clock),
                name="sweep",
            ),
            asyncio.create_task(
                kopf.operator(
                    registry=watches(keepers, hearing, clusterwide=not watched),
                    settings=watch_settings(),
                    standalone=True,
                    clusterwide=not watched,
                    namespaces=settings.watch_namespaces,
                    stop_flag=stop,
                ),
                name="watches",
            ),
        ]
        waiting = asyncio.create_task(stop.wait())
        done, _ = await asyncio.wait([*tasks, waiting], return_when=asyncio.FIRST_COMPLETED)
        code = 0 if waiting in done else 1
        for task in done - {waiting}:
            log.error("%s ended: %r", task.get_name(), task.exception())
        # Leadership first: the next operator need not wait until the lease has run out.
        await keepers.close()
        with suppress(TidewaterError):
            await leadership.release()
        for task in (*tasks, waiting):
            task.cancel()
        await asyncio.gather(*tasks, waiting, return_exceptions=True)
    return code


async def _etcd_login(api: Api, settings: OperatorSettings, namespace: str, folder: Path) -> Login:
    """Return how we show etcd who we are, from the Secret that the settings name."""
    if not settings.etcd.secret:
        return Login()
    found = await api.get(SECRET, namespace, settings.etcd.secret)
    if found is None:
        raise Invalid("SecretNotFound", f"there is no Secret {namespace}/{settings.etcd.secret}")
    data = {key: base64.b64decode(text) for key, text in (found.get("data") or {}).items()}
    paths = {}
    for field, key in (("ca", "ca.crt"), ("cert", "tls.crt"), ("key", "tls.key")):
        if key in data:
            path = folder / key
            path.touch(mode=0o600)
            path.write_bytes(data[key])
            paths[field] = str(path)
    user, password = (data.get(key, b"").decode() for key in ("username", "password"))
    return Login(**paths, user=user, password=password)


async def _sweep(
    settings: OperatorSettings,
    api: Api,
    registries: Registries,
    keepers: Keepers,
    leadership: Leadership,
    hearing: Hearing,
    clock: Clock,
) -> None:
    """Find by listing what no watch told of: objects, and namespaces that only etcd knows."""
    while True:
        await leadership.gained.wait()
        try:
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
