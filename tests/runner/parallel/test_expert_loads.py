"""Loads of experts: reports at times, of what was counted since the last one."""

from __future__ import annotations

import pytest
import torch

from slipstream.runner.messages import ExpertLoad, StepStats
from slipstream.runner.parallel.expert_loads import ExpertLoads, find_loads
from slipstream.server.metrics import Metrics


def test_reports_come_at_times_and_cover_what_was_new() -> None:
    # Two layers of four experts, two of which are here.
    layers = [torch.tensor([6, 1, 3]), torch.tensor([0, 0, 0])]
    now = [0.0]
    loads = ExpertLoads(layers, 4, seconds=5.0, clock=lambda: now[0])
    loads.poll()
    assert loads.take() is None  # too early
    now[0] = 5.0
    loads.poll()  # starts a copy
    layers[0] += torch.tensor([0, 100, 0])  # counted next time
    assert loads.take() is None
    loads.poll()
    # 10 pairs in the first layer, 2.5 for each expert; no token came to the second.
    assert loads.take() == ExpertLoad(tokens=4, imbalance=pytest.approx(3 / 2.5))
    assert loads.take() is None
    layers[1] += torch.tensor([100, 100, 0])
    now[0] = 10.0
    loads.poll()
    loads.poll()
    # 100 of 100 pairs in one layer, 100 of 200 in the other
    assert loads.take() == ExpertLoad(tokens=200, imbalance=pytest.approx((4 + 2) / 2))
    now[0] = 15.0
    loads.poll()
    loads.poll()
    assert loads.take() is None  # nothing was computed


def test_a_model_with_whole_experts_has_no_loads() -> None:
    assert find_loads(torch.nn.Linear(1, 1)) is None
    assert find_loads(object()) is None


def test_the_metrics_show_loads_by_engine() -> None:
    metrics = Metrics("slipstream", "m")
    metrics.add_engines(2)
    metrics.engines[1].step(StepStats(expert_load=ExpertLoad(30, 1.5)))
    metrics.engines[1].step(StepStats(expert_load=ExpertLoad(12, 1.25)))
    metrics.engines[1].step(StepStats())
    lines = metrics.text().decode().splitlines()
    labels = '{engine="1",model_name="m"}'
    assert f"slipstream:expert_tokens_total{labels} 42.0" in lines
    assert f"slipstream:expert_load_imbalance{labels} 1.25" in lines
    assert f"slipstream:expert_tokens_total{labels.replace('1', '0')} 0.0" in lines
