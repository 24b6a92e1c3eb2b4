"""The contract between splitspec's processes: stubs, rows, errors, channels, telemetry keys."""

PROTOCOL_VERSION = 1

ITEMS_A_SLOT = 4
"""Most items of a step for each slot of the service: a step can release a full house, open another,
and prefill and fork for it."""
