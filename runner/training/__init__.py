"""The process that trains a drafter on its target."""
