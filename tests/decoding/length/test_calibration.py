"""The chance that a draft is accepted, learned from what the drafter says of it."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_trt.decoding.length.calibration import Calibration, log_odds


@pytest.mark.parametrize("truth", [-3.0, 0.0, 2.5])
def test_calibration_finds_the_chance_behind_what_is_said(truth: float) -> None:
    rng, calibration = np.random.default_rng(1), Calibration(3)
    said = np.full((1, 3), 1.5)
    chance = 1 / (1 + np.exp(-truth))
    for _ in range(600):
        right = rng.random(3) < chance
        accepted = int(np.cumprod(right).sum())
        calibration.observe(said, np.array([accepted]), np.array([3]), 1)
    assert calibration.survival(said)[0, 0] == pytest.approx(chance, abs=0.08)


def test_calibration_learns_where_a_block_ends() -> None:
    calibration = Calibration(5)
    said = np.full((1, 5), 2.0)
    for _ in range(60):
        calibration.observe(said, np.array([2]), np.array([5]), 1)
    survival = calibration.survival(said)[0]
    assert survival[1] > 0.75
    assert survival[2] < 0.15


def test_log_odds_of_certain_and_impossible_drafts_are_finite() -> None:
    x = log_odds(np.array([[0.0, -1e-9, -0.6931472, -50.0, -np.inf]], np.float32))
    assert x[0].tolist() == pytest.approx([6.0, 6.0, 0.0, -6.0, -6.0], abs=1e-5)
