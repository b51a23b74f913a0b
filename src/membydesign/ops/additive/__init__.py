"""Filters whose write observes only its own coefficient: `LatentInput`."""
