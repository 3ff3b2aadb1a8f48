"""DeepSeek V4's feed-forward layer: routed experts, chosen by score or by token id, and a shared
one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....kernels.linear.activation import silu_and_mul
from ....kernels.linear.experts import Routing
from ....kernels.linear.moe import select_experts
from ...errors import ModelLoadError
from ..layers import CheckpointSlot, WeightFormat, tensor_slot
from ..moe import Experts, check_top_k, router_parts
from ..sharded import column_linear, row_linear


class Gate(nn.Module):
    """Scores the experts in float32 and selects some for each token.

    In the first layers a table gives the experts of each token id; scores are then weights only.
    """

    weight: Tensor  # [E, H]
    bias: Tensor | None  # [E], affects the choice alone
    tid2eid: Tensor | None  # [V, k] int64, token id -> experts

    def __init__(self, config: Any, by_token_id: bool, fmt: WeightFormat) -> None:
        super().__init__()
        experts, top_k = config.n_routed_experts, config.num_experts_per_tok
        check_top_k(top_k, experts)
        self.routing = Routing(
            top_k=top_k,
            scoring=config.scoring_func,
            renormalise=True,
            scale=float(config.routed_scaling_factor),
        )
        self.in_parts = fmt.linear is not None  # as in `moe.Router`
        dtype = fmt.dtype if self.in_parts else torch.float32
        empty = torch.empty(experts, config.hidden_size, dtype=dtype, device=fmt.device)
        self.register_buffer("weight", empty)
        bias = table = None
        if by_token_id:
            table = torch.empty(config.vocab_size, top_k, dtype=torch.int64, device=fmt.device)
        else:
            bias = torch.empty(experts, dtype=torch.float32, device=fmt.device)
        self.register_buffer("bias", bias)
        self.register_buffer("tid2eid", table)

    def forward(self, hidden: Tensor, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [M, H], input_ids [M] -> the experts' weights [M, k] float32 and ids [M, k]."""
        if self.in_parts:
            logits = router_parts(hidden, self.weight, None, fixed=False)
        else:
            logits = F.linear(hidden.float(), self.weight)
        listed = None if self.tid2eid is None else (input_ids, self.tid2eid)
        return select_experts(logits, self.routing, self.bias, listed)

    def checkpoint_slots(self, parent: str, name: str) -> Iterator[tuple[str, CheckpointSlot]]:
        yield f"{parent}{name}.weight", tensor_slot(self.weight)
        if self.bias is not None:
            yield f"{parent}{name}.bias", tensor_slot(self.bias, "zeros")
        if self.tid2eid is not None:
            shape = tuple(self.tid2eid.shape)
            yield f"{parent}{name}.tid2eid", CheckpointSlot(shape, self._load_table, "zeros")

    def _load_table(self, table: Tensor) -> None:
        """Copy the table. Random weights get one whose experts differ in each row.

        Raises ModelLoadError for experts that do not exist: kernels would read behind the weights.
        """
        assert self.tid2eid is not None
        if table.is_floating_point():
            rows, top_k = table.shape
            each = torch.arange(rows, device=table.device).unsqueeze(1)
            table = (each + torch.arange(top_k, device=table.device)) % self.weight.shape[0]
        if table.is_meta:  # the rehearsal of a start, whose tensors have no values
            return
        least, most = (int(bound) for bound in table.aminmax())
        if least < 0 or most >= self.weight.shape[0]:
            raise ModelLoadError(
                f"tid2eid names expert {least if least < 0 else most}, but the layer has "
                f"{self.weight.shape[0]} experts."
            )
        self.tid2eid.copy_(table)


class SharedExpert(nn.Module):
    def __init__(self, hidden: int, size: int, limit: float, fmt: WeightFormat) -> None:
        super().__init__()
        self.limit = limit
        self.gate_up = column_linear(hidden, {"w1": size, "w3": size}, fmt, role="gate_up")
        self.w2 = row_linear(size, hidden, fmt, role="down", sums=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [M, H] -> [M, H], with several ranks one rank's part of the sum."""
        return self.w2.forward(silu_and_mul(self.gate_up.forward(hidden), self.limit))


class MoE(nn.Module):
    def __init__(self, config: Any, by_token_id: bool, fmt: WeightFormat) -> None:
        super().__init__()
        hidden, size = config.hidden_size, config.moe_intermediate_size
        limit = float(config.swiglu_limit)
        self.gate = Gate(config, by_token_id, fmt)
        self.experts = Experts(
            config.n_routed_experts, hidden, size, fmt, "limited_silu", limit, ("w1", "w3", "w2")
        )
        self.experts.expert_share = config.num_experts_per_tok / config.n_routed_experts
        self.shared_experts = SharedExpert(hidden, size, limit, fmt)

    def forward(self, hidden: Tensor, input_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """hidden: [M, H], input_ids: [M] -> two tensors that `add_to_streams` sums: [M, H] or
        parts [S, M, H], and [M, H] or None."""
        routed = self.experts.parts(hidden, *self.gate.forward(hidden, input_ids))
        shared = self.shared_experts.forward(hidden)
        if self.experts.ranks is None:
            return routed, shared
        return self.experts.sum(routed + shared), None
