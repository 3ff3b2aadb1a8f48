"""Packs requests that share their prompt and parameters, so that each part travels once.

The children of one HTTP request (`n`, several prompts) differ in their names, seeds and bounds
only. Sent one by one, 128 children of a long prompt would be 128 copies of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from .messages import AddChildren, AddRequest, Child, SamplingParams, ToWorker

_OWN = {"seed", "max_tokens", "prompt_logprobs"}  # what `Child` carries


def share(messages: Iterable[ToWorker]) -> Iterator[ToWorker | AddChildren]:
    """The messages in their order; neighbours that share their parameters become one message."""
    group: list[AddRequest] = []
    for message in messages:
        if isinstance(message, AddRequest) and (not group or _are_alike(group[0], message)):
            group.append(message)
            continue
        yield from _packed(group)
        group = []
        if isinstance(message, AddRequest):
            group.append(message)
        else:
            yield message
    yield from _packed(group)


def unshare(messages: Iterable[ToWorker | AddChildren]) -> Iterator[ToWorker]:
    """What `share` was given."""
    for message in messages:
        if isinstance(message, AddChildren):
            yield from message.requests()
        else:
            yield message


def _packed(group: list[AddRequest]) -> Iterator[ToWorker | AddChildren]:
    if len(group) < 2:
        yield from group
        return
    places: dict[int, int] = {}  # id of a prompt -> its index; the group keeps all prompts alive
    prompts: list[list[int]] = []
    children = []
    for request in group:
        prompt, sampling = request.prompt_token_ids, request.sampling
        place = places.setdefault(id(prompt), len(prompts))
        if place == len(prompts):
            prompts.append(prompt)
        own = (sampling.seed, sampling.max_tokens, sampling.prompt_logprobs)
        children.append(Child(request.request_id, place, *own))
    first = group[0]
    yield AddChildren(prompts, first.sampling, children, first.priority, first.cache_salt)


def _are_alike(first: AddRequest, other: AddRequest) -> bool:
    return (
        first.priority == other.priority
        and first.cache_salt == other.cache_salt
        and _share_parameters(first.sampling, other.sampling)
    )


def _share_parameters(first: SamplingParams, other: SamplingParams) -> bool:
    """Whether they differ in nothing but what `Child` carries; lists must be the same objects,
    since comparing long ones would take time on the event loop."""
    for field in msgspec.structs.fields(SamplingParams):
        if field.name not in _OWN:
            mine, others = getattr(first, field.name), getattr(other, field.name)
            if mine is not others and (isinstance(mine, list | dict) or mine != others):
                return False
    return True
