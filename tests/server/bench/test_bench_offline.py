"""`bench offline`: decode speed without prefill, its roofline, its noise, and the comparison."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.configs.load import load_config
from slipstream.configs.schema import Config
from slipstream.runner.messages import Ready
from slipstream.server.bench import offline_command as bench_offline_command
from slipstream.server.bench import output as bench_plot
from slipstream.server.bench.offline import (
    OfflineBench,
    Timing,
    Workload,
    figures,
    gains,
    heading,
    line,
    noise_of,
    peak_bandwidth,
    prompts,
)
from slipstream.server.commands import main
from slipstream.server.drafters.acceptance import MeasurementFailed


def ready(**facts: Any) -> Ready:
    return Ready(
        2048, 1000, 10, 16, [2], "cuda", "bfloat16", "triton", "off", 0, {}, 8, 64, **facts
    )


def test_figures_exclude_prompts_and_count_generated_tokens() -> None:
    load = Workload((4,), input_len=100, output_len=20)
    prefill, whole = Timing(1.0, 1, 4, 4), Timing(3.0, 11, 84, 44)
    facts = ready(weight_bytes=10_000, kv_bytes_per_token=5)
    found = figures(facts, 4, load, prefill, whole, 1e6)
    assert found["decode_tok_s"] == 40.0 and found["per_user_tok_s"] == 10.0
    assert found["whole_tok_s"] == 28.0
    assert found["step_ms"] == 200.0 and found["tokens_per_step"] == 2.0
    # 10,000 bytes of weights and 4 requests of 110.5 tokens of 5 bytes, in 0.2 s of 1e6 bytes/s.
    assert found["roofline"] == pytest.approx((10_000 + 4 * 110.5 * 5) / 0.2e6, abs=1e-4)
    assert figures(ready(), 4, load, prefill, whole, 1e6)["roofline"] is None
    assert figures(facts, 4, load, prefill, whole, None)["roofline"] is None
    with pytest.raises(MeasurementFailed, match="too short"):
        figures(facts, 4, load, whole, prefill, None)


def test_a_drafter_reads_its_weights_once_per_draft() -> None:
    load = Workload((4,), input_len=100, output_len=20)
    whole = Timing(3.0, 11, 84, 44, num_accepted=40, num_drafts=40, num_draft_tokens=120)
    facts = ready(weight_bytes=10_000, draft_weight_bytes=1_000)
    found = figures(facts, 4, load, Timing(1.0, 1, 4, 4), whole, 1e6)
    assert found["bytes_per_step"] == 13_000
    assert found["acceptance"] == pytest.approx(1 / 3, abs=1e-4)


def test_experts_count_as_far_as_tokens_touch_them() -> None:
    load = Workload((4,), input_len=100, output_len=20)
    whole = Timing(3.0, 11, 84, 44, num_accepted=40, num_drafts=40, num_draft_tokens=40)
    facts = ready(weight_bytes=1_000, expert_bytes=8_000, expert_share=0.25)
    found = figures(facts, 4, load, Timing(1.0, 1, 4, 4), whole, 1e6)
    assert found["bytes_per_step"] == round(1_000 + 8_000 * (1 - 0.75**8))


async def test_one_start_measures_all_batch_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    pace = {"tokens_per_step": 3, "seconds_per_step": 0.02}
    config = load_config({"hf_overrides": json.dumps(pace), "speculative_config": "off"})
    load = Workload((4, 6), input_len=4, output_len=29, num_iters=1, num_warmup=1)
    ticks: list[int] = []
    async with OfflineBench(config, engine="front_end_engine:build") as bench:
        rows = [
            await bench.measure(n, load, tick=lambda: ticks.append(1)) for n in load.batch_sizes
        ]
        assert bench.startup_seconds > 0 and bench.name == "ngram K=2"
    assert len(ticks) == load.num_runs(True) == 4 + 4  # 8 requests, since acceptance varies
    for batch, row in zip((4, 6), rows, strict=True):
        assert row["num_runs"] == 2
        assert row["batch"] == batch and row["roofline"] is None
        # 30 tokens take ten steps of at least 20 ms, one of them the prompt's. The time of the
        # prompt's own run is subtracted, though, and that run may have been slow.
        assert row["decode_tok_s"] <= batch * 29 / (9 * 0.02) * 1.5
        assert row["step_ms"] >= 14
        assert row["tokens_per_step"] == pytest.approx(29 / 9, abs=0.01)
    runs = [{"name": "off", "results": rows}, {"name": "on", "results": rows}]
    assert gains(runs)[1].startswith("batch 6: no difference beyond noise (1.00 ×; spreads of")
    assert gains(runs[:1]) == []


def test_small_batches_with_drafts_are_repeated_to_average_acceptance() -> None:
    load = Workload((1, 3, 16), num_iters=3, num_warmup=1)
    assert [load.num_whole_runs(n, True) for n in load.batch_sizes] == [24, 9, 3]
    assert [load.num_whole_runs(n, False) for n in load.batch_sizes] == [3, 3, 3]
    assert (load.num_runs(True), load.num_runs(False)) == (12 + 36, 12 + 9)
    lucky, unlucky = Timing(1.0, 10, 28, 10, 18, 10, 30), Timing(2.0, 20, 28, 20, 8, 20, 60)
    assert Timing.mean([lucky, unlucky]) == Timing(1.5, 15, 28, 15, 13, 15, 45)


def test_prompts_differ_between_runs_unless_same_prompts_is_set() -> None:
    fresh, same = Workload((2,), 40), Workload((2,), 40, same_prompts=True)
    runs = [prompts(load, run, 2, 500) for load in (fresh, same) for run in (1, 2)]
    assert runs[0] != runs[1] and runs[2] == runs[3]
    assert all(len(prompt) == 40 and max(prompt) < 490 for run in runs for prompt in run)
    assert runs[2][0] != runs[2][1]  # so no request reuses another's blocks


@pytest.mark.parametrize(
    ("speed", "spreads", "said"),
    [
        (130.0, (0.05, 0.04), "on is 1.30 × off (spreads of 5.0 % and 4.0 %)"),
        (80.0, (0.05, 0.04), "on is 0.80 × off (spreads of 5.0 % and 4.0 %)"),
        (
            105.0,
            (0.05, 0.04),
            "no difference beyond noise (1.05 ×; spreads of 5.0 % and 4.0 %)",
        ),
        (
            130.0,
            (0.0, 0.5),
            "no difference beyond noise (1.30 ×; spreads of 0.0 % and 50.0 %)",
        ),
        (95.0, (0.0, 0.06), "no difference beyond noise (0.95 ×;"),
    ],
)
def test_a_gain_within_the_spreads_is_called_noise(
    speed: float, spreads: tuple[float, float], said: str
) -> None:
    rows = [
        {"batch": 8, "decode_tok_s": speed_of, "spread": spread}
        for speed_of, spread in zip((100.0, speed), spreads, strict=True)
    ]
    runs = [{"name": name, "results": [row]} for name, row in zip(("off", "on"), rows, strict=True)]
    (found,) = gains(runs)
    assert found.startswith(f"batch 8: {said}")


def test_the_spread_is_the_uncertainty_of_the_result() -> None:
    """Slowest minus fastest run where the fastest counts; two standard errors of a mean."""
    assert noise_of([1.0], False) is noise_of([1.0], True) is None
    assert noise_of([1.0, 1.25, 1.5], False) == 0.5
    assert noise_of([1.0, 3.0] * 8, True) == pytest.approx(2 * (16 / 15) ** 0.5 / 4)
    load = Workload((4,), input_len=100, output_len=20)
    prefill, whole = Timing(1.0, 1, 4, 4), Timing(3.0, 11, 84, 44)
    found = figures(ready(), 4, load, prefill, whole, None, noise=0.5)
    assert found["spread"] == 0.25 and found["num_iters"] == 3
    assert line(found).split()[5:7] == ["25.0", "%"] and "spread" in heading(None)
    alone = figures(ready(), 4, load, prefill, whole, None)
    assert alone["spread"] is None and line(alone).split()[5] == "-"


def test_plots_are_written_as_png_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"batch": n, "decode_tok_s": 10.0 * n} for n in (1, 8)]
    shown = {"model": "m", "runs": [{"name": "off", "results": rows}]}
    bench_plot.plot_offline(shown, str(tmp_path / "o.png"))
    samples = {"ttft": [0.1, 0.2], "tpot": [], "itl": [0.01], "e2el": [1.0]}
    found = {"model": "m", "output_throughput": 5.0, "samples": samples}
    bench_plot.plot_serve(found, str(tmp_path / "s.png"))
    for name in ("o.png", "s.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert main(["bench", "offline", "--plot", "x.pdf"]) == 2
    assert "must end in .png" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "named"),
    [([], "smollm2-135m"), (["smollm2-135m"], "smollm2-135m"), (["--served-model-name", "x"], "x")],
)
def test_figures_and_plot_name_the_model(
    model: list[str],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def measured(config: Config, load: Workload, args: object) -> dict[str, Any]:
        rows = [{"batch": n, "decode_tok_s": 10.0 * n} for n in load.batch_sizes]
        return {"name": config.speculative.method, "results": rows}

    drawn: list[str] = []
    monkeypatch.setattr(bench_offline_command, "_measure", measured)
    monkeypatch.setattr(bench_plot, "plot_offline", lambda f, path: drawn.append(f["model"]))
    command = ["bench", "offline", *model, "-sc", "off", "--plot", str(tmp_path / "x.png")]
    assert main([*command, "--output", "-"]) == 0
    assert drawn == [named]
    assert json.loads(capsys.readouterr().out)["model"] == named


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--batch-sizes", "1,x"], "--batch-sizes must be integers separated by commas"),
        (["--batch-sizes", "0"], "--batch-sizes must each be at least 1"),
        (["--output-len", "0"], "--output-len must be at least 1"),
        (
            ["--batch-sizes", "8", "--max-num-seqs", "4"],
            "--max-num-seqs must be at least",
        ),
        (["--plot", "x.pdf"], "must end in .png"),
        (["--output", "/nowhere/x.json"], "--output /nowhere/x.json: its folder does not exist"),
        (["--plot", "/nowhere/x.png"], "--plot /nowhere/x.png: its folder does not exist"),
        (["--num-warmup", "-1"], "--num-warmup must be at least 0"),
    ],
)
def test_wrong_arguments_are_one_sentence_before_anything_is_measured(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "offline", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_peak_bandwidth_is_known_only_for_measured_gpus() -> None:
    assert peak_bandwidth("NVIDIA H100 80GB HBM3") == 3.08e12
    assert peak_bandwidth("NVIDIA H200") == 4.235e12
    assert peak_bandwidth("something else") is None
