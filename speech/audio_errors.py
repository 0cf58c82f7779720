"""What can be wrong with an audio file, and with decoding it."""


class AudioError(ValueError):
    """The audio cannot be read; the message says why."""


class AudioTooLong(AudioError):
    """The audio lasts longer than allowed."""


class DecoderDied(AudioError):
    """The process that decoded the audio crashed, or took more memory or time than allowed."""


class DecodersBusy(RuntimeError):
    """Too many audio files wait to be decoded; nothing is wrong with this one."""
