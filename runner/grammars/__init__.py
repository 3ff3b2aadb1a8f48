"""Structured output: compiles grammars in processes of their own and asks them for token masks."""
