"""Prepares JSON schemas for the grammar compiler, which ignores what it cannot express.

Every schema is rewritten to one that allows no more values than the given one. Keywords that cannot
be enforced are rejected if the client wants a guarantee (strict), and dropped if it does not.
Clients choose size and depth of a schema, so a `Budget` bounds the work, and tree walks keep their
own stack instead of recursing.
"""

from .prepare import prepare_schema
from .shape import MAX_GRAMMAR_CHARS, Budget, SchemaError, check_shape

__all__ = ["MAX_GRAMMAR_CHARS", "Budget", "SchemaError", "check_shape", "prepare_schema"]
