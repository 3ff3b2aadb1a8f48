"""Tests at start-up what an attention back end claims to support under graphs."""
