"""Reports about a pair, a bundle or a machine: benchmarks, verification, inspection, environment."""
