"""Tidewater's Python client.

from tidewater import Client

with Client("http://127.0.0.1:8080") as client:
ack = client.producer("default/quickstart").send(b"hello")
page = client.reader("default/quickstart").page(ack.partition, ack.offset)
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidewater.client import Client as Client
    from tidewater.producer import AsyncProducer as AsyncProducer
    from tidewater.producer import Producer as Producer
    from tidewater.reader import AsyncReader as AsyncReader
    from tidewater.reader import Reader as Reader
    from tidewater.retry import RetryPolicy as RetryPolicy
    from tidewater.wire import Ack as Ack
    from tidewater.wire import Message as Message
    from tidewater.wire import Page as Page
    from tidewater.wire import Produced as Produced
    from tidewater.wire import Received as Received

_HOME = {
    "Client": "client",
    "AsyncProducer": "producer",
    "Producer": "producer",
    "AsyncReader": "reader",
    "Reader": "reader",
    "RetryPolicy": "retry",
    "Ack": "wire",
    "Message": "wire",
    "Page": "wire",
    "Produced": "wire",
    "Received": "wire",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is used: the command starts without loading the client."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"tidewater.{_HOME[name]}"), name)
