"""Three workers × three consumers × seven subscriptions, under trouble of every kind (G3, G4, G5).

Kills, hand-overs, a store that is away, somebody else who rewrites the table. `make chaos` does the
same for ten minutes.
"""

from pathlib import Path

import pytest

from tidewater_testing.chaos.run import Chaos

SECONDS = 12.0
MESSAGES = 60


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("store", "seed"), [("sqlite", 241)])
def test_nothing_is_lost_doubled_or_out_of_order(tmp_path: Path, store: str, seed: int) -> None:
    outcome = Chaos(tmp_path, seed=seed, seconds=SECONDS, store=store, messages_min=MESSAGES).run()
    assert not outcome.found, outcome.told()
    assert len(outcome.history.produced) >= MESSAGES, outcome.told()
    assert sum(outcome.events.values()) >= 3, outcome.told()
