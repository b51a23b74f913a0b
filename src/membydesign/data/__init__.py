"""What models are trained and tested on: recall, random keys, MQAR, text."""
