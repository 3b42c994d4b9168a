"""Atari games through the Arcade Learning Environment, by the two conventions of the field.

`atari_` (Machado et al. 2018): sticky actions (each frame repeats the last action with probability
0.25) and all 18 actions. `atari100k_` (Kaiser et al. 2020): no sticky actions, the game's own
actions, 0 to 30 frames of doing nothing at the start. In both, the last two frames of an action are
merged by their maximum, losing a life is no end, and 108,000 frames end an episode as a truncation.
"""

from __future__ import annotations

import gymnasium
import numpy as np

from envs import env as steps
from envs.env import Space, Step

SIZE = 64
FRAMES = 108_000
STICKY = 0.25
NOOPS = 30
ATARI_100K = (
    *("alien", "amidar", "assault", "asterix", "bank_heist", "battle_zone", "boxing", "breakout"),
    *("chopper_command", "crazy_climber", "demon_attack", "freeway", "frostbite", "gopher", "hero"),
    *("jamesbond", "kangaroo", "krull", "kung_fu_master", "ms_pacman", "pong", "private_eye"),
    *("qbert", "road_runner", "seaquest", "up_n_down"),
)


def games() -> list[str]:
    """The games of the package; its table in tasks.tsv serves without it.

    Of the cartridges that it brings, four play with two only and end the process when loaded.
    """
    import ale_py

    gymnasium.register_envs(ale_py)
    found = [spec for spec in gymnasium.registry.values() if spec.namespace == "ALE"]
    return sorted({spec.kwargs["game"] for spec in found})


class Atari:
    """image (64, 64, 3). `env_steps` are frames, those of doing nothing at the start too."""

    def __init__(self, game: str, repeat: int, small: bool):
        """`repeat` frames an action; `small`: the rules of Atari 100k."""
        import ale_py
        import cv2

        cv2.setNumThreads(1)
        self.cv2, self.repeat, self.small = cv2, repeat, small
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        self.rom = ale_py.roms.get_rom_path(game)
        self.ale = ale_py.ALEInterface()
        self.ale.setFloat("repeat_action_probability", 0.0 if small else STICKY)
        self.ale.setInt("max_num_frames_per_episode", FRAMES)
        self.load(0)
        every, own = self.ale.getLegalActionSet(), self.ale.getMinimalActionSet()
        self.actions = own if small else every
        self.screens = np.zeros((2, *self.ale.getScreenDims(), 3), np.uint8)
        self.obs_space = {"image": Space("image", (SIZE, SIZE, 3))}
        self.act_space = Space("discrete", (1,), (len(self.actions),))
        self.done = True

    def load(self, seed: int) -> None:
        """Start the game; only this (65 ms) puts the emulator's random numbers to the seed's."""
        self.ale.setInt("random_seed", seed % 2**31)
        self.ale.loadROM(self.rom)

    def reset(self, seed: int) -> Step:
        self.load(int(seed))
        self.ale.reset_game()
        waited = int(np.random.default_rng(seed).integers(NOOPS + 1)) if self.small else 0
        for _ in range(waited):
            self.ale.act(0)
        self.done = False
        self.screens[0] = 0
        self.ale.getScreenRGB(self.screens[1])
        return {**steps.first(self.observation()), "env_steps": waited}

    def step(self, action: np.ndarray) -> Step:
        assert not self.done, "step after is_last: reset first"
        reward, taken = 0.0, 0
        while taken < self.repeat and not self.done:
            reward += self.ale.act(self.actions[int(action[0])])
            taken += 1
            self.done = self.ale.game_over()
            self.screens[0] = self.screens[1]
            self.ale.getScreenRGB(self.screens[1])
        # A truncation is a game that is over for the emulator, but was not lost.
        lost = self.done and not self.ale.game_truncated()
        return steps.flagged(
            self.observation(), reward, is_last=self.done, is_terminal=lost, env_steps=taken
        )

    def observation(self) -> dict[str, np.ndarray]:
        merged = self.screens.max(0)
        shape = (SIZE, SIZE)
        return {"image": self.cv2.resize(merged, shape, interpolation=self.cv2.INTER_AREA)}

    def close(self) -> None:
        pass
