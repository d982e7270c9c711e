"""What no client of ours sends: parsers and a live service (see `support.fuzz_messages`, which can go on for hours)."""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path

import pytest
from support.fuzz_messages import LiveService, fuzz_parsers

FUZZ = os.environ.get("PERDURE_FUZZ") == "1"
SEEDS = [random.randrange(2**32)] if FUZZ else [1, 2]
CHOSEN = pytest.mark.parametrize("seed", SEEDS, ids=range(len(SEEDS)))  # the same names in each of pytest's processes


@CHOSEN
def test_parsers_refuse_with_typed_errors(seed: int) -> None:
    rng, tally = random.Random(seed), Counter[str]()
    for _ in range(50_000 if FUZZ else 2_000):
        fuzz_parsers(rng, tally)
    assert tally["well-formed"] > tally["decoded"] // 50
    assert tally["refused"] > tally["decoded"] // 4


@CHOSEN
def test_a_live_service_outlives_hostile_clients(tmp_path: Path, seed: int) -> None:
    rng, tally = random.Random(seed), Counter[str]()
    with LiveService(tmp_path / "s") as service:
        for _ in range(4_000 if FUZZ else 100):
            service.attack(rng, tally)
        service.look()
    assert tally["failed ProtocolError"] > 20
    assert tally["answer Answered"] > 5
