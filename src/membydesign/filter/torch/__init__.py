"""Filters in torch, for any device: chunks of a dense covariance, and the mean given gains."""
