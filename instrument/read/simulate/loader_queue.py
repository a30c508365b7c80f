"""`loader_queue`: when worker processes of a data loader have each batch ready, and why.

A loader of torch keeps `workers` times `prefetch_factor` batches in flight: when the program takes
a batch, the next free number goes to the worker whose turn it is. So batch k is ready some time
(the *load* of the batch) after the later of two moments: its worker has finished batch
k - `workers`, and the program has taken batch k - `workers * prefetch_factor`.

The trace has only the calls that take a batch. How long a worker needs is known where such a call
waited. A call takes up to 10 ms longer without a wait for the worker: Python's lock passes between
threads of the worker every 5 ms, and one of them must answer for each tensor.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from instrument.read.trace.capture_json import Loader
from instrument.read.trace.events import Flags, Ints

#: torch's own default.
PREFETCH_FACTOR = 2
# The program waited for a batch if the call took longer than this time plus twice the shortest
# such call, and waited for 10 ms or a quarter of the time between two batches.
_READY_NS, _LATE_NS, _LATE_SHARE = 200_000, 10_000_000, 0.25
# The workers limit the program if it waits for at least half of the rounds of all workers. Then
# each batch takes as long; otherwise only those that were late.
_LEAST_ROUNDS = 0.5
# Without the loader's settings, the distance of the waits is the number of workers, up to this one.
_MOST_WORKERS = 8


class LoaderQueue(NamedTuple):
    """The batches of a loader, in the order in which the program takes them.

    `ahead` batches are in flight. A call that does not wait takes `own_ns`. `load_ns` is how long
    its worker needs for each batch; it is not known for the first ones.
    """

    workers: int
    ahead: int
    own_ns: int
    is_awaited: Flags
    ready_ns: Ints
    load_ns: Ints


def loader_queue(
    begin_ns: int, start_ns: Ints, end_ns: Ints, loader: Loader | None
) -> LoaderQueue | None:
    """Find the load of each batch; None if no call waits for the workers.

    The trace begins at `begin_ns`. The calls that take a batch are sorted by time. `loader` has the
    settings of the loader, if they are known.
    """
    count, lasts = len(start_ns), end_ns - start_ns
    if count < 2:
        return None
    own_ns = int(lasts.min())
    late_ns = min(_LATE_NS, _LATE_SHARE * float(np.median(np.diff(end_ns))))
    late = (lasts > 2 * own_ns + _READY_NS) & (lasts - own_ns >= late_ns)
    places = np.flatnonzero(late)
    workers = loader.workers if loader else None
    if not workers:
        distance = int(np.median(np.diff(places))) if len(places) > 1 else 1
        workers = distance if distance <= _MOST_WORKERS else 1
    ahead = workers * ((loader and loader.prefetch_factor) or PREFETCH_FACTOR)
    rounds = places[places >= workers]
    is_limit = len(places) * workers >= _LEAST_ROUNDS * count and len(rounds) > 0
    usual_ns = int(np.median(end_ns[rounds] - end_ns[rounds - workers])) if is_limit else 0
    if not is_limit:
        # Batches that were ordered before the window: the trace does not show how long they took.
        late[:ahead] = False
    if not late.any():
        return None
    ready, loads = list[int](), list[int]()
    ends = end_ns.tolist()
    for k, (end, is_late) in enumerate(zip(ends, late.tolist())):
        before = k - workers
        if before < 0:
            ready.append(end if is_late else begin_ns)
            loads.append(0)
            continue
        # A worker whose first batch was not late is free when this batch is taken.
        begun = ready[before] if before >= workers or late[before] else ends[before]
        if k >= ahead:
            begun = max(begun, ends[k - ahead])
        load = end - begun if is_late else min(max(usual_ns, 1), end - begun)
        ready.append(begun + load)
        loads.append(load)
    return LoaderQueue(workers, ahead, own_ns, late, np.array(ready), np.array(loads))
