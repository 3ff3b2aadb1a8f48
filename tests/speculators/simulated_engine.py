"""A simulated engine around the controller, with step costs measured on an H100.

The table: an 8B model with an EAGLE-3 head, milliseconds of a step by requests and by K.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from slipstream.speculators.draft_length.controller import DraftController
from slipstream.speculators.draft_length.step_costs import StepCosts

H100 = {
    1: (5.22, 5.74, 6.03, 6.33),
    8: (5.60, 5.94, 6.30, 6.63),
    32: (6.02, 6.87, 7.32, 7.77),
    64: (6.53, 7.53, 9.65, 9.74),
    128: (7.77, 10.1, 13.2, 15.9),
    256: (10.65, 16.3, 24.0, 30.1),
}
# A model with 128 experts and an EAGLE-3 head on an H200: milliseconds of real steps, and of steps
# of requests that share a context, and so the experts that it chooses.
EXPERTS = {32: (13.6, 14.5, 15.4, 15.6), 128: (16.8, 18.4, 20.8, 22.0)}
EXPERTS_AT_START = {32: (4.48, 6.35, 8.43, 8.43), 128: (7.52, 12.3, 12.9, 15.8)}
K = 3
GOOD, FAIR, POOR = (0.8, 0.75, 0.7), (0.5, 0.45, 0.4), (0.06, 0.05, 0.05)
Seconds = Callable[[int, float], float]  # (requests, drafts of each) -> seconds of a step
Law = Callable[[float], tuple[float, ...]]  # share of the run -> chance of each position
LAWS: dict[str, Law] = {
    "good": lambda at: GOOD,
    "fair": lambda at: FAIR,
    "poor": lambda at: POOR,
    "becomes poor": lambda at: GOOD if at < 0.5 else POOR,
    "becomes good": lambda at: POOR if at < 0.5 else GOOD,
    "goes up and down": lambda at: POOR if int(4 * at) % 2 else GOOD,
}


@functools.cache
def true_seconds(num_reqs: int, num_drafts: float) -> float:
    sizes = sorted(H100)
    row = [np.interp(num_drafts, range(K + 1), H100[size]) for size in sizes]
    return float(np.interp(num_reqs, sizes, row)) / 1000


def measured(sizes: Sequence[int] = tuple(H100)) -> dict[tuple[int, int], float]:
    return {(size, k): H100[size][k] / 1000 for size in sizes for k in range(K + 1)}


def controller(num_reqs: int, costs: StepCosts | None = None) -> DraftController:
    made = DraftController((1, 2, 3), num_reqs, costs or StepCosts(measured(), K))
    for slot in range(num_reqs):
        made.restart(slot, None, greedy=True)
    return made


@dataclass
class Run:
    """The result of a simulated run."""

    tokens: float = 0.0
    seconds: float = 0.0
    chosen: list[int] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds

    def num_changes(self) -> int:
        """Changes of K, not counting probes."""
        kept = [k for k, why in zip(self.chosen, self.reasons, strict=True) if why != "probe"]
        return sum(a != b for a, b in zip(kept, kept[1:], strict=False))


def fixed_speed(
    law: Law, num_reqs: int, k: int, num_steps: int, seconds: Seconds = true_seconds
) -> float:
    """The mean tokens per second of a fixed K."""
    laws = Counter(law(step / num_steps) for step in range(num_steps))
    tokens = sum(
        times * (1 + sum(np.prod(chances[: j + 1]) for j in range(k)))
        for chances, times in laws.items()
    )
    return float(num_reqs * tokens / (num_steps * seconds(num_reqs, k)))


@dataclass
class Traffic:
    """How a simulated run differs from uniform decode steps."""

    caps: Sequence[int] | None = None  # the most drafts of each request
    most_real: int = K  # a grammar cuts the others
    has_prompts: bool = False  # in every step, so that no step shows a cost
    slowed: Callable[[int], float] = lambda step: 1.0  # by other work


def simulate(
    law: Law,
    num_reqs: int,
    chooser: DraftController,
    num_steps: int,
    traffic: Traffic | None = None,
    seconds: Seconds = true_seconds,
) -> Run:
    """Simulate two steps in flight: K is chosen before the previous step has landed."""
    random, traffic = np.random.default_rng(num_reqs), traffic or Traffic()
    slots, caps = list(range(num_reqs)), np.array(traffic.caps or [K] * num_reqs)
    for slot, cap in enumerate(traffic.caps or ()):
        chooser.restart(slot, cap, greedy=True)
    chances = np.array([law(step / num_steps) for step in range(num_steps)])
    right = random.random((num_steps, num_reqs, K)) < chances[:, None]
    matches = np.cumprod(right, axis=2).sum(
        2
    )  # [steps, requests] drafts before the first wrong one
    noise = np.exp(random.normal(0, 0.02, num_steps))
    noise[random.random(num_steps) < 0.01] *= 5
    most = [min(k, int(caps.max())) for k in range(K + 1)]
    real = [np.minimum(np.minimum(k, caps), traffic.most_real) for k in range(K + 1)]
    means, lists = [float(each.mean()) for each in real], [each.tolist() for each in real]
    run, landing, k = Run(), [], 0
    for step in range(num_steps):
        choice = chooser.choose(slots)
        accepted = np.minimum(matches[step], real[k])
        took = seconds(num_reqs, means[k]) * traffic.slowed(step)
        run.tokens += num_reqs + int(accepted.sum())
        run.seconds += took
        run.chosen.append(choice.num_drafts)
        run.reasons.append(choice.reason)
        steady = most[k] if most[k] == choice.num_drafts else None
        landing.append((k, accepted.tolist(), float(took * noise[step]), steady))
        if len(landing) == 2:
            verified, brought, noted, steady = landing.pop(0)
            chooser.observe(slots, lists[verified], brought)
            if not traffic.has_prompts:
                chooser.costs.refine(num_reqs, means[verified], noted, steady)
        k = choice.num_drafts
    return run
