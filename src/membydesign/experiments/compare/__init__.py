"""Every design of the catalogue on the same tasks, with equal state budgets."""
