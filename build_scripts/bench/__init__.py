"""One script for each published number."""
