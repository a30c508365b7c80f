"""Writes how much memory each of torch's categories, such as gradients, uses in a window."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path

from torch.profiler.profiler import _KinetoProfile

from instrument.base.errors import reason_of
from instrument.base.files import MEMORY_CATEGORIES_FILES, memory_categories_file
from instrument.base.log import logger


def write(profile: _KinetoProfile, folder: Path) -> None:
    """Write two files for each device, as torch's `export_memory_timeline` does.

    One holds the bytes of each category over time, the other every change of these bytes. Call this
    while torch still holds the recording. An error is logged, and the files are then removed. Cost:
    0.2 to 0.3 ms per operator of the window, with the GIL held.
    """
    try:
        # imported here, because a later version of torch will not have this module
        from torch.profiler._memory_profiler import MemoryProfileTimeline

        timeline = MemoryProfileTimeline(profile._memory_profile())
        for device in sorted({str(key.device) for _, _, (key, _), _ in timeline.timeline}):
            timeline.export_memory_timeline(str(folder / memory_categories_file(device)), device)
            plain, packed = folder / ".raw.json", folder / memory_categories_file(device, raw=True)
            timeline.export_memory_timeline_raw(str(plain), device)
            with plain.open("rb") as source, gzip.open(packed, "wb", compresslevel=1) as target:
                shutil.copyfileobj(source, target)
            plain.unlink()
    except Exception as error:  # torch documents that it cannot classify all recordings
        for half in (*folder.glob(MEMORY_CATEGORIES_FILES), folder / ".raw.json"):
            half.unlink(missing_ok=True)
        logger.warning(
            "torch cannot classify the window's memory: {}. The rest of the capture is kept.",
            reason_of(error),
        )
