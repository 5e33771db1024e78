"""Read the files of strangers within limits. Write our own files completely or not at all."""
