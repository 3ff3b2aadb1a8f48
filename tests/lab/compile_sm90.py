"""Compiles the Triton kernels for sm_90a on a machine without a GPU; prints a line per kernel.

`test_compile_ahead.py` runs it in a process of its own, since Triton decides at import whether it
compiles or interprets. Launches become compilations; tensors have no memory. `compile_sm90.py`
compiles the first form of each kernel. It takes the further forms of attention, whose shared memory
differs, as far as its allocation. `compile_sm90.py all` compiles every form of every kernel, and of
sparse attention every combination of heads and tokens.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import sm90
import torch
from sm90 import BF16, I32, I64, NoDriver, compile_instead, compiled, done, module, t, widest_load
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from slipstream.kernels.attention.paged_rows import AttentionRule, Fp8Cache, PagedRows
from slipstream.kernels.batch.step_sizes import StepSizes
from slipstream.kernels.linear.experts import ExpertWeights, PackedExperts, Routing
from slipstream.kernels.linear.rotation import Rotation
from slipstream.kernels.quant.tiled import TiledWeight

FP8, FP8_LATENT = Fp8Cache(BF16, 0.5, 0.25), Fp8Cache(BF16, latent=512)


def attention() -> None:
    run = module("paged_attention").paged_attention
    for dim, heads, group, queries, options in [
        (128, 8, 4, 1, {}),
        (128, 8, 4, 4, {"splits": 4}),
        (128, 8, 4, 200, {}),
        (64, 3, 3, 1, {"sinks": t(9)}),
        (256, 4, 2, 1, {"sliding_window": 512, "softcap": 50.0}),
        (512, 2, 8, 100, {}),
        (64, 2, 4, 100, {"dtype": torch.float32}),
        (512, 2, 4, 100, {"dtype": torch.float32}),
        (576, 1, 16, 1, {"is_mla": True, "head_dim_v": 512}),
        (576, 1, 128, 4, {"is_mla": True, "head_dim_v": 512, "splits": 2}),
        (128, 8, 4, 1, {"splits": 4, "fp8": FP8}),
        (128, 8, 4, 200, {"fp8": FP8}),
        (256, 4, 2, 100, {"sliding_window": 512, "fp8": FP8}),
        (576, 1, 16, 1, {"is_mla": True, "head_dim_v": 512, "fp8": FP8_LATENT}),
        (576, 1, 128, 200, {"is_mla": True, "head_dim_v": 512, "fp8": FP8_LATENT}),
    ]:
        dtype = options.pop("dtype", BF16)
        shape = (9, 64, heads, dim) if "is_mla" in options else (2, 9, 16, heads, dim)
        cache, query = t(*shape, dtype=dtype), t(4 * queries, heads * group, dim, dtype=dtype)
        splits = options.pop("splits", None)
        where = (t(4, 256, dtype=I32), t(5, dtype=I32), t(4, dtype=I32), queries, t(4, dtype=I64))
        rule = AttentionRule(scale=0.1, **options)
        if rule.fp8 is not None:
            row = rule.cache_row(dim)
            cache = t(*cache.shape[:-1], row, dtype=torch.float8_e4m3fn)
        run(query, cache, PagedRows(*where), rule, splits=splits)
        if (dim, queries, dtype) == (128, 200, BF16):
            hopper = module("hopper_prefill").hopper_prefill
            for window in (None, 512):
                windowed = replace(rule, sliding_window=window)
                hopper(query, cache, PagedRows(*where), windowed, t(*query.shape))
        if dtype is BF16 and queries in (1, 100):  # the kernels of `--batch-invariant`
            out = t(4 * queries, heads * group, rule.head_dim_v or dim)
            for alone in (False, True):
                fixed = module("fixed_splits").fixed_attention
                fixed(query, cache, PagedRows(*where, fixed=True), rule, out, alone)


def layers() -> None:
    norm = module("norm_rope")
    for kind in (I32, I64):
        module("embedding").embedding(t(4, dtype=kind), t(100, 4096))
    norm.rms_norm(t(4, 4096), t(4096), 1e-5)
    norm.rms_norm(t(4, 32, 128), t(128), 1e-5)
    norm.fused_add_rms_norm(t(4, 4096), t(4, 4096), t(4096), 1e-5)
    rows, parts = t(4, dtype=I64), t(2, 4, 4096, dtype=torch.float32)
    norm.fused_add_rms_norm(parts, t(9, 4096), t(4096), 1e-5, rows)
    packets = importlib.import_module("slipstream.kernels.linear.packets.memory")
    memory = packets.PacketMemory(1, 2, t(9, dtype=I64), (1 << 40, 1 << 41), t(9, dtype=I32))
    for x, residual in ((t(4, 4096), None), (t(2, 4, 4096, dtype=torch.float32), t(4, 4096))):
        importlib.import_module("slipstream.kernels.linear.packets.triton.rank_sums").sum_packets(
            x, memory, BF16, residual
        )
    for x in (t(4, 3, dtype=torch.float32), t(4, 16000)):
        importlib.import_module(
            "slipstream.kernels.linear.packets.triton.rank_gather"
        ).gather_packets(x, memory)
    streams = module("streams")
    for hidden, residual in ((parts, t(4, 4096)), (t(4, 4096), t(4, 4096)), (t(4, 4096), None)):
        streams.write_stream(hidden, residual, t(4, 12288)[:, 4096:8192])
    module("embedding").embedding(rows, t(9, 8192)[:, :4096])
    for weights in (None, (t(4096), t(4096))):
        streams.norm_pair(t(100, 4096), t(4, 4096), weights, 1e-5, rows.int())
        streams.norm_pair(t(4, 4096), t(4, 4096), weights, 1e-5)
    positions, cos_sin = t(4, dtype=I64), t(64, 128, dtype=torch.float32)
    query, key = t(4, 32, 128), t(4, 8, 128)
    rotation = Rotation(positions, cos_sin)
    norm.rotary_embedding(query, key, rotation)
    norm.rotary_embedding(query, None, replace(rotation, interleaved=True))
    cache = t(2, 9, 16, 8, 128)
    norm.rotary_store_kv(query, key, key, rotation, cache, positions)
    module("store_kv").store_kv(key, key, cache, positions)
    module("store_kv").store_kv(t(4, 1, 576), None, t(9, 64, 1, 576), positions)
    codes = t(2, 9, 16, 8, 128, dtype=torch.float8_e4m3fn)
    norm.rotary_store_kv(query, key, key, rotation, codes, positions, FP8)
    module("store_kv").store_kv(key, key, codes, positions, FP8)
    packed = t(9, 64, 1, 656, dtype=torch.float8_e4m3fn)
    module("store_kv").store_kv(t(4, 1, 576), None, packed, positions, FP8_LATENT)
    module("activation").silu_and_mul(t(4, 28672))
    module("activation").gelu_tanh_and_mul(t(4, 28672))
    module("activation").gated_rows(
        t(4, 2048), t(1, 2048), t(4, 2048), t(4, 2048, dtype=torch.float32)
    )
    module("activation").sigmoid_gate(t(4, 24, 256), t(4, 56, 256)[:, 1:48:2])


def batch() -> None:
    ints = {name: t(64, dtype=I32) for name in ("idx_mapping", "query_start_loc", "cu_num_logits")}
    ints |= {name: t(64, dtype=I32) for name in ("seq_lens", "num_draft_tokens", "input_ids")}
    ints |= {name: t(64, dtype=I32) for name in ("expanded_idx_mapping", "expanded_local_pos")}
    longs = ("positions", "logits_indices", "draft_ids", "logits_positions")
    step = SimpleNamespace(
        **ints,
        **{name: t(64, dtype=I64) for name in longs},
    )
    requests = SimpleNamespace(
        all_token_ids=t(8, 4096, dtype=I32),
        draft_tokens=t(8, 4, dtype=I64),
        **{n: t(8, dtype=I32) for n in ("prefill_len", "total_len", "num_computed_tokens")},
        **{n: t(8, dtype=I64) for n in ("last_sampled_tokens", "next_prefill_tokens")},
    )
    gather = module("gather_batch")
    gather.prepare_inputs(requests, step, StepSizes(3, 12, 12, 4, 16))
    tables = [t(8, 256, dtype=I32)]
    gather.gather_block_tables(tables, step.idx_mapping, tables, 3, 4)
    slots = t(1, 64, dtype=I64)
    sizes = (3, 12, 16)
    gather.compute_slot_mappings(tables, [16], step.query_start_loc, step.positions, slots, *sizes)
    three = t(3, dtype=I32)
    emitted = SimpleNamespace(
        sampled_token_ids=t(3, 5, dtype=I64),
        num_sampled=three,
        num_rejected=three,
        has_nan=t(3, dtype=torch.bool),
    )
    for counts in (None, t(8, 100, dtype=I32)):
        gather.post_update(requests, step, emitted, counts)
    packed, counts = t(4, 8, dtype=I64), t(2, 8, dtype=I32)
    module("padded_step").commit_step(requests, step, emitted, packed, counts)
    staging(requests, step, three)
    positions, lens = t(4, dtype=I64), t(4, dtype=I32)
    for writes in (None, t(4, dtype=I64)):
        module("prepare_draft").advance_draft_decode(positions, lens, 64, writes)
    module("prepare_draft").map_draft_slots(tables, [16], lens, positions, slots)


def staging(requests: SimpleNamespace, step: SimpleNamespace, counts: torch.Tensor) -> None:
    kernels = module("stage_drafts")
    of = SimpleNamespace(**vars(step), num_sampled=counts, num_rejected=counts)
    requests.temperature, requests.seed = t(8, dtype=torch.float32), t(8, dtype=I64)
    requests.max_drafts = t(8, dtype=I32)
    longs = ("last_token_indices", "decode_positions", "noise_positions", "seed")
    ints = ("idx_mapping", "seq_lens", "allowed", "decode_ids")
    drafter = SimpleNamespace(
        input_ids=t(64, dtype=I32), positions=t(64, dtype=I64), step=t(8, dtype=I64),
        query_start_loc=t(9, dtype=I32), draft_tokens=t(8, 4, dtype=I64),
        temperature=t(8, dtype=torch.float32),
        **{name: t(8, dtype=I64) for name in longs}, **{name: t(8, dtype=I32) for name in ints},
    )  # fmt: skip
    kernels.stage_draft_rows(of, requests, drafter, 3, 16, 4096)
    kernels.store_draft_rows(drafter, t(8, dtype=I32), requests.draft_tokens, 4, 2)
    draw, kept = module("draw_drafts"), t(2, 4, 128256, dtype=torch.float32)
    for to_target in (None, t(32000, dtype=I64)):
        draw.take_drafts(t(4, dtype=I64), drafter, to_target)
        for stored in (None, kept):
            draw.draw_drafts(t(4, 32000), drafter, to_target, stored)


def latent() -> None:
    project = module("mla").project_heads
    for rows in (1, 40, 256):
        project(t(rows, 16, 192)[..., :128], t(16, 128, 512))
        project(t(rows, 16, 512), t(16, 128, 512).transpose(1, 2))


def sampling() -> None:
    from slipstream.kernels.drafts.ngram_scan import Haystack, Predictions
    from slipstream.kernels.linear.head_sample import Draws
    from slipstream.kernels.sampling.verify import VerifyRows

    logits, longs = t(8, 128256, dtype=torch.float32), t(8, dtype=I64)
    ints, flags = t(8, dtype=I32), t(8, dtype=torch.bool)
    module("sample").gumbel_sample(logits, longs, longs, 3)
    module("log_probs").log_probs(logits.bfloat16())
    module("head_sample").gather_draws(ints, t(8, dtype=torch.float32), longs)
    for draws in (None, Draws(longs, longs, flags, t(8, dtype=torch.float32))):
        module("head_sample").pick_rows(logits, draws)
        module("head_sample").pick_rows(logits.bfloat16(), draws)
        part = module("head_sample").best_of_part(logits.bfloat16(), draws, 64128)
        module("head_sample").best_of_parts(part.expand(2, *part.shape).contiguous())
    module("sample").gumbel_sample(logits, longs, longs, longs, flags)
    for q in (None, t(4, 3, 32000, dtype=torch.float32)):
        keys = (longs, longs, flags, False, True, 4)
        rows = VerifyRows(logits, longs, q, ints, ints, t(5, dtype=I32), *keys)
        module("verify").rejection_sample(rows)
        temperature, raw = t(8, dtype=torch.float32), logits.bfloat16()
        raw_rows = replace(rows, logits=raw, temperature=temperature, seeded=longs, drawn=longs)
        module("verify").rejection_sample(raw_rows)
        module("emit_drawn").emit_matching(rows, longs)
        module("emit_drawn").emit_by_chance(rows, longs, t(3, dtype=torch.float32))
    for any_top_p in (False, True):
        top_p = t(8, dtype=torch.float32)
        module("top_k_top_p").apply_top_k_top_p(logits, longs, top_p, None, any_top_p)
    emitted, four, floats = t(4, 4, dtype=I64), t(4, dtype=I32), t(8, dtype=torch.float32)
    of = SimpleNamespace(cu_num_logits=t(5, dtype=I32), idx_mapping=four, seq_lens=four)
    for largest in (None, floats):
        finish = module("finish_samples").finish_samples
        finish(emitted, longs, floats, largest, of, ints)
    text = t(8, 4096, dtype=I32)
    for prediction in (None, Predictions(ints, longs, longs, 8)):
        haystack = Haystack(text, ints, prediction)
        module("ngram_scan").ngram_scan(haystack, longs, ints, 2, 4, 5)


def packed(experts: ExpertWeights) -> PackedExperts:
    """Experts of the same shapes whose numbers are MXFP4."""
    weights = []
    for stack in (experts.gate_up, experts.down):
        rows, columns = stack.shape[0] * stack.shape[1], stack.shape[2]
        words = t(rows, -(-columns // 256) * 64, dtype=torch.int16)
        scales = t(rows, columns // 32, dtype=torch.uint8)
        weights.append(TiledWeight("fp4", words, scales, columns, 32))
    biases = experts.gate_up_bias, experts.down_bias
    return PackedExperts(*weights, len(experts.down), *biases, experts.activation)


def experts() -> None:
    done.pop("_tile_kernel", None)
    sizes = [(128, 2048, 768, 8), (32, 2880, 2880, 4)]  # Qwen3-30B-A3B, gpt-oss-20b
    for num_experts, hidden, inner, top_k in sizes:
        of = ExpertWeights(t(num_experts, 2 * inner, hidden), t(num_experts, hidden, inner))
        if top_k == 4:
            biases = {
                "gate_up_bias": t(num_experts, 2 * inner),
                "down_bias": t(num_experts, hidden),
            }
            of = replace(of, **biases, activation="clamped_swiglu")
        for rows in (1, 8, 128, 256, 8192):
            for parts in (0, 8):
                shape = (parts, rows, num_experts) if parts else (rows, num_experts)
                logits = t(*shape, dtype=torch.float32)
                weights, ids = module("route").select_experts(logits, Routing(top_k))
                if top_k == 8:  # as DeepSeek V3's, and by token id
                    grouped = Routing(8, "sigmoid", 8, 4, "top2", renormalise=True)
                    module("route").select_experts(logits, grouped, t(128, dtype=torch.float32))
                    listed = t(rows, dtype=I32), t(512, 8, dtype=I64)
                    rule = Routing(8, "sqrtsoftplus", renormalise=True)
                    module("route").select_experts(logits, rule, None, listed)
            if rows <= 16:
                x, weight = t(rows, hidden), t(num_experts, hidden)
                norm, parts_of_x = (t(hidden), 1e-6), t(2, rows, hidden, dtype=torch.float32)
                module("normed_scores").normed_scores(x, None, norm, weight, None)
                module("normed_scores").normed_scores(parts_of_x, x, norm, weight, t(num_experts))
            own = num_experts // 2
            module("route").own_experts(ids, own, own, t(2, dtype=I32), t(1 + own, dtype=I64))
            module("moe").run_experts(t(rows, hidden), of, weights, ids)
            if rows == 1:
                module("moe").add_experts(t(1, hidden), of, weights, ids, t(1, hidden))
            if top_k == 8 and rows in (8, 128, 256):
                listing = module("expert_rows").work_for
                room = "slipstream.kernels.linear.grouped.triton"
                hopper = importlib.import_module(f"{room}.hopper_experts")
                work, inner_values = listing(weights, ids, num_experts, 128), t(rows * top_k, inner)
                parts = t(top_k, rows, hidden, dtype=torch.float32)
                for source, out in ((t(rows, hidden), inner_values), (inner_values, parts)):
                    gated, options = out is inner_values, {"form": hopper.Form(), "programs": 132}
                    hopper.multiply_experts(gated, source, of, work, out, **options)
            if top_k == 4:
                module("packed_experts").expert_parts(t(rows, hidden), packed(of), weights, ids)


def recurrent() -> None:
    rows = importlib.import_module("slipstream.kernels.recurrent.rows")
    for heads, log in ((16, 0), (48, 4)):  # Qwen3.5 0.8B, and 27B with drafts
        shape = rows.DeltaShape(16, heads, 128, 128, 4)
        f32 = torch.float32
        weights = rows.DeltaWeights(
            t(4, shape.conv_channels, dtype=f32).t(), t(heads, dtype=f32), t(heads, dtype=f32)
        )
        state, tails = t(3, heads, 128, 128, dtype=f32), t(3, 3 + log, shape.channels)
        states = rows.DeltaState(state, tails, state, t(3, 3, shape.channels))
        table = rows.StateTable(t(3, 3, dtype=I32))
        values, starts, longs = t(7, 2, dtype=I32), t(3, dtype=I32), t(200, dtype=I64)
        kernel = module("gated_delta")
        kernel.prepare_rows(table, t(2, dtype=I32), starts, longs, log, values)
        bulk = rows.BulkRows.find([0, 1, 200], max(log, 1), torch.from_numpy)
        step = rows.DeltaRows(values, starts, log, 1, log, bulk, False)
        x = t(200, shape.channels + shape.value_size)[:, : shape.channels]
        z = t(200, 2 * shape.value_size)[:, shape.value_size :]
        gate = rows.OutputGate(z, t(128, dtype=f32), 1e-6)
        kernel.gated_delta(x, weights, shape, states, step, gate)


def combined(heads: Sequence[int], others: Sequence[Any]) -> Iterable[tuple[int, Any]]:
    """Each of these with each, or in the short form with its neighbour: shared memory depends on
    the heads of a program, and whether rows are split on the tokens, but on nothing of both."""
    every = itertools.product(heads, others)
    return every if sm90.every_form else zip(heads, others, strict=False)


def listed() -> None:
    """DeepSeek V3.2's shape: rows of 512 + 64 values and keys of 128, wide and as e4m3."""
    room, packed = "slipstream.kernels.attention", torch.float8_e4m3fn
    pages = importlib.import_module(f"{room}.compressed.pages").Pages
    lists = importlib.import_module(f"{room}.compressed.pages").SlotList
    tokens = importlib.import_module(f"{room}.compressed.pages").TokenRows
    fp8 = importlib.import_module(f"{room}.paged_rows").Fp8Cache
    store = importlib.import_module(f"{room}.triton.store_kv").store_kv
    attend, score = (
        importlib.import_module(f"{room}.compressed.triton.{name}")
        for name in ("sparse_attention", "select_entries")
    )
    longs, tables = t(9, dtype=I64), t(4, 64, dtype=I32)
    # one token, whose rows are split, and several
    founds = [lists(t(count, 2048, dtype=I32), t(count, dtype=I32)) for count in (1, 9)]
    for is_packed in (True, False):
        own = [fp8(BF16, latent=size) if is_packed else None for size in (512, 128)]
        sizes, dtype = ((656, 132), packed) if is_packed else ((576, 128), BF16)
        rows, keys = (
            pages(t(7, 64, 1, size, dtype=dtype), tables, longs, 64, 1, one)
            for size, one in zip(sizes, own, strict=True)
        )
        store(t(9, 1, 128), None, keys.cache, longs, keys.fp8)
        for heads, found in combined((16, 128), founds[::-1]):
            args = (rows, found, None, None, None, 0.1, 512)
            attend.sparse_attention(t(found.counts.shape[0], heads, 576), *args)
        of = t(9, 64, dtype=torch.float32)
        score.score_entries(t(9, 64, 128), of, keys, tokens(longs, longs), 4096)
    # 132 bytes are a multiple of 4, and every load must be aligned to its size.
    assert widest_load(compiled["_score_kernel"], "latent_rows.py") == 4


def compressed() -> None:
    """DeepSeek V4's shape: heads of 512 values, rates of 4 and 128, an indexer of 64 heads."""
    room = "slipstream.kernels.attention.compressed"
    pages = importlib.import_module(f"{room}.pages")

    def kernel(name: str) -> Any:
        return getattr(importlib.import_module(f"{room}.triton.{name}"), name)

    f32, longs, tables = torch.float32, t(9, dtype=I64), t(4, 64, dtype=I32)
    latent_pages = importlib.import_module("slipstream.kernels.quant.latent_pages")
    fp8_cache = importlib.import_module("slipstream.kernels.attention.paged_rows").Fp8Cache

    def packed(block: int, rate: int) -> Any:
        count = latent_pages.page_bytes(block // rate, 448, 64)
        fp8 = fp8_cache(BF16, latent=448, rotary=64, paged=True)
        cache = t(7, 1, 1, count, dtype=torch.float8_e4m3fn)
        return pages.Pages(cache, tables, longs, block, rate, fp8)

    cos_sin, weight = t(4096, 64, dtype=f32), t(512, dtype=f32)
    turn = kernel("tail_rotary")
    for heads in (64, 8, 1):
        turn(t(9, heads, 512), longs, cos_sin, 1e-6, weight if heads == 1 else None)
        turn(t(9, heads, 512), longs, cos_sin, inverse=True)
    turn(t(9, 64, 128), longs, cos_sin)
    tokens = pages.TokenRows(longs, longs)
    own = pages.Pages(t(7, 32, 1, 512), tables, longs, 128, 4)
    for newest, chosen in ((True, None), (False, None), (False, t(9, 512, dtype=I64))):
        kernel("list_slots")(own, tokens, 512, newest, chosen)
    for rate, dim, width in ((4, 512, 2560), (4, 128, 2560), (128, 512, 1024)):
        pending = pages.Pages(t(7, 16, 1, width), tables, longs, 16)
        entries = pages.Pages(t(7, 128 // rate, 1, dim), tables, longs, 128, rate)
        channels = 2 * dim if rate == 4 else dim
        bias = t(rate, channels, dtype=f32)
        rule = pages.Compressor(rate, dim, rate == 4, 0, channels, bias, weight, 1e-6, cos_sin)
        kernel("compress")(rule, pending, tokens, entries)
        if dim == 512:
            kernel("compress")(rule, pending, tokens, packed(128, rate))
        if dim == 128:
            score = importlib.import_module(f"{room}.triton.select_entries").score_entries
            score(t(9, 64, 128), t(9, 64, dtype=f32), entries, tokens, 2048)
    raw = pages.Pages(t(7, 64, 1, 512), tables, longs, 64)
    for heads, count in combined((8, 64, 128), (1, 9)):
        counts = t(count, dtype=I32)
        window, chosen = (pages.SlotList(t(count, n, dtype=I32), counts) for n in (128, 512))
        for found in (None, chosen):
            args = (raw, window, None if found is None else raw, found, t(heads, dtype=f32), 0.04)
            kernel("sparse_attention")(t(count, heads, 512), *args)
            own = (packed(64, 1), window, None if found is None else packed(128, 4), found)
            kernel("sparse_attention")(t(count, heads, 512), *own, *args[4:])
    kernel("store_rows")(t(9, 1, 512), packed(64, 1), None)
    mix = importlib.import_module("slipstream.kernels.linear.hyper.triton.connections")
    site = importlib.import_module("slipstream.kernels.linear.hyper.site").Site
    of = site(t(24, 4 * 4096, dtype=f32), t(24, dtype=f32), t(3, dtype=f32), 1e-6, 1e-6, 20)
    for rows in (1, 200, 2000):
        mix.mix_streams(t(rows, 4, 4096), of)
    mix.add_to_streams(t(9, 4, 4096), t(9, 4096), t(9, 4, dtype=f32), t(9, 4, 4, dtype=f32))


if __name__ == "__main__":
    driver.set_active(NoDriver())
    JITFunction.run = compile_instead
    sm90.every_form = sys.argv[1:] == ["all"]
    parts = (attention, layers, batch, latent, sampling, experts, recurrent, listed, compressed)
    for part in parts:
        part()
    for name, count in done.items():
        print(name, count)
