"""What the paper states beside our results, with their provenance, as files and as pages."""
