"""A small Spark for the tests of the pipeline's jobs."""

import gc
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import pytest

from tidewater_core.settings import CatalogSettings
from tidewater_pipeline.report import Progress
from tidewater_pipeline.session import Session
from tidewater_pipeline.settings import SparkSettings
from tidewater_testing.process import wait_until

READY_S: Final = 60.0
HOUR_S: Final = 3_600.0
HOUR_LEFT_S: Final = 60.0
SPARK_MARKS: Final = (
    pytest.mark.slow,
    pytest.mark.java,
    pytest.mark.timeout(300),
    # pyspark leaves its sockets to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
)


def within_one_hour() -> None:
    """Wait for the next hour, if this one is about to end: tables have partitions by the hour."""
    left_s = HOUR_S - time.time() % HOUR_S
    if left_s < HOUR_LEFT_S:
        time.sleep(left_s + 0.5)


@contextmanager
def small_spark(
    catalog: CatalogSettings,
    is_ready: Callable[[], bool] | None = None,
    *,
    shuffle_partitions: int = 2,
    conf: Mapping[str, str] | None = None,
) -> Iterator[Session]:
    """Start Spark on a catalog: one core, a small heap, and a quick start above peak speed.

    Its start takes all cores, and a worker may lose its session by that: `is_ready` is waited for.
    """
    spark = SparkSettings(
        master="local[1]",
        driver_memory="700m",
        shuffle_partitions=shuffle_partitions,
        conf={
            "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
            **(conf or {}),
        },
    )
    session = Session(catalog, spark, Progress(quiet=True)).start()
    try:
        if is_ready is not None:
            wait_until(is_ready, READY_S, "the worker to be ready")
        yield session
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            session.stop()
            gc.collect()
