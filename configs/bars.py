"""Owns the lock of tqdm's progress bars, ours and those of libraries: shared by threads alone.

By itself tqdm makes a lock that processes could share. Where Python does not fork, a helper process
watches such a lock, and prints that it leaked when ours is killed, as by a second Ctrl-C.
"""

from __future__ import annotations

import threading


def share_bars_between_threads() -> None:
    """Call before the process's first bar; no other process of ours draws any."""
    from tqdm import tqdm

    if not hasattr(tqdm, "_lock"):
        tqdm.set_lock(threading.RLock())
