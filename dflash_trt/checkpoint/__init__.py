"""What is on disk: configurations, tensors and the pairs they form. Needs neither torch nor transformers."""
