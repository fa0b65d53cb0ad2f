"""The judge of the chaos run is judged: each broken promise is seen, and nothing else."""

import pytest

from tidewater_testing.chaos.history import Ack, Delivery, History, Place, Story, violations
from tidewater_testing.chaos.schedule import Kind, plan

STORED = {0: [(0, "k-0"), (1, "k-1"), (2, "k-2")], 1: [(0, "j-0")]}


def delivery(place: Place, asked_at: float = 1.0, value: str | None = None) -> Delivery:
    key = "kj"[place[0]]
    return Delivery(place, key, value or f"{key}-{place[1]}", asked_at, "c")


def story(kind: str = "KeyShared") -> Story:
    """Make one in which everything is delivered and acknowledged as it should be."""
    places = [(0, 0), (1, 0), (0, 1), (0, 2)]
    return Story(
        kind,
        deliveries=[delivery(place, float(i)) for i, place in enumerate(places)],
        acks=[Ack(place, i + 0.2, i + 0.4) for i, place in enumerate(places)],
    )


def told(story_: Story) -> list[str]:
    produced = {
        (p, offset): ("kj"[p], value) for p, rows in STORED.items() for offset, value in rows
    }
    history = History(produced=produced, stories={"s": story_})
    return violations(history, STORED)


@pytest.mark.parametrize("kind", ["Exclusive", "Failover", "Shared", "KeyShared"])
def test_a_good_run_breaks_nothing(kind: str) -> None:
    assert told(story(kind)) == []


def test_a_message_that_never_came_is_lost() -> None:
    run = story("Shared")
    run.deliveries = [each for each in run.deliveries if each.place != (0, 1)]
    run.acks = [each for each in run.acks if each.place != (0, 1)]
    (line,) = told(run)
    assert line.startswith("G4 At least once: partition 0, offset 1 was never delivered")


def test_a_message_that_cannot_be_acknowledged_is_stuck() -> None:
    run = story("Shared")
    run.acks = [each for each in run.acks if each.place != (0, 1)]
    (line,) = told(run)
    assert "could never be acknowledged" in line


def test_after_its_ack_a_message_is_not_delivered() -> None:
    run = story("Shared")
    run.deliveries.append(delivery((0, 0), asked_at=0.5))
    (line,) = told(run)
    assert line.startswith("G4 At least once: partition 0, offset 0")
    assert "0.100 s after its ack was stored" in line


def test_a_pull_that_was_sent_before_the_ack_may_bring_it() -> None:
    run = story("Shared")
    run.deliveries.append(delivery((0, 0), asked_at=0.3))
    assert told(run) == []


def test_an_ack_without_an_answer_promises_nothing() -> None:
    run = story("Shared")
    run.acks[0] = Ack((0, 0), 0.2)
    run.deliveries.append(delivery((0, 0), asked_at=9.0))
    assert told(run) == []


@pytest.mark.parametrize(
    ("kind", "is_bad"), [("KeyShared", True), ("Exclusive", True), ("Shared", False)]
)
def test_the_order_of_first_deliveries(kind: str, is_bad: bool) -> None:
    run = story(kind)
    run.deliveries[2], run.deliveries[3] = run.deliveries[3], run.deliveries[2]
    lines = told(run)
    assert bool(lines) == is_bad
    assert all("in order: partition 0, offset 1 came after 2" in line for line in lines)


def test_the_order_of_acks() -> None:
    run = story("KeyShared")
    run.deliveries = [delivery(each.place, 0.0) for each in run.deliveries]
    run.acks[2], run.acks[3] = Ack((0, 1), 3.2, 3.4), Ack((0, 2), 2.2, 2.4)
    (line,) = told(run)
    assert "in order: partition 0, offset 2 was acknowledged before 1" in line
    run.acks.append(Ack((0, 1), 2.1))  # it was tried before: perhaps it was stored
    assert told(run) == []


def test_what_is_delivered_is_what_is_stored() -> None:
    run = story("Shared")
    run.deliveries.append(delivery((0, 0), 0.1, value="other"))
    (line,) = told(run)
    assert line.startswith("G3 One stream: partition 0, offset 0 was delivered as 'other'")


def test_a_filter_wants_its_own_and_nothing_else() -> None:
    run = story("Shared")
    run.prefix = "k"
    (line,) = told(run)
    assert line.startswith("G4 At least once: partition 1, offset 0 was delivered, which the fil")
    run.deliveries = [each for each in run.deliveries if each.key == "k"]
    assert told(run) == []
    run.deliveries.pop()
    (line,) = told(run)
    assert "partition 0, offset 2 was never delivered" in line


def test_an_offset_is_given_once() -> None:
    history = History()
    history.note_produced((0, 0), "k", "one")
    history.note_produced((0, 0), "k", "one")
    history.note_produced((0, 0), "k", "two")
    lines = violations(history, {0: [(0, "one")]})
    assert lines == ["G5 One owner: partition 0, offset 0 was given to 'one' and to 'two'"]


def test_gaps_and_doubles_in_a_partition() -> None:
    lines = violations(History(), {0: [(0, "a"), (2, "a")]})
    assert any("G3 One stream: partition 0 has 2 where 1 is expected" in line for line in lines)
    assert any(line.startswith("G8") for line in lines)


def test_a_seed_tells_one_story() -> None:
    names = ("a", "b", "c")
    assert plan(7, 600, names, 6) == plan(7, 600, names, 6)
    assert plan(7, 600, names, 6) != plan(8, 600, names, 6)
    events = plan(7, 600, names, 6)
    assert {event.kind for event in events} == set(Kind), "ten minutes have some of everything"
    assert [event.at_s for event in events] == sorted(event.at_s for event in events)
    assert plan(7, 60, names, 6) == [event for event in events if event.at_s < 60]
