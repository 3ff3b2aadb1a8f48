"""Structured output: compiles grammars in separate processes and gets token masks from them."""
