"""Ask workers how they are. One that does not answer in time has said nothing.

Pods of a namespace are as good as those who may change it. So none of them is shown a token that
the API server takes, none is asked at another address than a worker's own, and what all of them
say in one pass is bounded.
"""

import asyncio
import logging
import re
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import aiohttp
import msgspec

from tidewater_coordination.port import WorkerInfo
from tidewater_operator.model.names import HTTP_PORT, headless_name
from tidewater_operator.report import WorkerReport, read_report

TIMEOUT_S: Final = 3.0
AT_ONCE: Final = 12
"""Workers of a namespace that are asked at the same time."""
REPORT_BYTES_MAX: Final = 4 * 1024 * 1024
PASS_BYTES: Final = 16 * 1024 * 1024
"""What the reports of one pass may take, all together, of a few workers."""
WORKER_BYTES: Final = 2 * 1024 * 1024
"""What they may take for each worker, of many: twice what one with 1,000 partitions says."""
PASS_BYTES_MAX: Final = 48 * 1024 * 1024
"""What they may take of however many: those who make pods in a namespace cannot fill our memory.
Passes at a time: `keepers.PASSES_MAX`."""
OBJECT_BYTES: Final = 128
"""What an object or a list of a report takes in memory, besides its text."""
_WORKER: Final = re.compile(r"tidewater-([a-z0-9][a-z0-9-]*)-[0-9]{1,6}")
log = logging.getLogger(__name__)


def token_of(path: str) -> dict[str, str]:
    """Return the header with the token in a file, which is replaced while we run."""
    try:
        token = Path(path).read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        log.warning("no worker tells how it is: the token for them: %s", error)
        return {}
    return {"Authorization": f"Bearer {token}"} if token else {}


def is_a_workers(url: str, namespace: str, name: str) -> bool:
    """Tell whether an address is the one that a worker of this name was given by us.

    The registry is written by workers: it must not send us anywhere else.
    """
    if (match := _WORKER.fullmatch(name)) is None:
        return False
    host = f"{name}.{headless_name(match[1])}.{namespace}.svc:{HTTP_PORT}"
    return url in (f"http://{host}", f"https://{host}")


class _TooMuch(Exception):
    """A namespace's workers have said more than we listen to."""


def pass_bytes(workers: int) -> int:
    """Return what the reports of so many workers may take, all together."""
    return min(max(PASS_BYTES, workers * WORKER_BYTES), PASS_BYTES_MAX)


class _Pass:
    """What one pass may still hear."""

    def __init__(self, workers: int) -> None:
        self.slots = asyncio.Semaphore(AT_ONCE)
        self.too_large: set[str] = set()
        """Workers that say more."""
        self._limit = self._left = pass_bytes(workers)

    def take(self, count: int) -> None:
        """Take some bytes, or raise."""
        if count > self._left:
            raise _TooMuch(f"all reports of a namespace may take {self._limit} bytes")
        self._left -= count

    def give_back(self, count: int) -> None:
        """Note that some bytes are not kept."""
        self._left += count


class Workers:
    """Fetches reports."""

    def __init__(self, authorization: Callable[[], Mapping[str, str]]) -> None:
        self._authorization = authorization
        self._session: aiohttp.ClientSession | None = None
        self._too_large: dict[str, frozenset[str]] = {}

    def too_large(self, namespace: str) -> frozenset[str]:
        """Return who answered the last time, and said more than is listened to.

        They are not silent: to ask them again at once would only be told the same.
        """
        return self._too_large.get(namespace, frozenset())

    async def close(self) -> None:
        """Hang up."""
        if self._session is not None:
            await self._session.close()

    async def reports(
        self,
        namespace: str,
        workers: Mapping[str, WorkerInfo],
        trust: ssl.SSLContext | None = None,
    ) -> dict[str, WorkerReport]:
        """Return the reports of those that answered."""
        asked = [
            (name, info.url)
            for name, info in sorted(workers.items())
            if is_a_workers(info.url, namespace, name)
        ]
        if len(asked) < len(workers):
            log.debug("%s: %d workers have no address", namespace, len(workers) - len(asked))
        headers, budget = dict(self._authorization()), _Pass(len(asked))
        found = await asyncio.gather(
            *(
                self._report(f"{url}/v1/{namespace}", name, headers, trust, budget)
                for name, url in asked
            )
        )
        self._too_large.pop(namespace, None)
        if budget.too_large:
            self._too_large[namespace] = frozenset(budget.too_large)
        return {
            name: report
            for (name, _), report in zip(asked, found, strict=True)
            if report is not None
        }

    async def _report(
        self,
        url: str,
        name: str,
        headers: Mapping[str, str],
        trust: ssl.SSLContext | None,
        budget: _Pass,
    ) -> WorkerReport | None:
        try:
            async with budget.slots:
                body = await self._fetch(url, headers, trust, budget)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            log.debug("%s gave no report: %r", name, error)
            return None
        except _TooMuch as error:
            log.warning("the report of %s is not taken: %s", name, error)
            budget.too_large.add(name)
            return None
        report = read_report(body)
        if report is None:
            log.warning("the report of %s cannot be read", name)
            return None
        return report if report.worker else msgspec.structs.replace(report, worker=name)

    async def _fetch(
        self, url: str, headers: Mapping[str, str], trust: ssl.SSLContext | None, budget: _Pass
    ) -> bytes:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
                max_line_size=65_536,
                # What is packed could be any number of bytes.
                auto_decompress=False,
                headers={"Accept-Encoding": "identity"},
            )
        body = bytearray()
        try:
            async with self._session.get(
                url, headers=headers, ssl=trust or True, allow_redirects=False
            ) as answer:
                if answer.status != 200:
                    raise aiohttp.ClientError(f"{answer.status} instead of a report")
                async for chunk in answer.content.iter_any():
                    if len(body) + len(chunk) > REPORT_BYTES_MAX:
                        raise _TooMuch(f"a report may have {REPORT_BYTES_MAX} bytes")
                    budget.take(len(chunk))
                    body += chunk
            budget.take(OBJECT_BYTES * (body.count(b"{") + body.count(b"[")))
        except BaseException:
            budget.give_back(len(body))
            raise
        return bytes(body)
