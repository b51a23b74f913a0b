"""What drift does beyond the training length: gains and recall at up to 64 times as many tokens."""
