"""Data for training and evaluation: associative recall, random keys, MQAR, and text."""
