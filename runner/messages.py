"""The messages between server and worker, as msgspec structs: lists of them, one per step each way.

Token ids and numbers only: the worker never sees text, the server never sees tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

# Limits on the lists of one request. The server documents and checks them; the worker checks again.
MAX_BIASES = 1024
MAX_STOP_TOKEN_IDS = 2048  # the client's and the model's
MAX_BAD_WORD_TOKENS = 1 << 14  # of all words, in each spelling


class GrammarSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """A structured-output constraint, in the form the grammar library compiles."""

    kind: str  # "json_schema" | "json_object" | "regex" | "choice" | "grammar" | "structural_tag"
    value: str = ""  # the schema, pattern or grammar; for "choice" a JSON list of strings
    param: str = ""  # the request's parameter that holds it, for the server's error messages


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """The sampling parameters of one request, validated and in token ids. `seed` is always set."""

    seed: int
    max_tokens: int
    # the client chose it: output must not depend on the rest of the batch
    has_own_seed: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: list[int] | None = None
    bad_words_token_ids: list[list[int]] = []
    min_tokens: int = 0
    stop_token_ids: list[int] = []  # the model's EOS ids included unless ignore_eos
    # How many of the likeliest tokens to report for each emitted token, besides that token itself.
    logprobs: int | None = None  # None = no log probabilities, 0 = those of emitted tokens only
    prompt_logprobs: int | None = None  # the same for prompt tokens
    grammar: GrammarSpec | None = None
    speculative_enabled: bool = True
    speculative_max_tokens: int | None = None  # maximum number of drafts per step; None = no limit
    prediction_token_ids: list[int] = []  # OpenAI's `prediction`, for the n-gram drafter
    report_drafts: bool = False  # return the ids of all verified drafts


# --- server -> worker -------------------------------------------------------------------------


class AddRequest(msgspec.Struct, tag="add", omit_defaults=True):
    """A request to run. Lower `priority` runs first, then earlier arrival."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    priority: int = 0
    cache_salt: str = ""  # requests share cached KV blocks only if their salts are equal


class Child(msgspec.Struct, array_like=True, frozen=True):
    """The part of an `AddRequest` that differs between the children of one HTTP request."""

    request_id: str
    prompt: int  # index of its prompt
    seed: int
    max_tokens: int
    prompt_logprobs: int | None


class AddChildren(msgspec.Struct, tag="children", omit_defaults=True):
    """Several `AddRequest`s with the same parameters; each distinct prompt is held once.

    `channel.share` makes it.
    """

    prompts: list[list[int]]
    sampling: SamplingParams  # those of the first child
    children: list[Child]
    priority: int = 0
    cache_salt: str = ""

    def requests(self) -> list[AddRequest]:
        """Unpack the requests. They share prompt and parameter objects, which must not be
        changed."""
        return [
            AddRequest(
                child.request_id,
                self.prompts[child.prompt],
                msgspec.structs.replace(
                    self.sampling,
                    seed=child.seed,
                    max_tokens=child.max_tokens,
                    prompt_logprobs=child.prompt_logprobs,
                ),
                self.priority,
                self.cache_salt,
            )
            for child in self.children
        ]


class AbortRequests(msgspec.Struct, tag="abort"):
    """Forget these requests; unknown ids are ignored. No output follows for them."""

    request_ids: list[str]


class ResetPrefixCache(msgspec.Struct, tag="reset_prefix_cache"):
    """Drop every cached block that no request holds. There is no reply."""


class SetVocabulary(msgspec.Struct, tag="vocabulary"):
    """The bytes of every token, which compiling grammars needs. Sent before any request."""

    tokens: list[bytes]  # in id order; empty for a token without text, such as a control token
    eos_token_ids: list[int]  # the tokens that may follow a complete grammar


class ChangeSpeculator(msgspec.Struct, tag="change_speculator"):
    """Swap the drafter's weights between two steps. `StepOutputs.speculator` answers each message.

    `action` "load" reads the checkpoint `model` and checks that it fits; "try" swaps it in; then
    "keep" or "revert" must end the trial.
    """

    action: str
    model: str = ""


class Shutdown(msgspec.Struct, tag="shutdown"):
    """Stop after the current step and exit with status 0."""


ToWorker = (
    AddRequest | AbortRequests | ResetPrefixCache | SetVocabulary | ChangeSpeculator | Shutdown
)


# --- worker -> server -------------------------------------------------------------------------


class Progress(msgspec.Struct, tag="progress"):
    """Start-up progress. `phase` is "download", "load" or "load_drafter", which count bytes, or
    "kv_cache" or "capture"."""

    phase: str
    done: int
    total: int
    detail: str = ""


class Ready(msgspec.Struct, tag="ready"):
    """The worker is ready; its fields are what the server needs to know about it."""

    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    eos_token_ids: list[int]
    device: str
    dtype: str
    attention_backend: str
    speculative_method: str
    num_speculative_tokens: int
    startup_seconds: dict[str, float]  # by phase
    max_num_seqs: int  # limits of a step: as configured, else as chosen for the GPU and the model
    max_num_batched_tokens: int
    device_name: str = ""  # the GPU's name as its driver reports it
    # Bytes of weights that every decode step reads; 0 = unknown (weights packed for the CPU).
    weight_bytes: int = 0
    expert_bytes: int = 0  # of all routed experts, which a step reads as far as tokens choose them
    expert_share: float = 0.0  # of these that one token reads
    draft_weight_bytes: int = 0  # the drafter's, read once per draft
    kv_bytes_per_token: int = 0
    lowered_claims: list[str] = []  # attention back ends whose claims failed their start-up test
    weight_formats: str = ""  # of quantised weights, such as "int4" or "Q4_K, Q6_K"


class Fatal(msgspec.Struct, tag="fatal"):
    """The worker is about to exit; `message` is one sentence for the user."""

    message: str
    of_drafter: bool = False  # only the drafter kept it from starting


class TokenLogprobs(msgspec.Struct, array_like=True, gc=False):
    """Log probabilities for one position: of its token, and of the likeliest tokens there."""

    token_id: int
    logprob: float  # natural logarithm
    rank: int  # 1 = most likely
    # The likeliest first, as many as the request wants. They include `token_id` if it is likely
    # enough.
    top_ids: list[int]
    top_logprobs: list[float]


class RequestOutput(msgspec.Struct, omit_defaults=True, gc=False):
    """What one step yields for one request."""

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None  # one per token in `token_ids`
    # Those of the whole prompt, sent once, in the form of `pack_logprobs`.
    prompt_logprobs: list[bytes] | None = None
    finish_reason: str | None = None  # "stop" | "length" | "error"
    stop_token_id: int | None = None  # the stop token that ended it, the last of `token_ids`
    error: str | None = None  # one sentence, with finish_reason "error"
    invalid_request: bool = False  # with `error`: the request is at fault (HTTP 400)
    num_cached_tokens: int = 0  # prompt tokens from the prefix cache; set in the first output
    num_draft_tokens: int = 0  # drafts verified in this step
    num_accepted_tokens: int = 0  # drafts accepted in this step
    draft_token_ids: list[int] | None = None  # drafts verified in this step, if to be reported


class ExpertLoad(msgspec.Struct):
    """What the experts of an engine's first rank computed since its last report."""

    tokens: int  # counted once for each expert that they chose
    # Tokens of a layer's busiest expert here, divided by the mean of all its experts; the mean of
    # this over layers.
    imbalance: float


class StepStats(msgspec.Struct):
    """Counters of one step (all are increments) and gauges after it."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0  # 0 .. 1
    prefix_cache_queries: int = 0  # tokens looked up
    prefix_cache_hits: int = 0  # tokens found
    num_preemptions: int = 0
    num_prompt_tokens: int = 0  # prompt tokens computed
    num_drafts: int = 0  # rows that verified at least one draft
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_pos: list[int] = []  # [K] accepted drafts at position i
    num_plain_steps: int = 0  # sampling rows without a draft
    num_generated_tokens: int = 0
    # Of a step of decode rows whose duration is known: that, and how long its tokens would take
    # without drafts, by the measured duration of such steps.
    decode_seconds: float = 0.0
    seconds_without_drafts: float = 0.0
    current_k: int | None = None  # drafts made after the step; None = no request could have any
    k_reason: str = ""
    drafter_healthy: bool | None = None  # None = not reported in this step
    drafter_troubles: dict[str, int] = {}  # problems noticed since the last report, by kind
    expert_load: ExpertLoad | None = None  # None = not reported in this step


class SpeculatorChanged(msgspec.Struct):
    """The answer to a `ChangeSpeculator`."""

    error: str | None = None  # one sentence; the drafter is then unchanged


class StepOutputs(msgspec.Struct, tag="step"):
    """All that one step yields."""

    outputs: list[RequestOutput]
    stats: StepStats
    speculator: SpeculatorChanged | None = None


class StartRanks(msgspec.Struct, tag="ranks"):
    """The first rank of an engine on several hosts listens, and the others can be started."""

    rendezvous: str  # see `collectives.meet`
    answers: str  # the endpoint of the ranks' answers
    commands: list[str]  # those of the commands of rank 1, 2 ...


class EnginesMeet(msgspec.Struct, tag="engines_meet"):
    """The first of the engines that share experts on several hosts listens for all their ranks, so
    that the other engines can be started."""

    rendezvous: str


FromWorker = EnginesMeet | StartRanks | Progress | Ready | Fatal | StepOutputs

encoder = msgspec.msgpack.Encoder()
to_worker_decoder = msgspec.msgpack.Decoder(list[ToWorker | AddChildren])
from_worker_decoder = msgspec.msgpack.Decoder(list[FromWorker])
_logprobs_decoder = msgspec.msgpack.Decoder(list[TokenLogprobs])
_PIECE_VALUES = 20_000  # log probabilities per piece, so that decoding one takes milliseconds


def pack_logprobs(items: Sequence[TokenLogprobs]) -> list[bytes]:
    """Encode the log probabilities of consecutive prompt tokens in pieces.

    As objects, those of a long prompt use a hundred megabytes. Code that only passes them on need
    not decode them, and their consumer can do so piece by piece.
    """
    count = max(1, _PIECE_VALUES // (len(items[0].top_ids) + 1)) if items else 1
    return [encoder.encode(items[at : at + count]) for at in range(0, len(items), count)]


def unpack_logprobs(pieces: Iterable[bytes]) -> list[TokenLogprobs | None]:
    """Decode the pieces of a whole prompt. The first entry is None, for the first token."""
    found: list[TokenLogprobs | None] = [None]
    for piece in pieces:
        found += _logprobs_decoder.decode(piece)
    return found
