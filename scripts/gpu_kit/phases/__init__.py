"""The phases, one a file: PARTS holds what runs in a process of its own, in order."""
