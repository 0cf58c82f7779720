"""Drafting while the target is still verifying, after Mirror speculative decoding.

Source: Bhendawade et al., Mirror Speculative Decoding (Apple, 2025). In the middle of a pass the
target's early exit says what is likely to come (`early_exit`), and drafts for the likely outcomes
are prepared while the second half of the pass runs. docs/mirror.md says what is the paper's.
"""
