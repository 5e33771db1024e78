"""What the engines of a GPU share: arrays, caches and states, the memory of a round, and the sizes of passes."""
