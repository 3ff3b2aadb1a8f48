"""Prepares JSON schemas for the grammar compiler, which ignores what it cannot express.

Every schema is rewritten to one that admits no more than the given one. What cannot be enforced is
refused, or left out where the client asked for no guarantee. Clients choose size and depth of what
is read here, so a `Budget` bounds the work, and walks use a stack of their own.
"""

from .prepare import prepare_schema
from .shape import MAX_GRAMMAR_CHARS, Budget, SchemaError, check_shape

__all__ = ["MAX_GRAMMAR_CHARS", "Budget", "SchemaError", "check_shape", "prepare_schema"]
