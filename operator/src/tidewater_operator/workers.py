"""Ask workers how they are. One that does not answer in time has said nothing."""

import asyncio
import logging
import ssl
from collections.abc import Callable, Mapping
from typing import Final

import aiohttp

from tidewater_coordination.port import WorkerInfo
from tidewater_operator.report import WorkerReport, read_report

TIMEOUT_S: Final = 3.0
AT_ONCE: Final = 32
REPORT_BYTES_MAX: Final = 64 * 1024 * 1024
log = logging.getLogger(__name__)


class Workers:
    """Fetches reports."""

    def __init__(self, authorization: Callable[[], Mapping[str, str]]) -> None:
        self._authorization = authorization
        self._session: aiohttp.ClientSession | None = None
        self._slots = asyncio.Semaphore(AT_ONCE)

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
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=TIMEOUT_S), max_line_size=65_536
            )
        asked = [(name, info) for name, info in workers.items() if info.url]
        found = await asyncio.gather(
            *(self._report(namespace, name, info.url, trust) for name, info in asked)
        )
        return {
            name: report
            for (name, _), report in zip(asked, found, strict=True)
            if report is not None
        }

    async def _report(
        self, namespace: str, name: str, url: str, trust: ssl.SSLContext | None
    ) -> WorkerReport | None:
        assert self._session is not None
        try:
            async with (
                self._slots,
                self._session.get(
                    f"{url}/v1/{namespace}",
                    headers=dict(self._authorization()),
                    ssl=trust or True,
                ) as answer,
            ):
                if answer.status != 200:
                    log.debug("%s answered %s to the question for its report", name, answer.status)
                    return None
                body = await answer.content.read(REPORT_BYTES_MAX)
                while not answer.content.at_eof() and len(body) < REPORT_BYTES_MAX:
                    body += await answer.content.read(REPORT_BYTES_MAX - len(body))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            log.debug("%s gave no report: %r", name, error)
            return None
        report = read_report(body)
        if report is None:
            log.warning("the report of %s cannot be read", name)
            return None
        return report if report.worker else _named(report, name)


def _named(report: WorkerReport, name: str) -> WorkerReport:
    return WorkerReport(
        worker=name,
        volume=report.volume,
        ready=report.ready,
        disk=report.disk,
        topics=report.topics,
        subscriptions=report.subscriptions,
    )
