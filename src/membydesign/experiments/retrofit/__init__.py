"""Bayesian Layers distilled into a pretrained Gated DeltaNet."""
