"""Language models from scratch, measured where only a memory knows the next token."""
