"""DeepSeek V4 as a target: blocks over several residual streams, and its checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ....kernels.linear.hyper.connections import (
    add_to_streams,
    head_streams,
    mix_streams,
)
from ....kernels.linear.hyper.site import Site
from ...attention.base import AttentionLayer, AttentionState
from ...errors import ModelLoadError
from ..base import AuxHiddenStates, BlockModel, ForwardOutput
from ..layers import CheckpointSlot, RMSNorm, WeightFormat, module_slots, tensor_slot
from ..llama import check_silu
from ..rotary import RotaryEmbedding, rope_parameters
from .attention import Attention
from .moe import MoE
from .step import Step, Tables

_INDEXED, _PLAIN, RAW = (
    "compressed_sparse_attention",
    "heavily_compressed_attention",
    "sliding_attention",
)
_SCORES = ("sqrtsoftplus", "sigmoid", "softmax")


class HyperConnection(nn.Module):
    """The weights of one site. Its tensors' names begin with its own: `hc_attn_fn`."""

    fn: Tensor
    base: Tensor
    scale: Tensor

    def __init__(self, config: Any, fmt: WeightFormat, is_head: bool = False) -> None:
        super().__init__()
        count = config.hc_mult
        rows = count if is_head else count * (2 + count)
        shapes = {
            "fn": (rows, count * config.hidden_size),
            "base": (rows,),
            "scale": (1 if is_head else 3,),
        }
        for name, shape in shapes.items():
            empty = torch.empty(shape, dtype=torch.float32, device=fmt.device)
            self.register_buffer(name, empty)
        norm_eps, eps = config.rms_norm_eps, config.hc_eps
        iterations = config.hc_sinkhorn_iters
        self.site = Site(self.fn, self.base, self.scale, norm_eps, eps, iterations)

    def checkpoint_slots(self, parent: str, name: str) -> Iterator[tuple[str, CheckpointSlot]]:
        yield f"{parent}{name}_fn", tensor_slot(self.fn)
        yield f"{parent}{name}_base", tensor_slot(self.base, "zeros")
        yield f"{parent}{name}_scale", tensor_slot(self.scale, "ones")


class Block(nn.Module):
    """Attention and feed-forward layer, each of which reads a mix of the streams."""

    def __init__(
        self, config: Any, kind: str, by_token_id: bool, layer_id: int, fmt: WeightFormat
    ) -> None:
        super().__init__()
        ratio = 0 if kind == RAW else config.compress_rates[kind]
        self.attn = Attention(config, ratio, kind == _INDEXED, layer_id, fmt)
        self.ffn = MoE(config, by_token_id, fmt)
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, fmt, exact=True)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, fmt, exact=True)
        self.hc_attn, self.hc_ffn = HyperConnection(config, fmt), HyperConnection(config, fmt)

    def forward(self, streams: Tensor, step: Step, tables: Tables) -> Tensor:
        """streams: [M, n, H] -> [M, n, H]."""
        mixed, post, comb = mix_streams(streams, self.hc_attn.site)
        out = self.attn.forward(self.attn_norm.forward(mixed), step, tables)
        streams = add_to_streams(streams, out, post, comb)
        mixed, post, comb = mix_streams(streams, self.hc_ffn.site)
        out, more = self.ffn.forward(self.ffn_norm.forward(mixed), step.input_ids)
        return add_to_streams(streams, out, post, comb, more)


class RotaryTables(nn.Module):
    """The rotary embeddings of both kinds of layers."""

    def __init__(self, config: Any, max_position: int, fmt: WeightFormat) -> None:
        super().__init__()
        self.main, self.compress = (
            RotaryEmbedding(
                rope_parameters(config, kind), config.head_dim, max_position, fmt.device, True
            )
            for kind in ("main", "compress")
        )

    @property
    def tables(self) -> Tables:
        return Tables(self.main.cos_sin_cache, self.compress.cos_sin_cache)


class SkippedBlock:
    def forward(self, streams: Tensor, step: Step, tables: Tables) -> Tensor:
        return streams


class DeepseekV4Model(BlockModel):
    """The target model. It skips the checkpoint's module for multi-token prediction.

    Its auxiliary hidden states are all streams side by side, [M, n * H] at each boundary.
    """

    skipped = SkippedBlock()

    def __init__(
        self, config: Any, fmt: WeightFormat, max_position: int, layer_id_offset: int = 0
    ) -> None:
        check_v4(config)
        super().__init__(config, fmt)
        kinds = zip(config.layer_types, config.mlp_layer_types, strict=True)
        blocks: list[Block] = []
        next_id = layer_id_offset
        for kind, mlp in kinds:
            blocks.append(Block(config, kind, mlp == "hash_moe", next_id, fmt))
            next_id += len(blocks[-1].attn.layers)
        self.layers = nn.ModuleList(blocks)
        self.blocks, self._blocks = blocks, list(blocks)
        self.hc_head = HyperConnection(config, fmt, is_head=True)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, fmt, exact=True)
        self.rotary = RotaryTables(config, max_position, fmt)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: AttentionState,
        aux_boundaries: tuple[int, ...] = (),
        into: ForwardOutput | None = None,
    ) -> ForwardOutput:
        count = self.config.hc_mult
        streams = self.embed(input_ids).unsqueeze(1).repeat(1, count, 1)
        step = Step(input_ids, positions, attention, self.blocks[0].attn.raw.layer_id)
        tables = self.rotary.tables
        aux = AuxHiddenStates(aux_boundaries, streams.flatten(1), into)
        for index, block in enumerate(self._blocks):
            aux.keep(index, streams.flatten(1))
            streams = block.forward(streams, step, tables)
        aux.keep(len(self.blocks), streams.flatten(1))
        hidden = self.norm.forward(head_streams(streams, self.hc_head.site))
        if into is not None:
            hidden = into[0].copy_(hidden)
        return hidden, aux.all

    def attention_layers(self) -> list[AttentionLayer]:
        return [layer for block in self.blocks for layer in block.attn.layers.values()]

    def checkpoint_slots(self) -> dict[str, CheckpointSlot]:
        slots = module_slots(self)
        slots["embed.weight"] = slots.pop("embed_tokens.weight")
        slots["head.weight"] = slots.pop("lm_head.weight")
        return slots

    def checkpoint_name(self, name: str) -> str | None:
        return None if is_of_module(name) else plain_name(name)


def check_v4(config: Any) -> None:
    """Raise ModelLoadError for what a config of DeepSeek V4 may say but this code lacks."""
    check_silu(config)
    lacks = {
        "attention_bias": bool(config.attention_bias),
        "mlp_bias": bool(config.mlp_bias),
        "tie_word_embeddings": bool(config.tie_word_embeddings),
        "norm_topk_prob false": not config.norm_topk_prob,
        "n_shared_experts other than 1": config.n_shared_experts != 1,
        "num_key_value_heads other than 1": config.num_key_value_heads != 1,
        f"scoring_func other than {', '.join(_SCORES)}": config.scoring_func not in _SCORES,
    }
    found = [name for name, is_set in lacks.items() if is_set]
    if found:
        raise ModelLoadError(f"DeepSeek V4 is not supported with {found[0]}.")
    for name in (_INDEXED, _PLAIN):
        if name in config.layer_types and not 1 < config.compress_rates[name] <= 4096:
            raise ModelLoadError(
                f"the compression rate of {name} must be between 2 and 4096, not "
                f"{config.compress_rates[name]}."
            )


# transformers' name -> DeepSeek's, in order; all that match are applied.
_RENAMES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^model\.", ""),
        (r"^embed_tokens\.", "embed."),
        (r"^lm_head\.", "head."),
        (r"^hc_head\.hc_", "hc_head_"),
        (r"\.self_attn\.", ".attn."),
        (r"\.mlp\.", ".ffn."),
        (r"\.input_layernorm\.", ".attn_norm."),
        (r"\.post_attention_layernorm\.", ".ffn_norm."),
        (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
        (r"\.sinks$", ".attn_sink"),
        # before the compressors' own parts
        (r"\.compressor\.indexer\.scorer\.", ".indexer."),
        (r"\.compressor\.indexer\.q_b_proj\.", ".indexer.wq_b."),
        (r"\.compressor\.indexer\.", ".indexer.compressor."),
        (r"\.compressor\.kv_norm\.", ".compressor.norm."),
        (r"\.position_bias$", ".ape"),
        (r"\.q_a_proj\.", ".wq_a."),
        (r"\.q_b_proj\.", ".wq_b."),
        (r"\.q_a_norm\.", ".q_norm."),
        (r"\.kv_proj\.", ".wkv."),
        (r"\.attn\.norm\.", ".attn.kv_norm."),  # transformers' mistake when it saves
        (r"\.o_a_proj\.", ".wo_a."),
        (r"\.o_b_proj\.", ".wo_b."),
        (r"\.compressor\.gate_proj\.", ".compressor.wgate."),
        (r"\.gate\.e_score_correction_bias$", ".gate.bias"),
        (r"\.(shared_experts|experts\.\d+)\.gate_proj\.", r".\1.w1."),
        (r"\.(shared_experts|experts\.\d+)\.up_proj\.", r".\1.w3."),
        (r"\.(shared_experts|experts\.\d+)\.down_proj\.", r".\1.w2."),
    )
)
_MODULE = re.compile(r"^(model\.)?mtp\.")


def plain_name(name: str) -> str:
    """DeepSeek's name of a stored tensor."""
    for pattern, replacement in _RENAMES:
        name = pattern.sub(replacement, name)
    return name


def is_of_module(name: str) -> bool:
    return _MODULE.match(name) is not None
