"""Mirror speculative decoding (Bhendawade et al., 2025): drafting while the target verifies."""
