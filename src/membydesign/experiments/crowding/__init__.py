"""Random-key crowding: more keys than a memory has dimensions."""
