"""What a draft takes when its ranks divide an EAGLE-3 head, and when each has the whole one.

    PYTHONPATH=.src python tests/lab/measure_divided.py [--hidden 4096] [--inner 14336]
        [--heads 32] [--kv-heads 8] [--vocab 32000] [--dtype bfloat16] [--size 2]

It prints the microseconds of one draft by number of rows: a layer without its attention, and the
choice of the likeliest token. GPUs run it from a CUDA graph of 20 drafts that depend on each other,
CPUs through gloo, one thread each. Status 1 if the ranks choose different tokens.

To read it: the way with the smaller figure should be the default of `draft_tensor_parallel_size`,
which `runner/drafters/division.py` chooses by bytes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from rank_scripts import run_ranks
from torch import Tensor

from slipstream.runner.models.formats.weight_format import resolve_format, split_format
from slipstream.runner.models.layers import Linear, RMSNorm, WeightFormat
from slipstream.runner.models.llama import DecoderLayer
from slipstream.runner.models.sharded import head, qkv_linear
from slipstream.runner.parallel.collectives import Collectives, meet
from slipstream.runner.parallel.ranks import Ranks

# By number of requests; CPUs measure the first two.
ROWS, DRAFTS, REPEATS = (1, 8, 32, 256), 20, 15


class Head:
    """The projections of an EAGLE-3 head with random weights, whole or a rank's part."""

    def __init__(self, options: argparse.Namespace, fmt: WeightFormat) -> None:
        hidden = options.hidden
        config: Any = SimpleNamespace(
            model_type="llama", hidden_size=hidden, intermediate_size=options.inner,
            num_attention_heads=options.heads, num_key_value_heads=options.kv_heads,
            head_dim=options.head_dim, rms_norm_eps=1e-5,
        )  # fmt: skip
        self.layer = DecoderLayer(config, 0, 0, fmt)
        attend = self.layer.self_attn
        kv = options.heads, options.kv_heads
        attend.qkv_proj = qkv_linear(2 * hidden, kv, attend.head_dim, fmt, False, "qkv")
        self.norm = RMSNorm(hidden, 1e-5, fmt)
        self.head = head(hidden, options.vocab, fmt)
        linears = [*self.layer.linears(), self.head]
        for index, part in enumerate(linears):
            fill(part, index, fmt.device)
        for norm in (self.norm, self.layer.post_attention_layernorm):
            norm.weight.fill_(1.0)
        self.num_bytes = sum(p.in_features * p.out_features for p in linears) * fmt.dtype.itemsize

    def draft(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [N, H] -> (the next x, tokens [N])."""
        layer, attend = self.layer, self.layer.self_attn
        qkv = attend.qkv_proj.forward(torch.cat((x, x), 1))
        out = attend.o_proj.parts(qkv[:, : attend.q_size].contiguous())
        normed, residual = layer.post_attention_layernorm.add(out, x)
        normed, _ = self.norm.add(layer.mlp.parts(normed), residual)
        return normed, self.head.pick(normed)[0]


def fill(part: Linear, seed: int, device: torch.device) -> None:
    """Give a layer random weights, the same on all ranks if it is whole."""
    assert part.weight is not None
    generator = torch.Generator(device).manual_seed(seed)
    part.weight.normal_(0.0, 0.02, generator=generator)


def once_recorded(work: Callable[[], Any]) -> Callable[[], Any]:
    """Replays the CUDA graph of `work`."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def microseconds(of: Head, rows: int, device: torch.device, hidden: int) -> tuple[float, float]:
    """(the median, the least) of one draft."""
    torch.manual_seed(0)
    x = torch.randn(rows, hidden, dtype=of.norm.weight.dtype, device=device)
    count = DRAFTS if device.type == "cuda" else 2

    def work() -> Tensor:
        state = x
        for _ in range(count):
            state, tokens = of.draft(state)
        return tokens

    tokens = work()
    everyones = [torch.empty_like(tokens) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, tokens)
    if not all(torch.equal(one, everyones[0]) for one in everyones):
        raise SystemExit("the ranks choose different tokens")
    run = once_recorded(work) if device.type == "cuda" else work
    times = []
    for _ in range(REPEATS):
        dist.barrier()
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1e6 / count)
    return statistics.median(times), min(times)


def run_rank(options: argparse.Namespace) -> int:
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    torch.set_num_threads(1)
    rank, size = options.rank, options.size
    meet(rank, size, options.rendezvous, device)
    collectives = Collectives(size, device)
    collectives.use_small_sums()
    ranks = Ranks(rank, size, collectives, False, collectives.packets)
    whole = resolve_format(options.dtype, device, None, "auto")
    heads = {"whole": Head(options, whole), "divided": Head(options, split_format(whole, ranks))}
    if rank == 0:
        sizes = ", ".join(f"{name} {of.num_bytes >> 20} MiB" for name, of in heads.items())
        print(f"weights of a rank: {sizes}", flush=True)
    for rows in ROWS if device.type == "cuda" else ROWS[:2]:
        found = {n: microseconds(of, rows, device, options.hidden) for n, of in heads.items()}
        if rank == 0:
            times = ", ".join(f"{n} {mid:.1f} (least {low:.1f})" for n, (mid, low) in found.items())
            print(f"{rows} rows, us a draft: {times}", flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    sizes = {"--hidden": 4096, "--inner": 14336, "--heads": 32, "--kv-heads": 8, "--head-dim": 128}
    for flag, value in {**sizes, "--vocab": 32000, "--size": 2}.items():
        parser.add_argument(flag, type=int, default=value)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--rendezvous", default="")
    options = parser.parse_args()
    if options.rank is None:
        return run_ranks(__file__, options.size)
    with torch.inference_mode():
        status = run_rank(options)
    sys.stdout.flush()
    os._exit(status)  # communicators that other ranks have left may never finish


if __name__ == "__main__":
    sys.exit(main())
