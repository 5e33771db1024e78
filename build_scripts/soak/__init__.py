"""Long tests: hours of load, kills and attacks, and checks of the remains."""
