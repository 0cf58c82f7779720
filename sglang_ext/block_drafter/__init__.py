"""SpecDec's block drafter: a small model that drafts the next k tokens at once, and its training.

Source: SpecDec (arXiv 2203.16487). Plain torch, without SGLang; `sglang_ext.drafters.specdec`
serves it. Nothing is imported here, so that a manifest can be read without torch.
"""
