"""SpecASR (arXiv 2507.18181): a small Whisper drafts for a large one.

The draft model (draft_model.py) keeps a tree-masked KV cache per request and runs any number of
requests in one forward pass; vocabulary.py takes text between the two models' tokens;
prediction.py, recycling.py and sparse_tree.py are the paper's algorithms; session.py runs them for
many requests at once; simulate.py tries them without a target. Nothing here imports sglang.
"""

from speech.specasr.draft_model import DraftWhisper
from speech.specasr.draft_options import MODES, SpecASROptions
from speech.specasr.session import DraftSession, SpecASR
from speech.specasr.vocabulary import Vocabularies

__all__ = ["MODES", "DraftSession", "DraftWhisper", "SpecASR", "SpecASROptions", "Vocabularies"]
