"""The contract between splitspec's processes: stubs, rows, errors, channels, telemetry keys."""

PROTOCOL_VERSION = 1
