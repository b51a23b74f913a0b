"""What several experiments share: models, texts, tables, and the look of figures."""
