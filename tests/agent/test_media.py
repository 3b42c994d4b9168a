"""Open-loop errors and norms by age, on numbers worked out by hand."""

import math

import pytest
import torch

from agent import media
from agent.ages import AGES, norm_by_age


def test_errors_by_hand():
    """One row whose pixels are its step number over 10; context 2, so horizon 1 is step 2."""
    length = 8
    truth = (torch.arange(length) / 10).view(1, length, 1, 1, 1)
    draws = torch.stack([truth + 0.1, truth - 0.1])
    errors = media.errors(truth, draws, 2)
    assert errors["openloop/model_1"] == pytest.approx(0.01)
    assert errors["openloop/expected_1"] == pytest.approx(0.0, abs=1e-12)
    assert errors["openloop/repeat_1"] == pytest.approx(0.01)  # step 2 against step 1
    assert errors["openloop/repeat_5"] == pytest.approx(0.25)  # step 6 against step 1
    assert errors["openloop/mean_5"] == pytest.approx(0.0625)  # step 6 against 3.5
    assert "openloop/model_15" not in errors


def test_norms_are_averaged_by_age():
    norms = torch.tensor([1.0, 3.0, 5.0, 7.0])
    ages = torch.tensor([0, 3, 4, 70], dtype=torch.int32)
    means = norm_by_age(norms, ages, "acting")
    assert means["x_norm/acting_from_0"] == 2
    assert means["x_norm/acting_from_4"] == 5
    assert means["x_norm/acting_from_64"] == 7
    assert math.isnan(means["x_norm/acting_from_16"])
    assert len(means) == len(AGES)


def test_norms_are_averaged_in_full_precision_and_apart():
    norms = torch.tensor([256.0, 257.0, torch.inf])
    with torch.autocast("cpu", torch.bfloat16):
        means = norm_by_age(norms, torch.tensor([0, 1, 4]), "acting")
    assert means["x_norm/acting_from_0"].item() == 256.5
    assert means["x_norm/acting_from_4"] == torch.inf
    assert math.isnan(means["x_norm/acting_from_16"])
    narrow = norm_by_age(torch.tensor([256.0, 258.0], dtype=torch.bfloat16), torch.zeros(2), "a")
    assert narrow["x_norm/a_from_0"].item() == 257
