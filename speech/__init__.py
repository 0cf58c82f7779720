"""Speech in, text out. Nothing here imports sglang."""
