"""Updates that are not finite: what is kept of them, and when they end a run."""

import numpy as np
import pytest
import torch

from agent.auto import fake_batch
from agent.learner import KeptBatches, Learner, NonFiniteError
from agent.update import Update
from configs.load import replace_flat
from envs.env import Space
from worldmodels.segments import Plan


def test_when_all_updates_are_left_out_the_run_ends(tiny, monkeypatch):
    monkeypatch.setattr("agent.learner.MOST_LEFT_OUT", 2)
    config = replace_flat(tiny(), {"optim.nonfinite": "skip"})
    update = Update(config, {"vector": Space("vector", (3,))}, Space("discrete", (1,), (3,)))
    learner = Learner(update, 0, "float32")
    batch = fake_batch(update, 2, 16)
    bad = {**batch, "reward": torch.full_like(batch["reward"], torch.nan)}
    learner.train(bad)
    learner.train(batch)
    learner.train(bad)
    with pytest.raises(NonFiniteError, match="2 updates in a row"):
        learner.train(bad)


def test_batches_of_bad_updates_are_kept_the_last_five(tmp_path):
    keep = KeptBatches(tmp_path / "nonfinite")
    for update in range(1, 8):
        reward, carry = torch.tensor([float(update)]), {"core": {"h": torch.ones(1)}}
        plan = Plan.of(np.zeros((1, 1), bool), np.zeros((1, 1), int), 3)
        said = keep(update, {"reward": reward, "carry": carry, "plan": plan})
    assert said == f"its batch is kept in {tmp_path / 'nonfinite' / '000000007.pt'}"
    files = sorted(path.name for path in (tmp_path / "nonfinite").iterdir())
    assert files == [f"00000000{update}.pt" for update in range(3, 8)]
    batch = torch.load(tmp_path / "nonfinite" / "000000005.pt", weights_only=True)
    assert (batch["reward"].item(), batch["carry"]["core"]["h"].item()) == (5.0, 1.0)
    (tmp_path / "file").touch()
    assert "could not be kept" in KeptBatches(tmp_path / "file" / "nonfinite")(1, batch)


def test_a_batch_that_a_full_disk_cuts_short_is_not_kept(tmp_path, monkeypatch):
    def full(content, path):
        path.write_bytes(b"half")
        raise RuntimeError("unexpected pos 64 vs 0")  # what PyTorch makes of it

    monkeypatch.setattr(torch, "save", full)
    said = KeptBatches(tmp_path)(1, {"reward": torch.ones(1)})
    assert said == "its batch could not be kept (unexpected pos 64 vs 0)"
    assert not list(tmp_path.iterdir())
