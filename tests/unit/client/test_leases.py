"""What a consumer holds, step by step."""

from dataclasses import dataclass

import pytest

from tidewater.leases import Held, Lease, Stage, room
from tidewater.origin import parse_url

HERE = parse_url("http://here")


@dataclass(frozen=True)
class Item:
    leases: tuple[Lease, ...]
    nbytes: int = 10


def item(*offsets: int, now: float = 0.0, lease: str = "1", due: float = 10.0) -> Item:
    return Item(tuple(Lease(f"{o}.{lease}", (0, o), HERE, now, now + due) for o in offsets))


def held(*items: Item, held_s_max: float = 100.0) -> Held[Item]:
    found: Held[Item] = Held(held_s_max)
    assert found.add(items, 0.0) == []
    return found


def state(found: Held[Item]) -> tuple[int, int, int]:
    return found.buffered, found.out, found.buffered_bytes


def test_from_the_buffer_to_the_program_to_the_server() -> None:
    found = held(item(0), item(1), item(2))
    assert state(found) == (3, 0, 30)
    first, second = found.take(2, now=1.0)
    assert state(found) == (1, 2, 10)
    assert found.settle(first.leases, ack=True) == list(first.leases)
    assert found.settle(first.leases, ack=True) == [], "once"
    assert found.settle(second.leases, ack=False) == list(second.leases)
    assert state(found) == (1, 0, 10)


def test_what_ended_in_the_buffer_is_not_handed_out() -> None:
    found = held(item(0, due=1.0), item(1, due=5.0))
    assert [i.leases[0].at for i in found.take(5, now=2.0)] == [(0, 1)]
    assert state(found) == (0, 1, 0)


def test_what_is_extended_and_what_not() -> None:
    found = held(item(0, due=4.0), item(1, due=8.0), item(2, due=4.0), held_s_max=50.0)
    (first,) = found.take(1, now=0.0)
    assert sorted(lease.at[1] for lease in found.due(2.0, margin_s=2.0)) == [0, 2]
    found.extended(first.leases, due=12.0)
    assert sorted(lease.at[1] for lease in found.due(2.0, margin_s=2.0)) == [2]
    found.settle(first.leases, ack=True)
    assert sorted(lease.at[1] for lease in found.due(11.0, margin_s=2.0)) == [1, 2]
    assert found.due(51.0, margin_s=2.0) == [], "held too long"


@pytest.mark.parametrize("stage", [Stage.BUFFERED, Stage.OUT])
def test_a_second_delivery_of_what_is_here_stands_for_the_first(stage: Stage) -> None:
    found = held(item(0))
    if stage is Stage.OUT:
        found.take(1, now=0.0)
    assert found.add([item(0, now=5.0, lease="2")], now=5.0) == []
    assert state(found)[:2] == ((1, 0) if stage is Stage.BUFFERED else (0, 1))
    (lease,) = found.due(14.0, margin_s=2.0)
    assert lease.ack_id == "0.2"


def test_a_second_delivery_of_what_is_acknowledged_is_acknowledged_too() -> None:
    found = held(item(0))
    (first,) = found.take(1, now=0.0)
    found.settle(first.leases, ack=True)
    (again,) = found.add([item(0, lease="2")], now=1.0)
    assert again.ack_id == "0.2"
    assert state(found) == (0, 0, 0)
    found.told([again])
    assert found.add([item(0, lease="3")], now=1.0) == []
    assert state(found) == (1, 0, 10), "a replay, by somebody's wish"


def test_what_was_given_back_comes_again() -> None:
    found = held(item(0))
    (first,) = found.take(1, now=0.0)
    found.settle(first.leases, ack=False)
    found.add([item(0, lease="2")], now=1.0)
    assert state(found) == (1, 0, 10)


def test_work_that_takes_too_long_does_not_keep_its_message() -> None:
    found = held(item(0), held_s_max=3.0)
    (stuck,) = found.take(1, now=0.0)
    found.add([item(0, now=4.0, lease="2")], now=4.0)
    assert state(found) == (1, 0, 10)
    assert stuck.leases[0].stage is Stage.LOST
    assert found.settle(stuck.leases, ack=True) == list(stuck.leases), "told all the same"
    (second,) = found.take(1, now=5.0)
    assert second.leases[0].ack_id == "0.2"


def test_deliveries_that_are_over() -> None:
    found = held(item(0), item(1))
    (out,) = found.take(1, now=0.0)
    everything = found.due(9.0, margin_s=5.0)
    assert found.lost(everything) == 1
    assert state(found) == (0, 1, 10), "the program still works on it"
    assert found.take(5, now=0.0) == []
    assert found.due(9.0, margin_s=5.0) == []
    assert found.settle(out.leases, ack=True) == list(out.leases), "it may still count"


def test_closing_lets_go_of_the_buffer() -> None:
    found = held(item(0), item(1, 2, 3))
    found.take(1, now=0.0)
    found.clear()
    assert state(found) == (0, 1, 0)
    assert found.take(5, now=0.0) == []


@pytest.mark.parametrize(
    ("prefetch", "waiting", "bytes_max", "mean", "expected"),
    [
        (10, 0, 1_000, 10.0, 7),
        (3, 0, 1_000, 10.0, 0),
        (0, 0, 1_000, 10.0, 0),
        (0, 5, 1_000, 10.0, 2),
        (100, 0, 50, 10.0, 2),
        (100, 0, 30, 10.0, 0),
        (100, 0, 31, 10.0, 1),
        (100, 0, 1_000, 0.0, 97),
    ],
)
def test_room(prefetch: int, waiting: int, bytes_max: int, mean: float, expected: int) -> None:
    found = held(item(0), item(1), item(2))
    assert room(prefetch, waiting, found, bytes_max, mean) == expected
