"""The client, a worker with TLS, and tokens: as text, in a file that changes, and wrong ones."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tidewater import (
    AsyncClient,
    Client,
    ConsumerOptions,
    Forbidden,
    Retryable,
    RetryPolicy,
    Unauthenticated,
)
from tidewater_core.security import TlsSettings
from tidewater_testing.parts.kubernetes import Account, Reviews, Role
from tidewater_testing.parts.secured import SecuredWorker
from tidewater_testing.parts.worker import topic_manifest
from tidewater_testing.subscriptions import subscription_manifest

ROLES = [
    Role("producer", ("produce",), ("topics",), "shop"),
    Role("consumer", ("consume",), ("topics", "subscriptions"), "shop"),
]
ACCOUNTS = {f"{role.user}-token": Account(role.user) for role in ROLES}
TOPIC = "shop/orders"


@pytest.fixture(scope="module")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reviews]:
    with Reviews(tmp_path_factory.mktemp("api"), ACCOUNTS, ROLES) as part:
        yield part


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory, reviews: Reviews) -> Iterator[SecuredWorker]:
    pair = reviews.authority.sign("worker")
    manifests = [topic_manifest(TOPIC), subscription_manifest("shop/billing", "orders")]
    with SecuredWorker(
        tmp_path_factory.mktemp("worker"),
        manifests,
        auth=reviews.settings(),
        tls=TlsSettings(cert=pair.cert, key=pair.key, ca=reviews.authority.ca),
    ) as part:
        yield part


async def test_who_may_and_who_may_not(
    worker: SecuredWorker, reviews: Reviews, tmp_path: Path
) -> None:
    url, ca = f"https://{worker.address}", str(reviews.authority.ca)
    with Client(url, token="producer-token", ca=ca) as client:
        with client.producer(TOPIC) as producer:
            producer.send(b"one")
            producer.post(b"two")
        with pytest.raises(Forbidden), client.consumer(TOPIC, "billing") as mine:
            mine.receive(5)
    path = tmp_path / "token"
    path.write_text("consumer-token\n")
    for sockets in (True, False):
        options = ConsumerOptions(socket=sockets)
        with (
            Client(url, token=path, ca=ca) as client,
            client.consumer(TOPIC, "billing", options) as consumer,
        ):
            message = consumer.receive(10)
            assert message is not None
            message.ack()
            consumer.flush()
            with pytest.raises(Forbidden):
                client.producer(TOPIC).send(b"no")
    async with (
        AsyncClient(url, token="producer-token", ca=ca) as client_async,
        client_async.producer(TOPIC) as producer_async,
    ):
        assert (await producer_async.send(b"three")).count == 1
    with Client(url, token="nobody", ca=ca) as client, pytest.raises(Unauthenticated):
        client.producer(TOPIC).send(b"no")
    with Client(url, token="producer-token") as client, pytest.raises(Retryable, match="CERT"):
        client.producer(TOPIC, retry=RetryPolicy(attempts_max=1)).send(b"nobody vouches for it")
