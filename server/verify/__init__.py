"""The checks of `slipstream verify`: is speculation lossless here, and are the drafts right?"""
