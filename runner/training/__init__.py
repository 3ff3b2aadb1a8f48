"""The process that trains a drafter for its target."""
