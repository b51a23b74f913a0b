"""Multi-query associative recall with a shared vocabulary: base, update and block."""
