"""Plan from configurations alone: a pair's memory on a GPU, and the largest context and batch."""
