"""A household in virtual time: the real scheduler on a device that knows lengths, measured and judged."""
