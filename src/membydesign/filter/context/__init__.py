"""Context parallelism: one sequence, split in time over processes, is filtered exactly."""
