"""From token ids to text, and where an answer ends."""
