"""Text to token ids, and messages to text."""
