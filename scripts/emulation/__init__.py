"""Stand-ins for a GPU's parts, so that the CUDA path runs on a machine without one; not shipped."""
