"""What a trained model can do: perplexity on recall in text."""
