"""What a Flight client may name."""

import pytest

from tidewater_core.errors import Invalid
from tidewater_worker.flight.tickets import Follow, Put, Ticket, follow_of, note_of, put_of


@pytest.mark.parametrize(
    ("text", "ticket"),
    [
        (b"shop/orders@0:100-200", Ticket("shop", "orders", 0, 100, 200)),
        (b"shop/orders@12:100-", Ticket("shop", "orders", 12, 100, None)),
        (b"shop/orders@0:-200", Ticket("shop", "orders", 0, None, 200)),
        (b"shop/orders@0:-", Ticket("shop", "orders", 0)),
        (b"shop/orders@0:", Ticket("shop", "orders", 0)),
        (b"shop/orders@0:5-5", Ticket("shop", "orders", 0, 5, 5)),
        (b"shop/orders@0:5-?columns=a,b_c", Ticket("shop", "orders", 0, 5, None, ("a", "b_c"))),
        (b"shop/orders@0:-?columns=", Ticket("shop", "orders", 0, columns=())),
        (
            b"shop/orders@0:-9?columns=value&isolation=committed",
            Ticket("shop", "orders", 0, None, 9, ("value",), True),
        ),
    ],
)
def test_tickets(text: bytes, ticket: Ticket) -> None:
    assert Ticket.parse(text) == ticket
    assert Ticket.parse(str(ticket).encode()) == ticket


@pytest.mark.parametrize(
    "text",
    [
        b"", b"shop/orders", b"shop@0:1-2", b"shop/orders@x:1-2", b"shop/orders@0:2-1",
        b"shop/orders@0:1-2 ", b"shop/orders@0:1", b"../orders@0:1-2", b"\xff" * 50,
        b"shop/orders@0:-" + b"9" * 400, b"shop/orders@-1:0-1",
        b"shop/orders@0:-?rows=1", b"shop/orders@0:-?isolation=none",
    ],
)  # fmt: skip
def test_what_is_no_ticket(text: bytes) -> None:
    with pytest.raises(Invalid):
        Ticket.parse(text)


def test_where_a_put_goes() -> None:
    assert put_of([b"shop", b"orders"], None) == Put("shop/orders")
    assert put_of([b"shop/orders"], None) == Put("shop/orders")
    told = put_of([], b'{"topic":"shop/orders","producer":"p","sequence":4,"ack":"table"}')
    assert (told.producer, told.sequence, told.ack) == ("p", 4, "table")
    for path, command in (([], b"{}"), ([b"shop"], None), ([b"a", b"b", b"c"], None), ([], b"x")):
        with pytest.raises(Invalid):
            put_of(path, command)


def test_what_is_followed() -> None:
    assert follow_of([b"shop", b"orders"], None) == Follow("shop/orders")
    assert follow_of([], b"shop/orders@2:50-") == Follow("shop/orders", 2, 50, "earliest")
    assert follow_of([], b'{"topic":"shop/orders","position":"earliest"}').position == "earliest"
    with pytest.raises(Invalid):
        follow_of([], b"shop/orders@2:50-60")


def test_notes_of_a_batch() -> None:
    assert note_of(b'{"sequence":7}').sequence == 7
    for bad in (b"7", b'{"sequence":-1}', b'{"seq":1}', b"\xff"):
        with pytest.raises(Invalid):
            note_of(bad)
