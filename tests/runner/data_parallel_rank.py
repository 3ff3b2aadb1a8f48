"""The ranks of `test_data_parallel.py`, a process each: random batches, collectives counted.

Like MoE layers, each pass contains collectives that carry the padded size, so a rank that runs one
pass more than the others, or another size, hangs or fails. Each rank prints one JSON line. Ranks
are forked from a process that has imported torch once; it runs one group after the other, each of
so many ranks and steps, and prints the exit codes, outputs and errors of their ranks.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
import os
import random
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slipstream.configs.graphs import CUDAGraphMode
from slipstream.runner.graphs.dispatch import descriptors, dispatch
from slipstream.runner.parallel.collectives import Collectives
from slipstream.runner.step.data_parallel import DataParallelSync

DRAFTS = 3
MAX_REQS, MAX_TOKENS, MAX_LEN = 8, 64, 200
GRAPHS = descriptors(
    CUDAGraphMode.FULL_AND_PIECEWISE, [1, DRAFTS + 1], (1, 2, 4, 8, 16, 32), MAX_REQS, MAX_TOKENS
)
DRAFT_GRAPHS = descriptors(CUDAGraphMode.FULL_DECODE_ONLY, [1], (1, 2, 4, 8), MAX_REQS, MAX_TOKENS)


def next_batch(rng: random.Random, lens: list[int]) -> tuple[int, int, int | None]:
    """A random step over requests that grow and end at MAX_LEN: (tokens, requests, uniform)."""
    if rng.random() < 0.3:
        return 0, 0, None  # idle
    while len(lens) < rng.randint(1, MAX_REQS):
        lens.append(rng.randint(1, MAX_LEN - 1))
    query_lens = []
    chunk = rng.random() < 0.2  # a prefill among them
    for index, length in enumerate(lens):
        wanted = rng.randint(1, 9) if chunk else DRAFTS + 1
        query_lens.append(min(wanted, MAX_LEN - length))  # fewer drafts near the end
        lens[index] += rng.randint(1, query_lens[-1])
    lens[:] = [length for length in lens if length < MAX_LEN]
    same = len(set(query_lens)) == 1 and not chunk
    return sum(query_lens), len(query_lens), query_lens[0] if same else None


def main(rank: int, size: int, rendezvous: str, steps: int) -> None:
    timeout = datetime.timedelta(seconds=20 if steps > 100 else 6)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size, timeout=timeout
    )
    host = Collectives(size, torch.device("cpu"))
    sync = DataParallelSync(functools.partial(dispatch, GRAPHS), DRAFTS + 1, rank, size, host)
    rng, lens = random.Random(1000 + rank), []
    passes, modes, seen = 0, {mode.name: 0 for mode in CUDAGraphMode}, hashlib.sha256()

    def run_pass(num_tokens: int) -> None:
        """A pass with one MoE collective. Its sum checks that all ranks sent the same size."""
        nonlocal passes
        passes += 1
        rows = torch.full((1,), num_tokens, dtype=torch.int64)
        dist.all_reduce(rows)
        expected = sum(agreement.num_tokens_across_dp) if target else num_tokens * size
        assert int(rows) == expected, (int(rows), expected)

    for _ in range(steps if rank or steps > 100 else steps + 1):  # a short run: rank 0 goes on
        batch = next_batch(rng, lens)
        agreement = sync.agree(*batch)
        desc = agreement.descriptor
        assert agreement.has_work or batch[0] == 0
        if not agreement.has_work:
            continue
        assert desc.num_tokens >= batch[0]
        assert agreement.num_tokens_across_dp[rank] == desc.num_tokens
        modes[desc.mode.name] += 1
        shared = (desc.mode.name, agreement.num_tokens_across_dp, agreement.num_draft_reqs)
        seen.update(repr(shared).encode())
        target = True
        run_pass(desc.num_tokens)  # target
        target = False
        draft = dispatch(DRAFT_GRAPHS, agreement.num_draft_reqs, agreement.num_draft_reqs, 1)
        run_pass(draft.num_tokens)  # one draft decode stands for all of them
    dist.barrier()
    print(json.dumps({
        "exchanges": sync.num_exchanges, "passes": passes, "modes": modes, "seen": seen.hexdigest()
    }))  # fmt: skip
    dist.destroy_process_group()


def run_fork(rank: int, size: int, folder: Path, steps: int) -> None:
    """Run as this rank, with output to files."""
    for target, kind in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{kind}{rank}", os.O_CREAT | os.O_WRONLY), target)
    code = 1
    try:
        main(rank, size, str(folder / "meet"), steps)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_all(size: int, folder: Path, steps: int) -> list[list[Any]]:
    """The (exit code, output, errors) of each rank of a group."""
    folder.mkdir()
    ranks = []
    for rank in range(size):
        ranks.append(os.fork())
        if ranks[-1] == 0:
            run_fork(rank, size, folder, steps)
    ends = []
    for rank, process in enumerate(ranks):
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        ends.append([code, *((folder / f"{kind}{rank}").read_text() for kind in ("out", "err"))])
    return ends


if __name__ == "__main__":
    groups = [list(map(int, group.split("x"))) for group in sys.argv[2:]]
    ends = [run_all(n, Path(sys.argv[1]) / f"{n}x{steps}", steps) for n, steps in groups]
    print(json.dumps(ends))
