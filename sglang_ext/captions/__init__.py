"""`sglang-ext captions FILE|-`: live captions, and their translation.

playback.py -> speech/streaming.py <-> recognition.py (Whisper server)
            -> sentences.py -> translation.py (translation sessions) -> display.py, summary.py
"""

from sglang_ext.commands.captions import add_commands

__all__ = ["add_commands"]
