"""Generated stubs of protos/splitspec/v1. Regenerate with `make protos`."""
