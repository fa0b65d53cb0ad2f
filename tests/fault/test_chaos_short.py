"""Three workers × three consumers × four types, under kills, pauses and hand-overs (G3, G4, G5).

`make chaos` does the same for ten minutes.
"""

from pathlib import Path

import pytest

from tidewater_testing.chaos.run import Chaos

SECONDS = 12.0


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("store", "seed"), [("sqlite", 11)])
def test_nothing_is_lost_doubled_or_out_of_order(tmp_path: Path, store: str, seed: int) -> None:
    outcome = Chaos(tmp_path, seed=seed, seconds=SECONDS, store=store).run()
    assert not outcome.found, outcome.told()
    assert len(outcome.history.produced) > 50, outcome.told()
    assert sum(outcome.events.values()) >= 3, outcome.told()
