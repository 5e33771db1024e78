"""Files of strangers read within bounds, and files of our own written whole or not at all."""
