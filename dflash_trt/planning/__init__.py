"""On paper, from configurations alone: what a pair takes on a GPU, and what is left."""
