"""Gives all tqdm progress bars, ours and those of libraries, a lock for threads only.

By default tqdm creates a lock that processes can share. Where Python does not fork, a helper
process tracks that lock, and prints that it leaked when ours is killed, as by a second Ctrl-C.
"""

from __future__ import annotations

import threading


def share_bars_between_threads() -> None:
    """Set tqdm's lock; call this before the process draws its first bar.

    A lock between threads is enough, because only one of our processes draws bars."""
    from tqdm import tqdm

    if not hasattr(tqdm, "_lock"):
        tqdm.set_lock(threading.RLock())
