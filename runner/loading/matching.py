"""Matches the tensors of a checkpoint with the slots of a model, by names and shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from ..errors import ModelLoadError
from ..models.layers import CheckpointSlot
from ..parallel.ranks import Cut
from .inspection import Stored

# Of weights of which a part is wanted: name -> (shape of the whole, its part)
WantedParts = Mapping[str, tuple[Sequence[int], Cut]]
_MAX_NAMED = 5  # tensor names in an error message


def match_names(
    slots: Mapping[str, CheckpointSlot],
    names: Sequence[str],
    checkpoint_name: Callable[[str], str | None],
    source: str,
    spare: Collection[str] = (),
) -> dict[str, str | None]:
    """Map each stored tensor to its slot. Raises ModelLoadError unless they match one to one.

    Optional slots may stay empty. Tensors that map to None are skipped, and `spare` ones without a
    slot.
    """
    targets = {name: checkpoint_name(name) for name in names}
    for name in spare:
        if targets.get(name) not in slots:
            targets.pop(name, None)
    wanted = [target for target in targets.values() if target is not None]
    _complain(
        f"{source} has unexpected tensors", [n for n, t in targets.items() if t and t not in slots]
    )
    twice = [name for name, count in Counter(wanted).items() if count > 1]
    _complain(f"{source} has several tensors for", twice)
    given = set(wanted)
    needed = slots_of_one_form(slots, given)
    missing = [n for n, slot in needed.items() if not slot.optional and n not in given]
    _complain(f"{source} lacks tensors", missing)
    _complain(f"{source} has tensors of a second form", [n for n in given if n not in needed])
    return targets


def slots_of_one_form(
    slots: Mapping[str, CheckpointSlot], given: Collection[str] = ()
) -> dict[str, CheckpointSlot]:
    """Leave out the slots of forms that a checkpoint with the tensors `given` does not use.

    Of what may be stored in several forms, it uses the form of the first tensor that is given, or
    else the first form.
    """
    used: dict[str, str] = {}
    for names in ([name for name in slots if name in given], slots):
        for name in names:
            if (form := slots[name].form) is not None:
                used.setdefault(*form)
    return {
        n: slot
        for n, slot in slots.items()
        if slot.form is None or used[slot.form[0]] == slot.form[1]
    }


def is_part(weight: Stored, slot: CheckpointSlot) -> bool:
    """Whether a weight is the part of its tensor that the slot keeps."""
    cut = slot.cut
    return cut is not None and tuple(weight.shape) == cut.shape_of(slot.shape) != slot.shape


def check_shape(name: str, tensor: Stored, slot: CheckpointSlot, source: str) -> None:
    """Raise ModelLoadError unless a weight has the shape of its slot."""
    if tuple(tensor.shape) != slot.shape:
        raise ModelLoadError(
            f"tensor {name} of {source} has shape {list(tensor.shape)}, but the config "
            f"requires {list(slot.shape)}."
        )


def _complain(what: str, names: list[str]) -> None:
    if names:
        shown = ", ".join(sorted(names)[:_MAX_NAMED])
        more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
        raise ModelLoadError(f"{what}: {shown}{more}.")
