"""Tidewater's Python client.

from tidewater import Client

with Client("http://127.0.0.1:8080") as client:
client.producer("default/quickstart").send(b"hello")
with client.consumer("default/quickstart", "billing") as consumer:
for message in consumer:
print(message.value)
message.ack()
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidewater.batching import BatchOptions as BatchOptions
    from tidewater.client import AsyncClient as AsyncClient
    from tidewater.client import Client as Client
    from tidewater.consumer import Consumer as Consumer
    from tidewater.consumer_async import AsyncConsumer as AsyncConsumer
    from tidewater.credentials import SERVICE_ACCOUNT as SERVICE_ACCOUNT
    from tidewater.credentials import TokenFile as TokenFile
    from tidewater.deliveries import ArrowDelivery as ArrowDelivery
    from tidewater.deliveries import Delivery as Delivery
    from tidewater.errors import Conflict as Conflict
    from tidewater.errors import Corrupt as Corrupt
    from tidewater.errors import Fenced as Fenced
    from tidewater.errors import Forbidden as Forbidden
    from tidewater.errors import Invalid as Invalid
    from tidewater.errors import NotFound as NotFound
    from tidewater.errors import OutcomeUnknown as OutcomeUnknown
    from tidewater.errors import Overloaded as Overloaded
    from tidewater.errors import Retryable as Retryable
    from tidewater.errors import TidewaterError as TidewaterError
    from tidewater.errors import TooLarge as TooLarge
    from tidewater.errors import Unauthenticated as Unauthenticated
    from tidewater.errors import Unsupported as Unsupported
    from tidewater.producer import Producer as Producer
    from tidewater.producer_async import AsyncProducer as AsyncProducer
    from tidewater.pulling import ConsumerOptions as ConsumerOptions
    from tidewater.reader import AsyncReader as AsyncReader
    from tidewater.reader import Reader as Reader
    from tidewater.retry import RetryPolicy as RetryPolicy
    from tidewater.settling import Tally as Tally
    from tidewater.wire import Ack as Ack
    from tidewater.wire import Gap as Gap
    from tidewater.wire import Message as Message
    from tidewater.wire import Page as Page
    from tidewater.wire import Produced as Produced
    from tidewater.wire import Received as Received

_HOME = {
    "BatchOptions": "batching",
    "Client": "client",
    "AsyncClient": "client",
    "AsyncConsumer": "consumer_async",
    "Consumer": "consumer",
    "ConsumerOptions": "pulling",
    "SERVICE_ACCOUNT": "credentials",
    "TokenFile": "credentials",
    "ArrowDelivery": "deliveries",
    "Delivery": "deliveries",
    "AsyncProducer": "producer_async",
    "Producer": "producer",
    "AsyncReader": "reader",
    "Reader": "reader",
    "RetryPolicy": "retry",
    "Tally": "settling",
    "Ack": "wire",
    "Gap": "wire",
    "Message": "wire",
    "Page": "wire",
    "Produced": "wire",
    "Received": "wire",
    "Conflict": "errors",
    "Corrupt": "errors",
    "Fenced": "errors",
    "Forbidden": "errors",
    "Invalid": "errors",
    "NotFound": "errors",
    "OutcomeUnknown": "errors",
    "Overloaded": "errors",
    "Retryable": "errors",
    "TidewaterError": "errors",
    "TooLarge": "errors",
    "Unauthenticated": "errors",
    "Unsupported": "errors",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is used: the command starts without loading the client."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"tidewater.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    """Name what there is, for shells that complete."""
    return sorted(_HOME)
