"""Packs requests that share prompt and parameters into one message, so that each part is sent once.

The children of one HTTP request (`n`, or several prompts) differ only in their ids, seeds and
token limits. Sent one by one, 128 children would carry 128 copies of a long prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from .messages import AddChildren, AddRequest, Child, SamplingParams, ToWorker

_OWN = {"seed", "max_tokens", "prompt_logprobs"}  # the parameters that `Child` carries


def share(messages: Iterable[ToWorker]) -> Iterator[ToWorker | AddChildren]:
    """Yield the messages in order, with adjacent requests of equal parameters packed into one."""
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
    """Undo `share`: yield the original messages."""
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
    """True if the two differ only in what `Child` carries.

    Lists must be the same objects, since comparing long ones would block the event loop.
    """
    for field in msgspec.structs.fields(SamplingParams):
        if field.name not in _OWN:
            mine, others = getattr(first, field.name), getattr(other, field.name)
            if mine is not others and (isinstance(mine, list | dict) or mine != others):
                return False
    return True
