"""What a window's memory was for, by torch's own classification: parameters, gradients, activations and so on."""

from __future__ import annotations

import gzip
import tempfile
from pathlib import Path

from loguru import logger
from torch.profiler._memory_profiler import MemoryProfileTimeline
from torch.profiler.profiler import _KinetoProfile

from instrument.capture.categories import file_of


def write(profile: _KinetoProfile, folder: Path) -> None:
    """Write two files for each device, as torch's `export_memory_timeline` does, while torch has the recording still.

    The one holds the bytes of each category over time, the other every change. Cost: 0.1 to 0.2 ms for each operator of
    the window, in which Python is busy. What fails here costs these files and is logged.
    """
    try:
        timeline = MemoryProfileTimeline(profile._memory_profile())
        for device in sorted({str(key.device) for _, _, (key, _), _ in timeline.timeline}):
            timeline.export_memory_timeline(str(folder / file_of(device)), device)
            with tempfile.TemporaryDirectory() as unpacked:
                raw = Path(unpacked, "raw.json")
                timeline.export_memory_timeline_raw(str(raw), device)
                packed = gzip.compress(raw.read_bytes(), 1)
            (folder / file_of(device, raw=True)).write_bytes(packed)
    except Exception as error:  # of torch's, which says itself that not all recordings can be classified
        logger.warning("torch cannot tell the window's memory by category ({}); the rest is kept.", error)
