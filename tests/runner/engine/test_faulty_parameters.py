"""A request with parameters that the worker cannot store: it ends, and no other is affected."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from slipstream.configs.schema import SpeculativeConfig
from slipstream.runner.messages import AddRequest, RequestOutput, SamplingParams

from ...speculators.tiny_engine import TinyEngine, prompts, save_llama


def outputs_of(made: TinyEngine, asked: list[AddRequest]) -> dict[str, list[RequestOutput]]:
    made.engine.handle([*asked])
    found: dict[str, list[RequestOutput]] = {request.request_id: [] for request in asked}
    while made.engine.has_work():
        for step in made.engine.step():
            for output in step.outputs:
                found[output.request_id].append(output)
    return found


@pytest.mark.parametrize("method", ["ngram", "off"])
def test_parameters_that_cannot_be_stored_end_only_their_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    made = TinyEngine(save_llama(tmp_path, layers=2), SpeculativeConfig(method))
    texts = prompts(4, seed=3)
    texts[1] = (texts[1] * 110)[:110]  # prefilled in several steps

    def asked(bias: dict[int, float]) -> list[AddRequest]:
        return [
            AddRequest(str(i), text, SamplingParams(i, 12, temperature=0.0, logit_bias=given))
            for i, text in enumerate(texts)
            for given in [bias if i in (1, 2) else {5: 0.5}]
        ]

    wanted = outputs_of(made, asked({5: 0.5}))
    biases = made.engine._runner.table.sampling.biases  # type: ignore[attr-defined]
    write = biases.set

    def fail(slot: int, columns: np.ndarray) -> None:
        if columns.shape[1] == 2:
            raise MemoryError("too much")
        write(slot, columns)

    monkeypatch.setattr(biases, "set", fail)
    found = outputs_of(made, asked({5: 0.5, 6: 0.5}))
    for name in ("1", "2"):
        (output,) = found[name]
        assert output.finish_reason == "error" and "MemoryError" in (output.error or "")
    for name in ("0", "3"):
        tokens = [[i for o in run[name] for i in o.token_ids] for run in (found, wanted)]
        assert tokens[0] == tokens[1] and len(tokens[0]) == 12
    made.close()
