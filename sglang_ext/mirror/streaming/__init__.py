"""Lookahead streams in the draft model: several tokens a pass, proposed by it and verified by it.

Source: Speculative Streaming (Bhendawade et al., 2024) as Mirror-SD uses it in its draft (section
3.2). On the draft model alone: in the target it would change what is written.
"""
