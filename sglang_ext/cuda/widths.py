"""The verify widths that a device captures graphs of."""


def default_widths(most: int) -> tuple[int, ...]:
    """1 (a plain step), then powers of two up to `most`, and `most` itself."""
    powers = []
    width = 1
    while width < most:
        powers.append(width)
        width *= 2
    return (*powers, most)
