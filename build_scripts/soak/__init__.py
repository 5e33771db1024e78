"""Hours of load, kills and attacks, and what they leave behind."""
