"""The report of `slipstream verify` as a page of HTML."""
