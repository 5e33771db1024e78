"""From token ids to text, and the end of an answer."""
