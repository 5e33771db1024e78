"""A bundle on disk: its manifest, its contents, and the work directory in which it is made."""
