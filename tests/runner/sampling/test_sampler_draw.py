"""Tokens chosen by the output head itself equal those sampled from the written logits."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from slipstream.kernels.linear.head_sample import pick_rows, sample_head_reference
from slipstream.kernels.linear.linear_choice import H100_WINNERS
from slipstream.kernels.linear.linear_tuned import LinearChooser
from slipstream.runner.batch.sampling_state import Feature
from slipstream.runner.messages import SamplingParams
from slipstream.runner.models.base import TextModel
from slipstream.runner.models.layers import WeightFormat
from slipstream.runner.models.registry import build_model
from slipstream.runner.sampling.sampler import SamplingPath
from slipstream.speculators.base import DraftModelSpeculator

from ..sampler_harness import CPU, Table, rows_of, sampler

V, H = 50, 16
GREEDY, WARM = (SamplingParams(seed=s, max_tokens=9, temperature=t) for s, t in ((1, 0), (2, 0.7)))


@pytest.mark.parametrize(
    ("params", "drafts", "options"),
    [
        ([GREEDY, GREEDY], [[3, 4], []], {}),
        ([WARM, GREEDY, WARM], [[], [], []], {}),
        ([WARM, GREEDY], [[3, 4], [5]], {"rejection_sampling": "coupled"}),
        ([WARM, GREEDY], [[3], [5]], {"synthetic_acceptance_rates": (0.6, 0.3)}),
    ],
)
def test_drawing_equals_sampling(
    params: list[SamplingParams], drafts: list[list[int]], options: dict[str, object]
) -> None:
    for _ in range(20):
        table = Table.of([(of, [1, 2], [7]) for of in params], V)
        table.sampling.seed.random_(0, 2**40)
        rows = rows_of(table, list(range(len(params))), drafts, 2)
        hidden, weight = torch.randn(int(rows.cu_num_logits[-1]), H), torch.randn(V, H)
        for index in range(0, len(drafts)):  # drafts that stand, now and then
            at = rows.cu_num_logits_cpu[index]
            if drafts[index]:
                rows.draft_ids[at] = (hidden[at] @ weight.T).argmax()
        of = sampler(**options)
        assert of.path(table.sampling.features(rows.slots), any(drafts)) is SamplingPath.DRAW
        expected = of.sample(hidden @ weight.T, rows, table)
        got = of.draw(partial(sample_head_reference, hidden, weight), rows, table)
        for name in ("sampled_token_ids", "num_sampled", "num_rejected", "has_nan"):
            assert torch.equal(getattr(got, name), getattr(expected, name)), name
        assert got.logprobs is None


def test_a_graph_that_rejects_emits_what_sampling_does() -> None:
    """Greedy requests, and random ones with and without a client's seed, with and without
    drafts."""
    own = SamplingParams(seed=3, max_tokens=9, temperature=1.3, has_own_seed=True)
    params, drafts = [WARM, own, GREEDY, WARM, own], [[3, 4], [5, 6], [7, 8], [], [9]]
    every = Feature.GREEDY | Feature.RANDOM | Feature.SEEDED | Feature.UNSEEDED
    found = set()
    for _ in range(20):
        table = Table.of([(of, [1, 2], [7]) for of in params], V)
        table.sampling.seed.random_(0, 2**40)
        rows = rows_of(table, list(range(len(params))), drafts, 2)
        logits = torch.randn(int(rows.cu_num_logits[-1]), V + 3)  # padded
        likely = torch.where(rows.draft_ids >= 0, rows.draft_ids, 0)
        at = torch.arange(len(logits))[torch.rand(len(logits)) < 0.5]
        logits[at, likely[at]] += 9.0
        of = sampler()
        expected = of.sample(logits, rows, table)
        got = of.draw(partial(pick_rows, logits[:, :V]), rows, table, every, logits[:, :V])
        for name in ("sampled_token_ids", "num_sampled", "num_rejected", "has_nan"):
            assert torch.equal(getattr(got, name), getattr(expected, name)), name
        found |= set(enumerate(got.num_sampled.tolist()))
    assert len(found) > 10  # each request is cut short in several places


def test_drafts_are_picked_by_the_head_unless_their_distribution_is_kept() -> None:
    """This also holds if the draft vocabulary differs from the target's."""
    torch.manual_seed(0)

    class Head:
        weight = torch.randn(V, H)
        draft_to_target = torch.randperm(200)[:V]
        asked: list[str] = []

        def pick_tokens(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
            self.asked.append("pick")
            return sample_head_reference(hidden, self.weight)

        def compute_logits(self, hidden: Tensor) -> Tensor:
            self.asked.append("logits")
            return hidden @ self.weight.T

    class Drafter(DraftModelSpeculator):
        def __init__(self, draft_logits: Tensor | None) -> None:
            self.model = Head()  # type: ignore[assignment]
            self.use_requests(SimpleNamespace(draft_logits=draft_logits))  # type: ignore[arg-type]
            longs = {"dtype": torch.int64}
            self.temperature = torch.tensor([0.0, 99.0, 0.0, 1.0])
            self.seed = torch.zeros(4, **longs)
            self.noise_positions, self.step = torch.arange(4), torch.zeros(4, **longs)
            self.idx_mapping = torch.tensor([2, 0, 3, -1], dtype=torch.int32)
            self.draft_tokens, self.decode_ids = torch.zeros(4, 2, **longs), torch.zeros(4).int()

        def propose(self, inputs: object) -> Tensor:
            raise NotImplementedError

    hidden = torch.randn(4, H)
    Drafter.__abstractmethods__ = frozenset()
    plain, keeping = Drafter(None), Drafter(torch.full((4, 2, 200), -torch.inf))
    for of in (plain, keeping):
        of.draw_drafts(hidden)
    greedy = [0, 2]
    assert torch.equal(plain.draft_tokens[greedy], keeping.draft_tokens[greedy])
    assert not torch.equal(plain.draft_tokens, keeping.draft_tokens)  # one row draws
    assert Head.asked == ["pick", "logits"]
    kept = keeping.draft_logits
    assert kept is not None and kept[0, 0, Head.draft_to_target].isfinite().all()
    assert kept.isfinite().sum() == V  # of the row that draws; greedy and padded rows keep none


def test_nan_is_reported() -> None:
    table = Table.of([(GREEDY, [1, 2], []), (WARM, [1, 2], [])], V)
    rows = rows_of(table, [0, 1], [[], []], 0)
    hidden = torch.randn(2, H)
    hidden[1, 3] = float("nan")
    pick = partial(sample_head_reference, hidden, torch.randn(V, H))
    assert sampler().draw(pick, rows, table).has_nan.tolist() == [False, True]


def test_requests_that_need_logits_get_them() -> None:
    def path(params: SamplingParams, drafts: list[int], mask: bool = False) -> SamplingPath:
        table = Table.of([(params, [1, 2], [])], V)
        return sampler().path(table.sampling.features([0]), bool(drafts), mask)

    assert path(GREEDY, [4]) is path(WARM, []) is SamplingPath.DRAW
    assert path(WARM, [4]) is SamplingPath.REJECT  # recovery needs logits
    assert path(GREEDY, [], mask=True) is path(WARM, [4], mask=True) is SamplingPath.GENERAL
    for options in (
        {"logprobs": 0},
        {"top_k": 5},
        {"top_p": 0.5},
        {"min_p": 0.1},
        {"presence_penalty": 1.0},
        {"repetition_penalty": 1.2},
        {"logit_bias": {3: 1.0}},
        {"allowed_token_ids": [3]},
        {"min_tokens": 2, "stop_token_ids": [4]},
        {"bad_words_token_ids": [[4]]},
    ):
        params = SamplingParams(seed=0, max_tokens=9, temperature=1.0, **options)
        assert path(params, []) is path(params, [4]) is SamplingPath.GENERAL, options


def test_models_whose_logits_are_more_than_a_product_do_not_pick() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    heads = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    chooser = LinearChooser(H100_WINNERS)
    models = {}
    for kind in ("Llama", "Gemma3Text"):
        config = getattr(transformers, f"{kind}Config")(**sizes, **heads)
        config.architectures = None
        models[kind] = build_model(config, WeightFormat(CPU, torch.bfloat16, linear=chooser))
    assert models["Llama"].pick_tokens is not None
    assert models["Gemma3Text"].pick_tokens is None  # soft-capped
    plain = build_model(
        transformers.LlamaConfig(**sizes, **heads), WeightFormat(CPU, torch.float32)
    )
    assert isinstance(plain, TextModel) and plain.pick_tokens is None  # torch's, as on a CPU
    assert WeightFormat(CPU, torch.float32).linear is None
