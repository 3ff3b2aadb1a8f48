"""The sampling parameters and token counts of every request, in one permanent row per slot.

It knows nothing of batches: the sampler gathers rows by slot. Unused features cost nothing: their
tables are allocated when the first request needs them, and the host knows which features each slot
uses. Lists of client-chosen length are `RaggedRows`, never columns of a table with a row per slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntFlag

import numpy as np
import torch
from torch import Tensor

from ..messages import SamplingParams
from .host_copy import StagingPool
from .ragged_rows import RaggedRows

_FLOATS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")
_INTS = ("seed", "top_k", "min_tokens", "has_own_seed")
_MIN_TEMPERATURE = 1e-5  # a lower temperature counts as 0: logits / temperature would overflow


class Feature(IntFlag):
    """The sampling features that a request can use."""

    RANDOM = 1
    BIAS = 2
    ALLOWED = 4
    MIN_TOKENS = 8
    PENALTIES = 16
    BAD_WORDS = 32
    MIN_P = 64
    TOP_K = 128
    TOP_P = 256
    LOGPROBS = 512
    GREEDY = 1024
    REPETITION = 2048  # set with PENALTIES
    SEEDED = 4096  # set with RANDOM if the client chose the seed
    UNSEEDED = 8192  # set with RANDOM if the server chose the seed


# Features that change logits by more than the temperature does.
PROCESSED = ~(
    Feature.RANDOM | Feature.LOGPROBS | Feature.GREEDY | Feature.SEEDED | Feature.UNSEEDED
)


class SamplingState:
    """R rows of sampling parameters on the device, and the host's flags of features."""

    def __init__(self, max_num_reqs: int, vocab_size: int, device: torch.device) -> None:
        self.max_num_reqs = max_num_reqs
        self.vocab_size = vocab_size
        self._device = device
        self._pool = StagingPool(device)
        self._floats = torch.zeros(len(_FLOATS), max_num_reqs, device=device)
        self._ints = torch.zeros(len(_INTS), max_num_reqs, dtype=torch.int64, device=device)
        self.temperature, self.top_p, self.min_p = self._floats[:3]  # [R] float32
        self.presence, self.frequency, self.repetition = self._floats[3:]  # [R] float32
        # [R] int64 each; has_own_seed is 1 if the client chose the seed
        self.seed, self.top_k, self.min_tokens, self.has_own_seed = self._ints
        self.top_p.fill_(1.0)
        self.repetition.fill_(1.0)
        self.biases = RaggedRows(max_num_reqs, 2, device)  # (token id, the bits of its float32)
        # forbidden until min_tokens are emitted
        self.stop_ids = RaggedRows(max_num_reqs, 1, device)
        # One entry per token of all words: (token id, number of tokens after it in its word, index
        # of its word's first token in this list).
        self.bad_words = RaggedRows(max_num_reqs, 3, device)
        self.predictions = RaggedRows(max_num_reqs, 1, device)  # token ids, for the drafter
        # Tables with a row of vocabulary size per slot, allocated on first use.
        self.allowed_bits: Tensor | None = None  # [R, ceil(V / 32)] int32, all ones = no limit
        self.prompt_bin_mask: Tensor | None = None  # [R, ceil(V / 32)] int32
        # [R, V] int32, valid for slots that use penalties; `post_update` counts emitted tokens
        self.output_bin_counts: Tensor | None = None
        self._features = [0] * max_num_reqs  # bits of `Feature` as plain ints, for speed
        self.num_logprobs: list[int | None] = [None] * max_num_reqs  # host, per slot
        self._top_k_cpu = [0] * max_num_reqs
        # The last list of allowed tokens, and its bits. The children of a request share the list.
        self._packed: tuple[Sequence[int], np.ndarray] | None = None

    def set_request(
        self,
        slot: int,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],  # not empty if the request returns after a preemption
    ) -> None:
        """Store a request's parameters on the stream of the steps, without waiting for the device.

        Token ids outside the vocabulary are left out of lists, since they can never be sampled.
        """
        temperature = params.temperature if params.temperature >= _MIN_TEMPERATURE else 0.0
        floats = (
            temperature,
            params.top_p,
            params.min_p,
            params.presence_penalty,
            params.frequency_penalty,
            params.repetition_penalty,
        )
        self._write(self._floats[:, slot], np.array(floats, dtype=np.float32))
        seed = (params.seed + 2**63) % 2**64 - 2**63  # any integer, as two's complement
        ints = (seed, max(params.top_k, 0), params.min_tokens, params.has_own_seed)
        self._write(self._ints[:, slot], np.array(ints, dtype=np.int64))
        features = _features_of(params, temperature)
        self._features[slot] = int(features)
        self.num_logprobs[slot] = params.logprobs
        self._top_k_cpu[slot] = params.top_k
        if features & Feature.BIAS:
            ids = np.fromiter(params.logit_bias.keys(), dtype=np.int64)
            values = np.fromiter(params.logit_bias.values(), dtype=np.float32).view(np.int32)
            known = (ids >= 0) & (ids < self.vocab_size)
            self.biases.set(slot, np.stack([ids[known].astype(np.int32), values[known]]))
        if features & Feature.MIN_TOKENS:
            self.stop_ids.set(slot, self._known(params.stop_token_ids).astype(np.int32)[None])
        if features & Feature.BAD_WORDS:
            words = [w for w in params.bad_words_token_ids if w and len(self._known(w)) == len(w)]
            self.bad_words.set(slot, _word_entries(words))
        if params.allowed_token_ids is not None:
            self._set_allowed(slot, params.allowed_token_ids)
        if features & Feature.PENALTIES:
            self._set_counts(slot, prompt_token_ids, output_token_ids)
        if params.prediction_token_ids:
            prediction = self._known(params.prediction_token_ids).astype(np.int32)
            self.predictions.set(slot, prediction[None])

    def clear(self, slot: int) -> None:
        """Empty a slot's lists. Its scalars keep their values until `set_request` writes them."""
        features = self._features[slot]
        self._features[slot] = 0
        self.num_logprobs[slot] = None
        self._top_k_cpu[slot] = 0
        for lists in (self.biases, self.stop_ids, self.bad_words, self.predictions):
            lists.clear(slot)
        if features & Feature.ALLOWED and self.allowed_bits is not None:
            self.allowed_bits[slot].fill_(-1)

    def features(self, slots: Iterable[int]) -> Feature:
        """The union of the features that these slots use."""
        union = 0
        for slot in slots:
            union |= self._features[slot]
        return Feature(union)

    def uses(self, slot: int, features: Feature) -> bool:
        """True if the slot uses any of `features`."""
        return bool(self._features[slot] & int(features))

    def max_top_k(self, slots: Iterable[int]) -> int | None:
        """The largest top_k of these slots; None if one has no limit."""
        values = [self._top_k_cpu[slot] for slot in slots]
        return max(values) if values and min(values) > 0 else None

    def _table(self, *shape: int) -> Tensor:
        return torch.full((self.max_num_reqs, *shape), -1, dtype=torch.int32, device=self._device)

    def _write(self, target: Tensor, values: np.ndarray) -> None:
        """Copy host values to a device row. Floats are uploaded as the int32 of their bits."""
        if values.dtype == np.float32:
            target.copy_(self._pool.upload(values.view(np.int32)).view(torch.float32))
        else:
            target.copy_(self._pool.upload(values))

    def _set_allowed(self, slot: int, token_ids: Sequence[int]) -> None:
        if self.allowed_bits is None:
            self.allowed_bits = self._table(-(-self.vocab_size // 32))
        if self._packed is None or self._packed[0] is not token_ids:
            self._packed = token_ids, self._pack_bits(token_ids)
        self._write(self.allowed_bits[slot], self._packed[1])

    def _set_counts(self, slot: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        if self.output_bin_counts is None or self.prompt_bin_mask is None:
            self.prompt_bin_mask = self._table(-(-self.vocab_size // 32))
            self.output_bin_counts = torch.zeros(
                (self.max_num_reqs, self.vocab_size), dtype=torch.int32, device=self._device
            )
        self._write(self.prompt_bin_mask[slot], self._pack_bits(prompt))
        counts = np.bincount(self._known(output), minlength=self.vocab_size)
        self._write(self.output_bin_counts[slot], counts.astype(np.int32))

    def _known(self, token_ids: Sequence[int]) -> np.ndarray:
        ids = np.asarray(token_ids, dtype=np.int64)
        return ids[(ids >= 0) & (ids < self.vocab_size)]

    def _pack_bits(self, token_ids: Sequence[int]) -> np.ndarray:
        bits = np.zeros(-(-self.vocab_size // 32) * 32, dtype=np.uint8)
        bits[self._known(token_ids)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)


def _word_entries(words: Sequence[Sequence[int]]) -> np.ndarray:
    """The columns of `SamplingState.bad_words`, [3, total tokens of all words] int32."""
    tokens = [np.asarray(word, dtype=np.int32) for word in words]
    lengths = np.array([len(word) for word in words], dtype=np.int32)
    firsts = lengths.cumsum() - lengths
    after = [np.arange(length - 1, -1, -1) for length in lengths]
    columns = [np.concatenate([*tokens, []]), np.concatenate([*after, []])]
    return np.stack([*columns, np.repeat(firsts, lengths)]).astype(np.int32)


def _features_of(params: SamplingParams, temperature: float) -> Feature:
    has_penalties = (
        params.presence_penalty != 0
        or params.frequency_penalty != 0
        or params.repetition_penalty != 1
    )
    random = temperature > 0  # min_p, top_k and top_p do not change an argmax
    wanted = {
        Feature.RANDOM: random,
        Feature.SEEDED: random and params.has_own_seed,
        Feature.UNSEEDED: random and not params.has_own_seed,
        Feature.GREEDY: not random,
        Feature.BIAS: bool(params.logit_bias),
        Feature.ALLOWED: params.allowed_token_ids is not None,
        Feature.MIN_TOKENS: params.min_tokens > 0 and bool(params.stop_token_ids),
        Feature.PENALTIES: has_penalties,
        Feature.REPETITION: params.repetition_penalty != 1,
        Feature.BAD_WORDS: any(params.bad_words_token_ids),
        Feature.MIN_P: random and params.min_p > 0,
        Feature.TOP_K: random and params.top_k > 0,
        Feature.TOP_P: random and params.top_p < 1,
        Feature.LOGPROBS: params.logprobs is not None,
    }
    return Feature(sum(feature for feature, used in wanted.items() if used))
