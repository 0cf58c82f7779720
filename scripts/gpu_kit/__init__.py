"""What a machine with a GPU has to show of the CUDA path: docs/gpu.md."""
