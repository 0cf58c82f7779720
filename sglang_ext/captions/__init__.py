"""`sglang-ext captions FILE|-`: live captions, and their translation.

playback.py -> speech/streaming.py <-> recognition.py (Whisper server)
            -> sentences.py -> translation.py (translation sessions) -> display.py,
               session_summary.py
"""
