"""Rewrites the limits of numbers into forms that the compiler enforces.

The compiler generates numbers between limits with up to six decimals, and multiples only of
integers without limits. Multiples between two limits are therefore listed one by one.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from .shape import Context, Schema, SchemaError

MAX_LISTED = 1000  # multiples that are listed at most
_MAX_DIVISOR = 1024  # the compiler's automaton has one state per remainder
_DECIMALS = 6
_INT64 = (-(2**63) + 1, 2**63 - 1)  # the compiler's integers, with room for its arithmetic


def limit_number(schema: Schema, context: Context) -> Schema:
    """The schema, of type number or integer, with limits that the compiler enforces.

    Raises SchemaError if no number satisfies it, and, if strict, for an unenforceable multipleOf.
    Changes `schema` in place where it can."""
    _replace_flags(schema)
    factor = Fraction(str(schema["multipleOf"])) if "multipleOf" in schema else None
    if factor is not None and factor.denominator == 1:
        schema["type"] = "integer"
    elif factor is not None and schema["type"] == "integer":
        factor = Fraction(factor.numerator)  # the integers among the multiples of a / b: those of a
    if schema["type"] == "integer":
        _limit_integer(schema)
    low, high = _range(schema)
    if low is not None and high is not None and low > high:
        kind = "integer" if schema["type"] == "integer" else "number with up to six decimals"
        raise SchemaError(f"no {kind} lies between its limits")
    if factor is None:
        return schema
    if factor == 1:
        del schema["multipleOf"]
        return schema
    if low is None and high is None and factor.denominator == 1 and factor <= _MAX_DIVISOR:
        schema["multipleOf"] = int(factor)
        return schema
    if low is not None and high is not None and (high - low) / factor <= MAX_LISTED:
        context.budget.spend(int((high - low) / factor))
        return _multiples(schema, low, high, factor)
    why = (
        f"can be enforced only for integers up to {_MAX_DIVISOR} without limits, or between a "
        f"minimum and a maximum with up to {MAX_LISTED} multiples"
    )
    context.refuse(schema, {"multipleOf"}, why)
    return schema


def _replace_flags(schema: Schema) -> None:
    """Turn the boolean exclusiveMinimum and exclusiveMaximum of older drafts into numbers.

    In those, `exclusiveMinimum: true` excludes the value of `minimum` itself."""
    for flag, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(schema.get(flag), bool):
            if schema.pop(flag) and bound in schema:
                schema[flag] = schema.pop(bound)


def _limit_integer(schema: Schema) -> None:
    """Make the limits of an integer inclusive 64-bit integers, in place."""
    lows = [math.ceil(schema["minimum"])] if "minimum" in schema else []
    highs = [math.floor(schema["maximum"])] if "maximum" in schema else []
    if "exclusiveMinimum" in schema:
        lows.append(math.floor(schema.pop("exclusiveMinimum")) + 1)
    if "exclusiveMaximum" in schema:
        highs.append(math.ceil(schema.pop("exclusiveMaximum")) - 1)
    for name, found in (("minimum", lows), ("maximum", highs)):
        if found:
            bound = max(found) if name == "minimum" else min(found)
            if bound > _INT64[1] if name == "minimum" else bound < _INT64[0]:
                raise SchemaError(f"{name!r} is too large for an integer of 64 bits")
            schema[name] = min(max(bound, _INT64[0]), _INT64[1])


def _range(schema: Schema) -> tuple[Fraction | None, Fraction | None]:
    """The lowest and highest allowed number with at most six decimals (integers: none); None is
    no limit."""
    step = Fraction(1, 1 if schema["type"] == "integer" else 10**_DECIMALS)
    lows, highs = [], []
    if "minimum" in schema:
        lows.append(math.ceil(_exact(schema["minimum"]) / step) * step)
    if "exclusiveMinimum" in schema:
        lows.append((math.floor(_exact(schema["exclusiveMinimum"]) / step) + 1) * step)
    if "maximum" in schema:
        highs.append(math.floor(_exact(schema["maximum"]) / step) * step)
    if "exclusiveMaximum" in schema:
        highs.append((math.ceil(_exact(schema["exclusiveMaximum"]) / step) - 1) * step)
    return max(lows, default=None), min(highs, default=None)


def _exact(value: Any) -> Fraction:
    return Fraction(str(value))


def _multiples(schema: Schema, low: Fraction, high: Fraction, factor: Fraction) -> Schema:
    first, last = math.ceil(low / factor), math.floor(high / factor)
    found = [number * factor for number in range(first, last + 1)]
    if not found:
        raise SchemaError("no multiple of 'multipleOf' lies between its limits")
    return _exact_values([int(v) if v.denominator == 1 else float(v) for v in found])


def listed(values: list[Any], context: Context) -> Schema:
    """A schema that allows exactly those of the values that the compiler represents exactly.

    Raises SchemaError if there are none."""
    able = [value for value in values if _is_exact(value, context)]
    if not able:
        raise SchemaError("its integers do not fit into 64 bits")
    return _exact_values(able)


def _is_exact(value: Any, context: Context) -> bool:
    """Whether all integers in the value fit into 64 bits; the compiler would round others."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, int | float) and not _INT64[0] <= item <= _INT64[1]:
            if isinstance(item, int):
                return False
        elif isinstance(item, list | dict):
            context.budget.spend(len(item))
            stack.extend(item.values() if isinstance(item, dict) else item)
    return True


def _exact_values(values: list[Any]) -> Schema:
    """A schema of the values, with each fraction as a range that contains only itself.

    In an enum, the compiler would write 0.1 as 0.10000000000000001."""
    short = [
        v for v in values if isinstance(v, float) and not v.is_integer() and _has_few_decimals(v)
    ]
    taken = set(short)
    rest = [v for v in values if not (isinstance(v, float) and v in taken)]
    if not short:
        return {"enum": rest}
    ranges = [{"type": "number", "minimum": value, "maximum": value} for value in short]
    return {"anyOf": [{"enum": rest}, *ranges] if rest else ranges}


def _has_few_decimals(value: float) -> bool:
    return abs(value) < 1e9 and (Fraction(str(value)) * 10**_DECIMALS).denominator == 1
