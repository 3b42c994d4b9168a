"""What a run takes of the machine, for its metrics, and a warning before it runs out."""

from __future__ import annotations

import contextlib
import logging
import shutil
from pathlib import Path

import psutil
import torch

from envs import machine

log = logging.getLogger("agent")

# Free gigabytes under which a warning is given, and what can be done about it.
LEAST = {
    "usage/ram_free_gb": (1.0, "fewer environments (env.count) or a smaller replay.ram_gb"),
    "usage/disk_free_gb": (
        2.0,
        "free some: a run ends when it is full",
    ),
    "usage/vram_free_gb": (0.5, "a smaller batch.size, or model.chunk for images"),
}
AGAIN = 2.0  # a warning is given again once there were so many times as much in between


class Usage:
    def __init__(self, folder: Path, device: torch.device):
        self.folder, self.device = folder, device
        self.process = psutil.Process()
        self.warned: set[str] = set()

    def measure(self) -> dict[str, float]:
        """Gigabytes: of this process, of its children together (environments, evaluation), free for
        all, and on a GPU taken by tensors at their peak since the last call."""
        children = 0
        for child in self.process.children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it ended meanwhile
                children += child.memory_info().rss
        out = {
            "usage/ram_gb": self.process.memory_info().rss / 1e9,
            "usage/workers_ram_gb": children / 1e9,
            "usage/ram_free_gb": machine.free_ram() / 1e9,
            "usage/disk_free_gb": shutil.disk_usage(self.folder).free / 1e9,
        }
        if self.device.type == "cuda":
            out["usage/vram_gb"] = torch.cuda.max_memory_allocated(self.device) / 1e9
            # What PyTorch keeps for later tensors is free, too.
            kept = torch.cuda.memory_reserved(self.device)
            free = torch.cuda.mem_get_info(self.device)[0] + kept
            used = torch.cuda.memory_allocated(self.device)
            out["usage/vram_free_gb"] = (free - used) / 1e9
            torch.cuda.reset_peak_memory_stats(self.device)
        self.warn(out)
        return out

    def warn(self, measured: dict[str, float]) -> None:
        """Once each time that something gets scarce."""
        for name, (least, advice) in LEAST.items():
            free = measured.get(name)
            if free is None or free >= AGAIN * least:
                self.warned.discard(name)
            elif free < least and name not in self.warned:
                self.warned.add(name)
                what = name.removeprefix("usage/").removesuffix("_free_gb").upper()
                log.warning("%s is nearly used up: %.1f GB free; %s", what, free, advice)
