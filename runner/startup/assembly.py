"""Assembles the parts of a model runner: weights, KV memory, buffers, attention and drafter.

It runs only at start-up, never in a step.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from ...configs.graphs import CUDAGraphMode
from ...configs.schema import Config
from ...kernels.compile_log import watch_compilations
from ...kernels.device import card_of, is_card
from ...speculators.autoregressive import AutoRegressiveSpeculator
from ...speculators.base import SpeculatorNeeds
from ...speculators.registry import create_speculator
from ..attention.base import (
    AttentionBackend,
    AttentionBuilder,
    AttentionLayer,
    BuilderSizes,
)
from ..attention.choice import choose_backend
from ..attention.fp8_layers import is_fp8, with_fp8_cache
from ..batch.input_batch import InputBuffers
from ..batch.kv_cache import (
    KVCache,
    KVCacheGroup,
    KVLayout,
    StepLoad,
    fitting_block_size,
    make_groups,
)
from ..batch.recurrent_states import RecurrentStates
from ..batch.request_table import RequestTable
from ..claims.at_start import ClaimsAtStart, claim_cases, claim_setup
from ..claims.claims import LoweredClaim
from ..drafters.attention import DraftAttention
from ..drafters.draft_graphs import DraftGraphs
from ..drafters.host import DraftModelHost
from ..graphs.capture import CudaGraphs, GraphBackend, GraphPool
from ..graphs.dispatch import wanted_mode
from ..graphs.manager import CudaGraphManager, RebuiltStates
from ..graphs.settings import GraphSettings
from ..loading.model_check import memory_faults
from ..messages import Progress
from ..parallel.engine_group import EngineGroup
from ..parallel.ranks import Ranks, check_equal, least_of
from ..sampling.row_sampling import RowSampling
from ..sampling.sampler import Sampler
from ..step.data_parallel import create_sync
from ..step.device_queue import DeviceQueue, choose_device
from ..step.parts import NO_SPECULATION, RunnerParts
from ..step.target import Target, create_target_graphs
from ..step.token_graphs import TokenGraphs, create_token_graphs
from .batch_invariant import settled
from .compile_ahead import ATTENTION, GRAPHS, CompileAhead
from .facts import facts_of
from .first_use import load_libraries
from .limits import log_limits
from .load_target import faults_of_drafter, load_target
from .memory import MemoryProfile, kv_cache_bytes, log_fp8_memory, memory_allocated, num_kv_blocks
from .recurrent import create_states, group_of, save_states

ProgressFn = Callable[[Progress], None]


def assemble(
    config: Config,
    progress: ProgressFn,
    ahead: CompileAhead | None = None,
    ranks: Ranks | None = None,  # None: the model is whole
    engines: EngineGroup | None = None,  # None: its experts are whole
) -> RunnerParts:
    """Load the model and allocate everything that a step uses."""
    device = choose_device(config.model.device)
    with memory_faults("this model"):
        return Assembly(config, progress, device, ahead, ranks, engines).run()


class Assembly:
    """Makes the parts one after the other; `run` returns them."""

    def __init__(
        self,
        config: Config,
        progress: ProgressFn,
        device: torch.device,
        ahead: CompileAhead | None = None,
        ranks: Ranks | None = None,
        engines: EngineGroup | None = None,
    ) -> None:
        self.config, self.ranks, self.engines = settled(config), ranks, engines
        self.progress = progress
        self.seconds: dict[str, float] = {}
        self.device = device
        # Meta tensors stand for a GPU's; see `dry_start`.
        self.device_type = "cuda" if is_card(device) else device.type
        self.ahead = ahead
        if device.type == "cuda":
            watch_compilations()
        self.memory: Counter[str] = Counter()  # bytes on the device by purpose
        self._allocated = memory_allocated(self.device)
        self.lowered: list[LoweredClaim] = []

    def run(self) -> RunnerParts:
        config = self.config
        if self.ahead is not None and (card := card_of(self.device)) is not None:
            self.ahead.tell(card)
        with self._phase("load", shown=False):  # loading reports its own progress
            self._load_target()
            loaded = self.loaded
            self.graphs = self._graph_settings()
            log_limits(loaded.limits, loaded.limits_reason, self.graphs)
            host = self._draft_host()
            with faults_of_drafter():
                speculator = create_speculator(config.speculative, host)
        needs = speculator.needs if speculator is not None else NO_SPECULATION
        self._note("weights")
        with self._phase("attention", shown=False), torch.inference_mode():
            layers = [*self.model.attention_layers(), *host.draft_layers]
            if is_fp8(config.cache.kv_cache_dtype):
                layers = with_fp8_cache(layers, self.format.dtype, loaded.kv_scales)
            groups = make_groups(layers)
            backend = choose_backend(
                config.graph.attention_backend, layers, self.device, config.graph.batch_invariant
            )
            wanted = backend.block_size(config.cache.block_size)
            self.block_size = fitting_block_size(wanted, groups)
            sizes = [group.block_size(self.block_size) for group in groups]
            builders = [
                self._builder(backend, group.layers, size)
                for group, size in zip(groups, sizes, strict=True)
            ]
            max_blocks = [-(-self.max_model_len // size) for size in sizes]
            buffers = self._buffers(needs, sizes, max_blocks)
            self._note("workspaces")
            table = self._request_table(needs, max_blocks)
            self._note("request table")
            of_drafter = {layer.layer_id for layer in host.draft_layers}
            drafts = [[la for la in group.layers if la.layer_id in of_drafter] for group in groups]
            draft_builders = [
                self._builder(backend, layers, size) if layers else None
                for layers, size in zip(drafts, sizes, strict=True)
            ]
            self._note("workspaces")
            states = create_states(self.model, self.max_num_reqs, needs, self.format.dtype)
            self._note("recurrent states")
        if self.ahead is not None and self.ahead.is_compiling:
            with self._phase("libraries", shown=False), torch.inference_mode():
                models = (self.model, getattr(speculator, "model", None))
                load_libraries(models, self.max_num_tokens, self.graphs, self.vocab_size)
            self.ahead.wait_for(ATTENTION)
        with self._phase("attention", shown=False), torch.inference_mode():
            if self.graphs is not None:
                all_layers = [group.layers for group in groups]
                claims = self._claims(backend, self.graphs, needs)
                claims.verify(zip(builders, all_layers, draft_builders, drafts, strict=True))
                self.lowered = claims.lowered
                found = [(claim.backend, claim.verified) for claim in self.lowered]
                for group in (self.ranks, self.engines):
                    check_equal(group, "what their attention can capture", found)
        if self.ahead is not None:
            self.ahead.wait_for(GRAPHS)
        with self._phase("kv_cache"), torch.inference_mode():
            manager, mode = create_target_graphs(
                self.graphs,
                wanted_mode(config.graph, self.device_type),
                builders if states is None else [*builders, states.builder],
                self._query_lengths(needs),
                self.max_num_reqs,
                self.max_num_tokens,
            )

            def draft_graphs_on(cache: KVCache) -> DraftGraphs | None:
                if not isinstance(speculator, AutoRegressiveSpeculator):
                    return None
                attention = DraftAttention(
                    cache,
                    draft_builders,
                    table.block_tables,
                    self.max_num_reqs,
                    self.max_num_tokens,
                    self.max_model_len,
                    self.device,
                )
                of_target = () if manager is None else manager.wanted
                exchange = None if self.engines is None else self.engines.experts.exchange
                return DraftGraphs(
                    speculator, attention, table, self.graphs, of_target, mode, exchange
                )

            def draft_graph_bytes(target: Target) -> int:
                graphs = draft_graphs_on(target.cache)
                if graphs is None or manager is None:
                    return 0
                states = RebuiltStates(manager.wanted, target.create_forward_fn)
                return graphs.profile_memory(states)

            def target_on(cache: KVCache) -> Target:
                taps = needs.aux_hidden_state_boundaries
                shared = table if config.graph.cudagraph_whole_step else None
                return Target(self.model, cache, builders, buffers, manager, taps, shared, states)

            def token_graphs_of(target: Target) -> TokenGraphs | None:
                return create_token_graphs(self.graphs, manager, target, sampling, table, buffers)

            sampling = RowSampling(
                Sampler(config.speculative, self.device),
                needs.num_speculative_tokens,
                self.vocab_size,
            )
            cache = self._kv_cache(
                groups, manager, needs, target_on, token_graphs_of, draft_graph_bytes, states
            )
        self.memory["KV cache"] += cache.num_bytes
        self._note(None)
        target = target_on(cache)
        return RunnerParts(
            facts_of(
                loaded,
                cache,
                backend.name,
                needs,
                self.seconds,
                self.lowered,
                host.draft_layers,
                group_of(states, self.config.cache, cache.block_size),
            ),
            target,
            table,
            buffers,
            sampling,
            speculator,
            DeviceQueue(self.device),
            self.memory,
            create_sync(self.engines, target, needs.num_speculative_tokens + 1),
            token_graphs_of(target),
            draft_graphs_on(cache),
        )

    @contextmanager
    def _phase(self, name: str, shown: bool = True) -> Iterator[None]:
        start = time.monotonic()
        if shown:
            self.progress(Progress(name, 0, 1))
        yield
        if shown:
            self.progress(Progress(name, 1, 1))
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start

    def _note(self, purpose: str | None) -> None:
        """Add the memory allocated since the last call to `purpose`; None: to no purpose."""
        now = memory_allocated(self.device)
        if purpose is not None:
            self.memory[purpose] += max(0, now - self._allocated)
        self._allocated = now

    def _load_target(self) -> None:
        self.loaded = loaded = load_target(
            self.config,
            self.device,
            lambda done, total: self.progress(Progress("load", done, total)),
            lambda name, done, total: self.progress(Progress("download", done, total, name)),
            self.ranks,
            self.engines,
        )
        self.model, self.format = loaded.model, loaded.format
        self.max_model_len, self.vocab_size = loaded.max_model_len, loaded.vocab_size
        self.max_num_reqs = loaded.limits.max_num_seqs
        self.max_num_tokens = loaded.limits.max_num_batched_tokens

    def _draft_host(self) -> DraftModelHost:
        return DraftModelHost(
            self.max_model_len,
            self.model,
            self.loaded.resolved,
            self.device,
            lambda done, total: self.progress(Progress("load_drafter", done, total)),
            dtype=self.format.dtype,
            max_num_reqs=self.max_num_reqs,
            max_num_tokens=self.max_num_tokens,
            vocab_size=self.vocab_size,
            drafter=self.loaded.drafter,
            next_layer_id=len(self.model.attention_layers()),
        )

    def _builder(
        self, backend: AttentionBackend, layers: Sequence[AttentionLayer], block_size: int
    ) -> AttentionBuilder:
        bounds = (self.max_num_reqs, self.max_num_tokens, self.max_model_len)
        sizes = BuilderSizes(block_size, *bounds, self.format.dtype, self.device)
        return backend.create_builder(layers, sizes)

    def _request_table(self, needs: SpeculatorNeeds, max_blocks: Sequence[int]) -> RequestTable:
        return RequestTable(
            self.max_num_reqs, self.max_model_len, self.vocab_size, needs.num_speculative_tokens,
            max_blocks, self.device, self.vocab_size if needs.draft_logits else None,
        )  # fmt: skip

    def _buffers(
        self, needs: SpeculatorNeeds, block_sizes: Sequence[int], max_blocks: Sequence[int]
    ) -> InputBuffers:
        return InputBuffers(
            self.max_num_reqs,
            self.max_num_tokens,
            self.max_model_len,
            needs.num_speculative_tokens,
            block_sizes,
            max_blocks,
            self.device,
        )

    # --- graphs ---------------------------------------------------------------------------------

    def _graph_settings(self) -> GraphSettings | None:
        graph = self.config.graph
        if wanted_mode(graph, self.device_type) is CUDAGraphMode.NONE:
            return None
        return GraphSettings.create(
            graph,
            GraphPool(self._graph_backend()),
            self.max_num_tokens,
            lambda done, total, detail: self.progress(Progress("capture", done, total, detail)),
        )

    def _graph_backend(self) -> GraphBackend:
        return CudaGraphs(self.device)

    def _query_lengths(self, needs: SpeculatorNeeds) -> list[int]:
        """The query lengths of uniform batches, ascending: 1, and K + 1 for each K that may be
        used."""
        chosen = [k for k in self.config.speculative.draft_counts if needs.num_speculative_tokens]
        return sorted({1, needs.num_speculative_tokens + 1, *(count + 1 for count in chosen)})

    def _claims(
        self, backend: AttentionBackend, settings: GraphSettings, needs: SpeculatorNeeds
    ) -> ClaimsAtStart:
        mode = wanted_mode(self.config.graph, self.device_type)
        cases = claim_cases(mode, self._query_lengths(needs))
        setup = claim_setup(self.max_num_reqs, self.max_model_len, self.block_size)
        return ClaimsAtStart(backend, settings.pool, setup, self.format.dtype, self.device, cases)

    # --- memory ---------------------------------------------------------------------------------

    def _kv_cache(
        self,
        groups: Sequence[KVCacheGroup],
        manager: CudaGraphManager | None,
        needs: SpeculatorNeeds,
        target_on: Callable[[KVCache], Target],
        token_graphs_of: Callable[[Target], TokenGraphs | None],
        draft_graph_bytes: Callable[[Target], int],
        states: RecurrentStates | None,
    ) -> KVCache:
        load = StepLoad(self.max_num_reqs, self.max_num_tokens)
        layout = KVLayout(groups, self.block_size, self.format.dtype, load)

        def small_target() -> Target:
            return target_on(layout.allocate(2, self.device))

        profile = MemoryProfile(
            small_target,
            self.max_num_tokens,
            self.max_num_reqs * (needs.num_speculative_tokens + 1),
            None if self.graphs is None else self.graphs.pool,
            manager,
            token_graphs_of,
            draft_graph_bytes,
        )
        available = least_of(self.ranks, self._kv_cache_bytes(profile))
        most_tokens, state_bytes = self.max_num_reqs * self.max_model_len, 0
        if states is not None:
            spare = available - layout.bytes_of(layout.blocks_for(self.max_model_len))
            saved = save_states(
                states, self.config.cache, self.block_size, available, spare, most_tokens
            )
            self.memory["saved recurrent states"] += saved
            available, state_bytes = available - saved, states.num_bytes
        num_blocks = num_kv_blocks(
            self.config.cache, self.device, available, layout, self.max_model_len,
            most_tokens, state_bytes,
        )  # fmt: skip
        log_fp8_memory(self.config.cache, available, layout, num_blocks)
        with memory_faults("the KV cache"):
            return layout.allocate(num_blocks, self.device)

    def _kv_cache_bytes(self, profile: MemoryProfile) -> int:
        return kv_cache_bytes(self.config.cache, self.device, profile, self.memory)
