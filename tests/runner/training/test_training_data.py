"""What training reads from the engine: hidden states, replies and invented prompts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from slipstream.configs.schema import CacheConfig, Config, ModelConfig, SchedulerConfig
from slipstream.runner.errors import RunnerError
from slipstream.runner.training.data import (
    TargetReader,
    TrainingEngine,
    build_training_engine,
    head_geometry,
)
from slipstream.runner.training.text import (
    ReplyFile,
    ReplyOptions,
    TrainingPrompt,
    invent_prompts,
    write_replies,
)
from slipstream.speculators.training.dataset import TrainingSequence

from ...speculators.tiny_engine import VOCAB, save_llama

TAPS = (2, 4, 5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def config(folder: Path) -> Config:
    """Limits of 19 tokens per step, four requests and 160 tokens of KV."""
    return Config(
        model=ModelConfig(model=str(folder), dtype="float32", device="cpu"),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=19),
        cache=CacheConfig(block_size=4, num_gpu_blocks_override=41, enable_prefix_caching=False),
    )


@pytest.fixture(scope="module")
def target(config: Config) -> Iterator[TrainingEngine]:
    built = build_training_engine(config, lambda _: None)
    yield built
    built.engine.shutdown()


def prompts(lengths: list[int]) -> list[TrainingPrompt]:
    generator = torch.Generator().manual_seed(4)
    return [
        TrainingPrompt(tuple(torch.randint(VOCAB, (n,), generator=generator).tolist()), "d", n > 8)
        for n in lengths
    ]


def options(**changes: object) -> ReplyOptions:
    values = {
        "max_tokens": 6, "temperatures": (0.0, 1.0), "stop_token_ids": (), "seed": 1,
        "max_sequence": 40,
    }  # fmt: skip
    return ReplyOptions(**(values | changes))  # type: ignore[arg-type]


def test_hidden_states_are_those_of_transformers(
    target: TrainingEngine, config: Config, folder: Path
) -> None:
    oracle = LlamaForCausalLM.from_pretrained(folder).eval()
    generator = torch.Generator().manual_seed(2)
    sequences = [
        TrainingSequence(tuple(torch.randint(VOCAB, (n,), generator=generator).tolist()), 1)
        for n in (7, 50, 3, 119, 30, 2)  # longer than a step, and more than the KV holds at once
    ]
    draft_ids = torch.tensor([3, 17, 60])
    batch = TargetReader(target.parts, TAPS).read(sequences, draft_ids)
    assert not batch.taps.is_inference()
    for row, sequence in enumerate(sequences):
        length = len(sequence.token_ids)
        with torch.no_grad():
            ids = torch.tensor([sequence.token_ids])
            out = oracle(ids, output_hidden_states=True)
            embedded = oracle.model.embed_tokens(ids)[0]
        taps = torch.cat([out.hidden_states[b][0] for b in TAPS], dim=-1)
        torch.testing.assert_close(batch.taps[row, :length], taps, atol=2e-4, rtol=2e-4)
        assert torch.equal(batch.embeddings[row, :length], embedded)
        logits = out.logits[0]
        torch.testing.assert_close(
            batch.draft_logits[row, :length], logits[:, draft_ids], atol=2e-4, rtol=2e-4
        )
        assert torch.equal(batch.target_ids[row, :length], logits.argmax(-1))
        assert not batch.taps[row, length:].any()  # padding


def test_starting_head_is_the_targets_own(
    target: TrainingEngine, config: Config, folder: Path
) -> None:
    oracle = LlamaForCausalLM.from_pretrained(folder)
    rows, norm = TargetReader(target.parts, TAPS).starting_head(torch.tensor([5, 9]))
    torch.testing.assert_close(rows, oracle.lm_head.weight.detach()[[5, 9]])
    assert norm is not None and torch.equal(norm, oracle.model.norm.weight.detach())


def test_what_does_not_fit_is_a_named_error(target: TrainingEngine, config: Config) -> None:
    reader = TargetReader(target.parts, TAPS)
    assert reader.max_sequence_tokens == 160
    with pytest.raises(RunnerError, match="161 tokens"):
        reader.read([TrainingSequence((1,) * 161, 1)], torch.tensor([1]))
    with pytest.raises(ValueError, match="3 ascending boundaries"):
        TargetReader(target.parts, (2, 4, 9))


def test_geometry_is_the_targets_unless_told(target: TrainingEngine) -> None:
    shape = head_geometry(target.target_config, None, None, TAPS, 128)
    assert (shape.hidden_size, shape.intermediate_size, shape.head_dim) == (32, 48, 8)
    assert shape.draft_vocab_size == shape.vocab_size == VOCAB
    assert head_geometry(target.target_config, 24, 96, TAPS, 128).intermediate_size == 96


def test_replies_resume_where_a_run_was_interrupted(target: TrainingEngine, tmp_path: Path) -> None:
    asked = prompts([3, 5, 9, 4, 12, 2])
    whole = ReplyFile(tmp_path / "whole.jsonl")
    heard: list[int] = []
    write_replies(target.engine, asked, options(), whole, 3, heard.append)
    assert sorted(whole.sequences) == list(range(6)) and heard == [6] * 6
    # held-out prompts first, and greedy whatever their turn in the temperatures
    assert list(whole.sequences)[:2] in ([2, 4], [4, 2])

    path = tmp_path / "cut.jsonl"
    cut = ReplyFile(path)
    count = 0

    def on_reply(_: int) -> None:
        nonlocal count
        count += 1

    write_replies(target.engine, asked, options(), cut, 1, on_reply, lambda: count >= 2)
    assert len(cut.sequences) == 2 and not target.engine.has_work()
    with path.open("a") as file:
        file.write("[3, 4, ")  # the process died here
    again = ReplyFile(path)
    assert again.sequences == cut.sequences
    write_replies(target.engine, asked, options(), again, 3, heard.append)
    assert ReplyFile(path).sequences == whole.sequences


def test_prompts_that_leave_no_room_for_a_reply_are_left_out(
    target: TrainingEngine, tmp_path: Path
) -> None:
    file = ReplyFile(tmp_path / "replies.jsonl")
    wanted = options(max_sequence=10)
    write_replies(target.engine, prompts([3, 9, 8, 6]), wanted, file, 4, lambda _: None)
    assert {n: len(s.token_ids) for n, s in sorted(file.sequences.items())} == {0: 9, 3: 10}


def test_invented_prompts_are_whole_different_and_framed(target: TrainingEngine) -> None:
    stop = tuple(range(0, VOCAB, 4))
    forbidden = frozenset({2})
    found = list(
        invent_prompts(
            target.engine, [1, 5], [7], 60, options(stop_token_ids=stop), forbidden, window=4
        )
    )
    assert 0 < len(found) < 60
    words = [prompt.token_ids[2:-1] for prompt in found]
    assert all(prompt.token_ids[:2] == (1, 5) and prompt.token_ids[-1] == 7 for prompt in found)
    assert len(set(words)) == len(words)
    assert all(len(w) >= 4 and not set(w) & (set(stop) | forbidden) for w in words)
