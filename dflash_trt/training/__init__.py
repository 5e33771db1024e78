"""Train drafters for your own targets: collect answers, train, measure. Needs the extra `train`."""
