"""`kill -9` at random moments around appends, saves and collects; then everything is as saved.

KILLS=50 python -m pytest -m slow tests/replay/test_kill.py tests/agent/test_kill.py
"""

import os
import pickle
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from replay.inspect import inspect

ROOT = Path(__file__).parents[2]
KILLS = int(os.environ.get("KILLS", "10"))

WRITER = """
import os, pickle, sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from conftest import Counter

folder = Path(sys.argv[1])
counter = Counter(folder / "replay", images=True)
replay = counter.make(streams=3, capacity=5000)
if (folder / "state").exists():
    replay.restore(pickle.loads((folder / "state").read_bytes()))
while True:
    for _ in range(150):
        counter.add(replay, [n % 3 for n in range(replay.added % 3 + 1)])
    replay.flush()
    state = replay.state()
    (folder / "writing").write_bytes(pickle.dumps(state))
    os.rename(folder / "writing", folder / "state")
    replay.collect([state])
    print("saved", flush=True)
"""


@pytest.mark.slow
def test_after_kill_9_the_replay_is_what_the_state_says(image_counter):
    moment = random.Random(0)
    folder = image_counter.folder.parent
    paths = [str(Path(__file__).parent), str(ROOT)]
    added = 0
    for kill in range(KILLS):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder), *paths], stdout=subprocess.PIPE
        )
        assert writer.stdout.readline() == b"saved\n"
        time.sleep(moment.uniform(0, 0.7))
        writer.kill()
        writer.wait()
        writer.stdout.close()
        assert not inspect(image_counter.folder).problems, kill
        state = pickle.loads((folder / "state").read_bytes())
        replay = image_counter.make(streams=3, capacity=5000)
        replay.restore(state)
        assert sum(state["count"]) == replay.added > added, kill
        added = replay.added
        for stream in range(3):
            start, end = 32 * replay.first[stream], replay.count[stream]
            image_counter.check(replay, replay.locate([(stream, start)], end - start))
        replay.close()
        assert not any("unfinished" in line for line in inspect(image_counter.folder).lines)
